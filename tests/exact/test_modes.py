"""Whole runs in every mode: parity at ratio 0, resume, skipped steps, long runs, and the rest of the engine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import jobs
from tests.exact.cells import LAYERS, MODES, Cell, Layer
from tests.exact.job import build, inner, parts, pipeline_of
from tests.exact.reference import inputs_of
from tests.harness import run_ranks

STOCK = {"enabled": False}
ZERO = {"enabled": True, "warmup_steps": 3, "profile_steps": 3, "planning": {"max_freeze_ratio": 0}}
# One plan only: later plans depend on timings, which no two runs share.
PLANNED = {
    "enabled": True, "warmup_steps": 3, "profile_steps": 4, "ramp_steps": 3, "replan_interval": 1000,
    "selection": "spread", "planning": {"time_slack": 0.0, "background": False, "drift_tolerance": 1e9},
}  # fmt: skip


def batch(cell: Cell, step: int, replica: int) -> Any:
    return iter([inputs_of(cell, step, m, replica) for m in range(cell.micro_batches)])


def slow_weight_gradients(engine: Any, seconds: float = 0.001) -> None:
    """Sleep wherever autograd computes a parameter's gradient, so that freezing pays."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad and not hasattr(parameter, "slowed"):
            parameter.slowed = parameter.register_hook(lambda grad: time.sleep(seconds))


def train(engine: Any, cell: Cell, steps: range) -> list[float]:
    slow_weight_gradients(engine)
    replica = engine.grid.get_data_parallel_id()
    return [float(engine.train_batch(batch(cell, step, replica))) for step in steps]


def state(engine: Any, cell: Cell) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of this rank."""
    return {
        f"{name} {key}": value
        for name, parameter in engine.module.named_parameters()
        for key, (_, value) in parts(engine, cell, parameter).items()
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# -- ratio 0 -----------------------------------------------------------------------------------------------------------


def parity_job(cells: list[Cell]) -> dict[str, bool]:
    same = {}
    for cell in cells:
        runs = []
        for block in (STOCK, ZERO):
            engine = build(cell, block)
            assert type(engine).__name__ == ("FreezePipelineEngine" if block is ZERO else "PipelineEngine")
            losses = train(engine, cell, range(20))
            runs.append((losses, state(engine, cell)))
        same[cell.name] = runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])
    return same


@pytest.mark.parametrize(("stages", "dp"), [(2, 1), (2, 2)])
def test_ratio_zero_is_stock_to_the_bit_in_every_mode(stages: int, dp: int) -> None:
    cells = [Cell(mode=mode, stages=stages, dp=dp, clip=None) for mode in MODES]
    if dp == 1:
        cells += [Cell(mode=mode, checkpointing=(1, reentrant)) for mode in ("fp32", "bf16") for reentrant in (True, False)]
        cells += [Cell(mode=mode, tied=True) for mode in ("fp32", "bf16", "bf16 zero1")]
        cells += [Cell(mode="fp32", optimizer="fused adamw")]
    for same in run_ranks(parity_job, stages * dp, cells):
        assert same and [name for name, ok in same.items() if not ok] == []


# -- resume ------------------------------------------------------------------------------------------------------------


# Where runs are saved and killed: the block's changes, and the steps with the phase each is in. A plan depends on timings, which
# no two runs share, so the first two end while profiling goes on and the others begin with the plan.
LONG_PROFILE = PLANNED | {"profile_steps": 30}
KILLS = ((LONG_PROFILE, {2: "warmup", 5: "profile"}), (PLANNED, {9: "ramp", 14: "steady"}))
GO_ON = 20  # steps


def killed_job(cells: list[Cell], folder: str) -> None:
    """Train and save; note what the steps after each save brought; die."""
    for cell in cells:
        for block, points in KILLS:
            engine = build(cell, block)
            losses: dict[int, float] = {}
            for step in range(max(points) + GO_ON):
                if step in points:
                    assert engine.freeze_controller.phase == points[step]
                    engine.save_checkpoint(f"{folder}/{cell.name}/{points[step]}")
                (losses[step],) = train(engine, cell, range(step, step + 1))
                started = step + 1 - GO_ON
                if started in points:
                    after = ([losses[s] for s in range(started, step + 1)], state(engine, cell))
                    torch.save(after, f"{folder}/{cell.name}/{points[started]}/rank{engine.global_rank}.pt")
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed_job(cells: list[Cell], folder: str) -> dict[str, bool]:
    """In new processes: whether the same steps bring the same bits."""
    same = {}
    for cell in cells:
        for block, points in KILLS:
            for save_at, phase in points.items():
                engine = build(cell, block)
                engine.load_checkpoint(f"{folder}/{cell.name}/{phase}")
                assert engine.freeze_controller.phase == phase
                losses = train(engine, cell, range(save_at, save_at + GO_ON))
                expected = torch.load(f"{folder}/{cell.name}/{phase}/rank{engine.global_rank}.pt")
                same[f"{cell.name}, {phase}"] = losses == expected[0] and equal(state(engine, cell), expected[1])
    return same


@pytest.mark.parametrize(("stages", "dp"), [(2, 1), (2, 2)])
def test_new_processes_go_on_where_killed_ones_had_saved(tmp_path: Path, stages: int, dp: int) -> None:
    cells = [Cell(mode=mode, stages=stages, dp=dp) for mode in MODES]
    with pytest.raises(AssertionError, match="-9"):
        run_ranks(killed_job, stages * dp, cells, str(tmp_path))
    for same in run_ranks(resumed_job, stages * dp, cells, str(tmp_path)):
        assert len(same) == 4 * len(cells) and [name for name, ok in same.items() if not ok] == []


def resumed_again_job(folder: str) -> list[str]:
    """A resumed run saves and resumes as well as the first."""
    cell = Cell(mode="bf16 zero1")
    engine = build(cell, PLANNED)
    phases = []
    for save_at in (5, 9, 14):
        train(engine, cell, range(engine.freeze_controller.step, save_at))
        engine.save_checkpoint(folder)
        twin = build(cell, PLANNED)
        twin.load_checkpoint(folder)
        states = [json.dumps(run.freeze_controller.state_dict()) for run in (engine, twin)]  # text, for NaN is not NaN
        assert states[0] == states[1]
        assert equal(state(twin, cell), state(engine, cell))
        phases.append(twin.freeze_controller.phase)
        engine = twin
    return phases


def test_a_resumed_run_is_saved_and_resumed_again(tmp_path: Path) -> None:
    assert run_ranks(resumed_again_job, 2, str(tmp_path)) == [["profile", "ramp", "steady"]] * 2


def exchange_job(folder: str) -> dict[str, str]:
    """Stock and ours load each other's checkpoints, where stock can load its own."""
    found = {}
    for mode in ("fp32 zero1", "bf16 zero1", "bf16 zero1 fp32-accum"):
        cell = Cell(mode=mode)
        stock, ours = build(cell, STOCK), build(cell, PLANNED)
        train(stock, cell, range(4))
        train(ours, cell, range(9))
        stock.save_checkpoint(f"{folder}/{mode}", tag="stock")
        ours.save_checkpoint(f"{folder}/{mode}", tag="ours")
        for tag, block, saved in (("stock", PLANNED, stock), ("ours", STOCK, ours)):
            loaded = build(cell, block)
            loaded.load_checkpoint(f"{folder}/{mode}", tag=tag)
            found[f"{mode}, {tag}"] = "equal" if equal(state(loaded, cell), state(saved, cell)) else "differs"
    # bf16 without ZeRO: stock's own checkpoint, which stock itself cannot load.
    cell = Cell(mode="bf16")
    stock = build(cell, STOCK)
    train(stock, cell, range(4))
    stock.save_checkpoint(f"{folder}/bf16", tag="stock")
    ours = build(cell, PLANNED)
    ours.load_checkpoint(f"{folder}/bf16", tag="stock")
    found["bf16, stock"] = "equal" if equal(state(ours, cell), state(stock, cell)) else "differs"
    # A warm start takes the loaded weights as its masters.
    warm = build(cell, PLANNED)
    warm.load_checkpoint(f"{folder}/bf16", tag="stock", load_optimizer_states=False)
    masters = [parts(warm, cell, p) for p in warm.module.parameters()]
    found["bf16, warm"] = "equal" if all(
        torch.equal(p["master"][1].bfloat16().flatten(), p["weight"][1].flatten()) for p in masters
    ) else "differs"  # fmt: skip
    return found


def test_stock_and_ours_load_each_others_checkpoints(tmp_path: Path) -> None:
    for found in run_ranks(exchange_job, 2, str(tmp_path)):
        assert len(found) == 8 and set(found.values()) == {"equal"}, found


def partitions_job(folder: str) -> tuple[bool, bool, list[str]]:
    from rlfreeze_ds.errors import RLFreezeError

    cell = Cell(mode="bf16", stages=1, dp=2)
    stock = build(cell, STOCK)
    train(stock, cell, range(2))
    stock.save_checkpoint(folder, tag=0)
    ours = build(cell, PLANNED)
    ours.load_checkpoint(folder, tag="0")
    same = equal(state(ours, cell), state(stock, cell))
    ours.save_checkpoint(folder, tag=0)
    kept = Path(folder, "0", "rlfreeze_state.json").exists()
    torch.distributed.barrier()
    partition = Path(folder, "0", f"bf16_zero_pp_rank_{ours.global_rank}_mp_rank_00_optim_states.pt")
    messages = []
    for spoil in (lambda: torch.save(_halved(partition), partition), partition.unlink):
        spoil()
        torch.distributed.barrier()
        try:
            build(cell, PLANNED).load_checkpoint(folder, tag="0")
        except RLFreezeError as error:
            messages.append(str(error))
    return same, kept, messages


def _halved(path: Path) -> dict[str, Any]:
    """As if saved by a job with twice as many replicas."""
    content = torch.load(path, weights_only=False)
    state = content["optimizer_state_dict"]
    masters = [master[: len(master) // 2] for master in state["single_partition_of_fp32_groups"]]
    return content | {"optimizer_state_dict": state | {"single_partition_of_fp32_groups": masters}}


def test_every_partition_of_a_bf16_optimizer_is_loaded_or_named(tmp_path: Path) -> None:
    for same, kept, messages in run_ranks(partitions_job, 2, str(tmp_path)):
        assert same and kept and len(messages) == 2
        assert "partitions of" in messages[0] and "not found" in messages[1]
        assert all("load_optimizer_states=False" in message for message in messages)


def excluded_job(folder: str) -> set[str]:
    """A checkpoint without what the user froze, taken while units are frozen by us."""
    cell = Cell(mode="fp32", user_frozen="biases")
    engine = build(cell, PLANNED)
    train(engine, cell, range(14))
    assert any(engine._step_masks.masks) or engine.stage_id
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    names = set()
    for path in Path(folder).glob("global_step14/layer_*-model_states.pt"):
        layer = int(path.name.split("_")[1].split("-")[0])
        names |= {f"{layer}.{name}" for name in torch.load(path, weights_only=False)}
    return names


def test_a_checkpoint_without_frozen_parameters_keeps_what_we_froze(tmp_path: Path) -> None:
    for names in run_ranks(excluded_job, 2, str(tmp_path)):
        assert not any(name.endswith("bias") for name in names)
        assert sum(name.endswith(("weight", "gain")) for name in names) == 2 * 5


# -- skipped steps -----------------------------------------------------------------------------------------------------


def skipped_job(mode: str, folder: str) -> dict[str, Any]:
    os.environ["RLFREEZE_RUN_DIR"] = folder
    cell = Cell(mode=mode, clip=None)
    engine = build(cell, PLANNED)
    train(engine, cell, range(12))
    controller = engine.freeze_controller
    before = state(engine, cell)
    remembered = (controller.phase, controller.phase_step, controller.guard.average, controller.criterion.state_dict())
    poisoned = [inputs_of(cell, 12, m, 0) for m in range(cell.micro_batches)]
    poisoned[1] = (poisoned[1][0], torch.full_like(poisoned[1][1], float("inf")))
    engine.train_batch(iter(poisoned))
    skipped = engine.skipped_steps
    # The guard takes the loss of the step before at the end of each step, skipped or not.
    after = (controller.phase, controller.phase_step, remembered[2], controller.criterion.state_dict())
    untouched = equal(before, state(engine, cell)) and json.dumps(after) == json.dumps(remembered)
    losses = train(engine, cell, range(13, 16))
    froze = any(engine._step_masks.masks)
    return {"skipped": skipped, "untouched": untouched, "step": controller.step, "losses": losses, "froze": froze}


@pytest.mark.parametrize("mode", ["fp32 zero1", "bf16", "bf16 zero1", "bf16 zero1 fp32-accum"])
def test_a_step_skipped_for_infinity_changes_neither_weights_nor_statistics_nor_phase(tmp_path: Path, mode: str) -> None:
    results = run_ranks(skipped_job, 2, mode, str(tmp_path))
    logged = [json.loads(line) for line in (tmp_path / "rlfreeze.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if line.get("event") == "step" and line["loss"] is None] == [12]
    for result in results:
        assert result["skipped"] == 1 and result["untouched"] and result["step"] == 16
        assert all(loss == loss for loss in result["losses"])
    assert any(result["froze"] for result in results)


def fp16_job(accumulation: str) -> dict[str, Any]:
    """fp16 on the CPU, which DeepSpeed calls unsupported: enough to walk through overflow and loss scaling."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    cell = Cell(mode=f"fp16 zero1{accumulation}", clip=None)
    engine = build(cell, PLANNED)
    slow_weight_gradients(engine)
    phases, skipped, untouched, statistics = [], [], [], []
    controller = engine.freeze_controller
    for step in range(20):
        before, phase = state(engine, cell), (controller.phase, controller.phase_step)
        engine.train_batch(batch(cell, step, 0))
        now = state(engine, cell)
        overflow = engine.optimizer.overflow
        skipped.append(overflow)
        phases.append(phase != (controller.phase, controller.phase_step))
        frozen = {u for u in range(len(controller.units)) if all(u in mask for mask in engine._step_masks.masks)}
        names = {controller.units[u].name for u in frozen}
        untouched.append(
            all(torch.equal(now[key], value) for key, value in before.items() if overflow or key.split()[0] in names)
        )
        statistics.append(controller.criterion.state_dict()["norm"])
    return {"skipped": skipped, "moved on": phases, "untouched": untouched, "norms": statistics}


@pytest.mark.parametrize("accumulation", ["", " fp32-accum"])
def test_fp16_overflow_steps_count_for_nothing(accumulation: str) -> None:
    for result in run_ranks(fp16_job, 2, accumulation):
        assert 0 < sum(result["skipped"]) < 10
        assert all(result["untouched"])
        # Steady never advances its count into another phase, so only the steps before it tell.
        assert not any(moved for skip, moved in zip(result["skipped"], result["moved on"], strict=True) if skip)
        # Unscaled: the loss scale is in the thousands.
        assert all(norm < 100 for norms in result["norms"] for norm in norms if norm == norm)


# -- long runs and the rest of the engine -------------------------------------------------------------------------------


def soak_job(mode: str) -> dict[int, dict[str, int]]:
    from rlfreeze_ds.controller import StepMasks
    from rlfreeze_ds.freezing.masks import step_masks

    cell = Cell(mode=mode)
    engine = build(cell, PLANNED | {"replan_interval": 50})
    controller = engine.freeze_controller
    decided = controller.begin_step

    def begin_step(num_micro_batches: int) -> StepMasks:
        if controller.step < 60:  # the controller's own, through all its phases
            return decided(num_micro_batches)
        weights = controller.shape.weights
        masks = step_masks(
            [0.4] * num_micro_batches, weights, [True] * len(weights), selection="spread", whole=controller.step % 7 == 0,
            seed=0, step=controller.step, stage_id=engine.stage_id,
        )  # fmt: skip
        if controller.step % 2:  # every other step with units frozen throughout
            masks = (masks[0],) * num_micro_batches
        return StepMasks(controller.step, controller.phase, masks)

    controller.begin_step = begin_step
    slow_weight_gradients(engine, 0.0005)

    def resident_mib() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) >> 10
        return 0

    counts = {}
    masks = set()
    for step in range(500):
        engine.train_batch(batch(cell, step, 0))
        masks.add(engine._step_masks.masks)
        if step + 1 in (150, 500):
            optimizer = inner(engine)
            counts[step + 1] = {
                "parameter hooks": sum(len(p._backward_hooks or ()) for p in engine.module.parameters()),
                "step hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
                "optimizer state": len(optimizer.state),
                "threads": threading.active_count(),
                "files": len(os.listdir("/proc/self/fd")),
                "resident MiB": resident_mib(),
            }
    return counts | {0: {"masks": len(masks)}}


@pytest.mark.parametrize("mode", ["bf16", "bf16 zero1"])
def test_five_hundred_steps_with_changing_masks_grow_nothing(mode: str) -> None:
    results = run_ranks(soak_job, 2, mode)
    for counts in results:
        early, late = counts[150], counts[500]
        assert late.pop("resident MiB") <= early.pop("resident MiB") + 8
        assert early == late
    assert all(counts[0]["masks"] > 150 for counts in results)


def extras_job(folder: str, block: dict[str, Any], stages: int) -> dict[str, Any]:
    """Monitor, profilers, a dataset in place of an iterator, and shapes that change."""
    import multiprocessing

    import deepspeed
    from deepspeed.pipe import LayerSpec

    import rlfreeze_ds

    multiprocessing.current_process()._config["daemon"] = False  # DeepSpeed's data loader starts workers
    cell = Cell(mode="bf16 zero1", stages=stages)
    config = cell.config() | {
        "rlfreeze": block,
        "steps_per_print": 2,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
    }
    if stages == 1:  # on more stages stock 0.19.8 itself fails with these two ("timer has already been started")
        config["wall_clock_breakdown"] = True
        config["flops_profiler"] = {"enabled": True, "profile_step": 3, "output_file": f"{folder}/flops.txt"}
    samples = [(x[0], y[0]) for step in range(40) for x, y in [inputs_of(cell, step, 0, 0)]]
    model = pipeline_of(cell, [LayerSpec(Layer) for _ in range(LAYERS)])
    engine = rlfreeze_ds.initialize(model=model, config=config, training_data=samples)[0]
    slow_weight_gradients(engine)
    losses = [float(engine.train_batch()) for _ in range(6)]
    for step, size in ((6, 3), (7, 1), (8, 2)):  # samples per micro-batch stand for a curriculum's changing lengths
        engine.reset_activation_shape()
        given = [inputs_of(cell, step, m, 0) for m in range(4)]
        losses.append(float(engine.train_batch(iter([(x.repeat(2, 1)[:size], y.repeat(2, 1)[:size]) for x, y in given]))))
    engine.reset_activation_shape()
    losses += [float(engine.train_batch(batch(cell, step, 0))) for step in range(9, 14)]
    engine.module.eval()
    engine.module.train()
    evaluated = float(engine.eval_batch(batch(cell, 99, 0)))
    losses.append(float(engine.train_batch(batch(cell, 14, 0))))
    deepspeed.comm.barrier()
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.csv"))
    rows = [len(Path(folder, file).read_text().splitlines()) for file in files]
    phase = engine.freeze_controller.phase if hasattr(engine, "freeze_controller") else None
    return {"losses": losses, "evaluated": evaluated, "files": files, "rows": rows, "phase": phase}


@pytest.mark.parametrize("stages", [1, 2])
def test_the_rest_of_the_engine_behaves_as_stock(tmp_path: Path, stages: int) -> None:
    folders = [tmp_path / name for name in ("stock", "zero", "frozen")]
    for folder in folders:
        folder.mkdir()
    stock, zero, frozen = (
        run_ranks(extras_job, stages, str(folder), block, stages)
        for folder, block in zip(folders, (STOCK, ZERO, PLANNED), strict=True)
    )
    for rank in range(stages):
        assert stock[rank]["losses"] == zero[rank]["losses"] and stock[rank]["evaluated"] == zero[rank]["evaluated"]
        assert stock[rank]["files"] == zero[rank]["files"] == frozen[rank]["files"]
        assert stock[rank]["rows"] == zero[rank]["rows"] == frozen[rank]["rows"] and stock[0]["rows"]
        assert frozen[rank]["phase"] == "steady" and frozen[rank]["losses"][:3] == stock[rank]["losses"][:3]


def evaluating_job() -> dict[str, Any]:
    import rlfreeze_ds

    found = {}
    for mode in ("fp32", "bf16"):
        cell = Cell(mode=mode)
        config = cell.config()
        del config["optimizer"]
        losses = []
        for block in (STOCK, PLANNED):
            model = pipeline_of(cell, [_layer_spec() for _ in range(LAYERS)])
            engine = rlfreeze_ds.initialize(model=model, config=config | {"rlfreeze": block})[0]
            losses.append(float(engine.eval_batch(batch(cell, 0, 0))))
        found[mode] = losses
    return found


def _layer_spec() -> Any:
    from deepspeed.pipe import LayerSpec

    return LayerSpec(Layer)


def test_an_engine_without_an_optimizer_evaluates_as_stock() -> None:
    for found in run_ranks(evaluating_job, 2):
        assert found and all(ours == stock for stock, ours in found.values())


def nothing_to_train_job(modes: list[str]) -> dict[str, str]:
    from rlfreeze_ds.errors import UnsupportedError

    messages = {}
    for mode in modes:
        try:
            build(Cell(mode=mode, user_frozen="first stage"))
            messages[mode] = "no error"
        except UnsupportedError as error:
            messages[mode] = str(error)
    return messages


def test_a_stage_that_the_user_froze_is_one_error_where_deepspeed_can_make_no_optimizer() -> None:
    modes = [mode for mode in MODES if mode != "fp32"]
    for messages in run_ranks(nothing_to_train_job, 2, modes):
        assert len(messages) == len(modes)
        for message in messages.values():
            assert "on stage 0" in message and "requires_grad" in message and "fp32 without ZeRO" in message


class Tokens(torch.nn.Module):
    """An embedding: its input is whole numbers, so what follows it needs a gradient only for its sake."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, jobs.WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)


def frozen_embedding_job() -> list[dict[str, torch.Tensor]]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    import rlfreeze_ds
    from rlfreeze_ds.controller import StepMasks

    runs = []
    for interval in (0, 1):
        cell = Cell(checkpointing=(interval, True))
        model = PipelineModule(
            [LayerSpec(Tokens), *(LayerSpec(Layer) for _ in range(3))],
            num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform", seed_layers=True, base_seed=7,
            checkpointable_layers=["Layer"],
        )  # fmt: skip
        engine = rlfreeze_ds.initialize(model=model, config=cell.config())[0]
        controller = engine.freeze_controller
        embedding = tuple(i for i, unit in enumerate(controller.units) if "embedding" in unit.name)

        def begin_step(num: int, controller: Any = controller, embedding: Any = embedding) -> StepMasks:
            return StepMasks(controller.step, "test", (embedding,) * num if controller.step % 2 else (embedding, (), (), ()))

        controller.begin_step = begin_step
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            tokens = [torch.randint(16, (2,), generator=generator) for _ in range(4)]
            labels = [torch.rand(2, jobs.WIDTH, generator=generator) for _ in range(4)]
            engine.train_batch(iter(list(zip(tokens, labels, strict=True))))
        runs.append(jobs.weights(engine))
    return runs


def test_layers_behind_a_frozen_embedding_train_under_reentrant_checkpointing() -> None:
    """Reentrant checkpointing drops the gradients of a segment whose input needs none, without an error."""
    for plain, checkpointed in run_ranks(frozen_embedding_job, 2):
        assert plain.keys() == checkpointed.keys()
        for name, value in plain.items():
            assert torch.equal(value, checkpointed[name]), name


def other_topology_job(folder: str, stages: int) -> dict[str, Any]:
    cell = Cell(stages=stages)
    engine = build(cell, PLANNED)
    if stages == 2:
        train(engine, cell, range(12))
        engine.save_checkpoint(folder)
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    engine.load_checkpoint(folder, load_optimizer_states=False)
    loaded = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    controller = engine.freeze_controller
    started = (controller.phase, controller.decision)
    losses = train(engine, cell, range(12, 24))
    return {"loaded": loaded, "started": started, "phase": controller.phase, "finite": all(loss == loss for loss in losses)}


def test_another_number_of_stages_loads_the_model_and_plans_afresh(tmp_path: Path) -> None:
    saved: dict[str, torch.Tensor] = {}
    for rank in run_ranks(other_topology_job, 2, str(tmp_path), 2):
        saved.update(rank)
    (result,) = run_ranks(other_topology_job, 1, str(tmp_path), 1)
    assert result["started"] == ("warmup", None) and result["phase"] == "steady" and result["finite"]
    assert saved.keys() == result["loaded"].keys()
    assert all(torch.equal(value, result["loaded"][name]) for name, value in saved.items())
