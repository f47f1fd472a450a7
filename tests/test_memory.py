"""Memory in real jobs: what a micro-batch keeps against sums by hand, peaks against predictions, and the limit."""

from __future__ import annotations

import gc
import json
import logging
import operator
import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlfreeze_ds.checkpoint import FILE_NAME
from rlfreeze_ds.log import logger
from rlfreeze_ds.masked_schedule import BackwardInputPass
from rlfreeze_ds.planning.memory import StageMemory, peak_bytes
from rlfreeze_ds.planning.schedule import from_commands, to_commands
from rlfreeze_ds.planning.transfers import blocking_1f1b, blocking_zb_h1
from rlfreeze_ds.telemetry.memory_probe import MeasuredMemory
from tests import jobs
from tests.harness import run_ranks
from tests.test_engine import QUICK

MICRO_BATCHES = 4
LAYERS = 3  # of a stage
SCHEDULES = ("stock", "zb-h1", "planned")
NO_MATTER = {"memory_limit_bytes": 10**9}  # stock's order is measured for a limit alone
TENSOR = 2 * jobs.WIDTH * 4  # [2, WIDTH] in fp32: every activation, input, label and gradient of these jobs


def by_hand(stage_id: int, *, split: bool) -> StageMemory:
    """Of ``LAYERS`` times Linear and tanh: DeepSpeed clones the input, each Linear saves its own, each tanh its result; a pair
    is the input of a Linear and the gradient of its output."""
    clone, results, received = 1, LAYERS, int(stage_id > 0)
    loaded = 1  # on the first stage the input, on the last the labels
    return StageMemory(
        input_bytes=received * TENSOR,
        forward_bytes=(clone + results + loaded) * TENSOR,
        gradient_bytes=received * TENSOR,
        pair_bytes=2 * LAYERS * TENSOR * split,
    )


def build_blocks(block: dict[str, Any], layers: list[Any] | None = None, interval: int = 0, stages: int = 2) -> Any:
    import rlfreeze_ds

    model = jobs.pipeline(stages, stages * LAYERS, layers, activation_checkpoint_interval=interval)
    return rlfreeze_ds.initialize(model=model, config=jobs.ds_config(MICRO_BATCHES, rlfreeze=block))[0]


def watched(engine: Any) -> list[tuple[int, MeasuredMemory, str]]:
    """Filled with what is measured in each step that is."""
    seen: list[tuple[int, MeasuredMemory, str]] = []
    controller = engine.freeze_controller
    take = controller.take_memory

    def taking(measured: MeasuredMemory, order: str) -> None:
        seen.append((controller.step, measured, order))
        take(measured, order)

    controller.take_memory = taking
    return seen


class Saved:
    """What autograd holds in place of a tensor: gone when it lets go of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Reference:
    """What is alive, seen with the hooks that torch has for what autograd saves."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.saved, self.peak = engine, weakref.WeakSet[Saved](), 0
        self.fixed = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
        engine._INSTRUCTION_MAP = {kind: self.looking(function) for kind, function in engine._INSTRUCTION_MAP.items()}

    def looking(self, function: Any) -> Any:
        def run(engine: Any, **kwargs: Any) -> None:
            function(engine, **kwargs)
            self.peak = max(self.peak, self.now())

        return run

    def train(self, step: int) -> None:
        def pack(tensor: torch.Tensor) -> Saved:
            saved = Saved(tensor)
            self.saved.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            self.engine.train_batch(jobs.batches(step, MICRO_BATCHES))

    def now(self) -> int:
        slots = [tensor for slots in self.engine.pipe_buffers.values() for tensor in slots if tensor is not None]
        pairs = [tensor for pairs in self.engine._weight_gradients._kept.values() for p in pairs for tensor in (p.x, p.gradient)]
        gradients = [tensor.grad for tensor in slots if tensor.is_leaf and tensor.grad is not None]
        tensors = [*slots, *pairs, *gradients, *(saved.tensor for saved in self.saved)]
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size for key, size in sizes.items() if key not in self.fixed)


def jobs_of_all_schedules() -> dict[str, Any]:
    return {schedule: job(schedule, 9) for schedule in SCHEDULES}


def job(schedule: str, steps: int, **planning: Any) -> dict[str, Any]:
    block = {**QUICK, "ramp_steps": 3, "planning": {"background": False, "schedule": schedule, **NO_MATTER, **planning}}
    engine = build_blocks(block)
    seen, left, reference = watched(engine), [], Reference(engine)
    for step in range(steps):
        if step == 1:
            reference.peak = 0
            reference.train(step)
            peak = reference.peak
        else:
            engine.train_batch(jobs.batches(step, MICRO_BATCHES))
        left.append((reference.now(), engine._weight_gradients.num_kept))
    controller = engine.freeze_controller
    return {"seen": seen, "left": left, "peak": peak, "stages": controller.memory.stages, "decision": controller.decision}


def test_what_is_measured_is_what_was_reckoned_by_hand_and_predicted() -> None:
    ranks = run_ranks(jobs_of_all_schedules, 2)
    for schedule in SCHEDULES:
        check([rank[schedule] for rank in ranks], schedule)


def check(results: list[dict[str, Any]], schedule: str) -> None:
    split = schedule != "stock"
    stages = tuple(by_hand(stage_id, split=split) for stage_id in range(2))
    for stage_id, found in enumerate(results):
        assert found["stages"] == stages and set(found["left"]) == {(0, 0)}, schedule
        assert found["peak"] == found["seen"][0][1].peak_bytes, schedule
        # The first step, and the first under the plan of step 7, in which the ramp freezes nothing yet.
        assert [step for step, _, _ in found["seen"]] == [0, 7]
        for at, (_, measured, order) in enumerate(found["seen"]):
            both = from_commands([result["seen"][at][2] for result in results])
            assert measured.peak_bytes == peak_bytes(both, stages)[stage_id], (schedule, at, order)
            assert measured.complete and measured.stage == stages[stage_id]
            assert (measured.most_pairs > 0) == split and 1 <= measured.most_micro_batches <= 2
    orders = tuple(result["seen"][1][2] for result in results)
    assert results[0]["decision"].predicted_peak_bytes == peak_bytes(from_commands(orders), stages)
    assert results[0]["decision"].orders == (orders if schedule == "planned" else ())


# -- the limit -----------------------------------------------------------------------------------------------------------------

# ZB-H1 holds 896 bytes on the second stage, DeepSpeed's order 640 on the first. One at a time with whole backwards is 448: the
# second stage may take its next input in before it sends a gradient.
LIMITS = {
    ("stock", 640): None,
    ("stock", 600): "stage 0 holds 640 bytes.*runs as it is",
    ("zb-h1", 896): None,
    ("zb-h1", 700): "stage 1 holds 896 bytes.* runs in its place: stage 0 holds 640",
    ("zb-h1", 600): "stage 1 holds 896 bytes.* but stage 0 holds 640 .*; lower train_micro_batch_size_per_gpu",
    ("planned", 700): None,
    ("planned", 100): "no order is known that keeps it; the one that holds least runs",
}


class Lines(logging.Handler):
    """What the package says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def limited_jobs() -> dict[Any, Any]:
    found = {}
    for schedule, limit in LIMITS:
        said = Lines()
        logger.addHandler(said)
        block = {**QUICK, "planning": {"background": False, "schedule": schedule, "memory_limit_bytes": limit}}
        engine = build_blocks(block)
        seen, losses, orders = watched(engine), [], []
        for step in range(9):
            losses.append(float(engine.train_batch(jobs.batches(step, MICRO_BATCHES))))
            orders.append(engine._order)
        logger.removeHandler(said)
        lines = [line for line in said.lines if "memory_limit_bytes" in line]
        decision = engine.freeze_controller.decision
        found[schedule, limit] = {"seen": seen, "losses": losses, "orders": orders, "lines": lines, "decision": decision}
    return found


def test_the_limit_in_jobs() -> None:
    ranks = run_ranks(limited_jobs, 2)
    zb_h1, stock = to_commands(blocking_zb_h1(2, MICRO_BATCHES)), to_commands(blocking_1f1b(2, MICRO_BATCHES))
    for (schedule, limit), line in LIMITS.items():
        for stage_id, rank in enumerate(ranks):
            found = rank[schedule, limit]
            # Until the plan of step 7 all of them freeze the same, and an order changes no bit.
            assert found["losses"][:7] == ranks[0]["stock", 640]["losses"][:7], (schedule, limit)
            lines = found["lines"]
            assert len(lines) == int(line is not None and stage_id == 0), lines
            assert not lines or re.search(f"memory_limit_bytes = {limit}: {line}", lines[0]), lines
            usual = stock if schedule == "stock" else zb_h1
            assert found["orders"][0] == usual[stage_id]
            if schedule == "zb-h1":
                expected = zb_h1 if limit == 896 else stock
                assert found["orders"][1:] == [expected[stage_id]] * 8
            if schedule == "planned":
                peak = found["seen"][1][1].peak_bytes
                assert peak == found["decision"].predicted_peak_bytes[stage_id]
                assert peak <= (700 if limit == 700 else 448), (limit, peak)
                assert limit == 700 or "B" in found["orders"][8].split()


def saving_job(folder: str) -> dict[str, Any]:
    """Saved under ZB-H1 gone back to stock's order, loaded as it is and without what is known of memory, as older ones are."""
    block = {**QUICK, "planning": {"background": False, "schedule": "zb-h1", "memory_limit_bytes": 700}}
    engine = build_blocks(block)
    for step in range(8):
        engine.train_batch(jobs.batches(step, MICRO_BATCHES))
    for tag in ("new", "old"):
        engine.save_checkpoint(folder, tag=tag)
    if torch.distributed.get_rank() == 0:
        path = Path(folder, "old", FILE_NAME)
        state = json.loads(path.read_text())
        for stage in state["stages"]:
            del stage["memory"]
        path.write_text(json.dumps(state))
    torch.distributed.barrier()
    found: dict[str, Any] = {"saved": engine.freeze_controller.memory.stages}
    for tag in ("new", "old"):
        resumed = build_blocks(block)
        resumed.load_checkpoint(folder, tag=tag)
        memory, orders = resumed.freeze_controller.memory, []
        at = (resumed.freeze_controller.phase, resumed.freeze_controller.step, memory.stages)
        for step in range(8, 10):
            resumed.train_batch(jobs.batches(step, MICRO_BATCHES))
            orders.append("I" in resumed._order.split())
        found[tag] = (*at, orders, memory.stages)
    return found


def test_what_is_known_survives_a_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(saving_job, 2, str(tmp_path)):
        saved = found["saved"]
        assert saved == tuple(by_hand(stage_id, split=True) for stage_id in range(2))
        assert found["new"] == ("ramp", 8, saved, [False, False], saved)
        # Older ones: as at a start, the first step measures.
        assert found["old"][:3] == ("ramp", 8, ()) and found["old"][3:] == ([True, False], saved)


# -- what else there is to see ---------------------------------------------------------------------------------------------------


class Checkpointed(jobs.Block):
    """A layer that checkpoints itself, as models do."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()  # reentrant ones give no gradient without
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedAnew(Checkpointed):
    reentrant = False


class Graded(jobs.Block):
    """With a transform that refuses to run under hooks for saved tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda value: value.square().sum())(x.detach())
        return super().forward(x) + 0 * slope


class Packed(jobs.Block):
    """That hides what it saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> int:
            hidden[len(hidden)] = tensor
            return len(hidden) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, partial(operator.getitem, hidden)):
            return super().forward(x)


def layered_jobs() -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec

    found: dict[str, Any] = {}
    for schedule in ("stock", "zb-h1"):
        for kind in (jobs.Block, Checkpointed, CheckpointedAnew, Graded, Packed):
            for interval in (0, 1) if kind is jobs.Block else (0,):
                block = {**QUICK, "planning": {"background": False, "schedule": schedule, "memory_limit_bytes": 10**9}}
                said = Lines()
                logger.addHandler(said)
                engine = build_blocks(block, [LayerSpec(kind) for _ in range(LAYERS)], interval, stages=1)
                seen = watched(engine)
                losses = [float(engine.train_batch(jobs.batches(step, MICRO_BATCHES))) for step in range(2)]
                lines = [line for line in said.lines if "memory_limit_bytes" in line]
                logger.removeHandler(said)
                found[f"{schedule} {kind.__name__} {interval}"] = (losses, seen[0][1], lines)
    found["after an error"] = broken(build_blocks({**QUICK, "planning": {"schedule": "zb-h1"}}, None, stages=1))
    return found


def broken(engine: Any) -> tuple[int, int]:
    """Bytes and pairs after a batch that ended with an error in the middle."""
    reference = Reference(engine)
    run = engine._INSTRUCTION_MAP[BackwardInputPass]

    def failing(engine: Any, **kwargs: Any) -> None:
        run(engine, **kwargs)
        if kwargs["micro_batch_id"] == 2:
            assert reference.now() > 0 and engine._weight_gradients.num_kept > 0
            raise ZeroDivisionError

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardInputPass: failing}
    with pytest.raises(ZeroDivisionError):
        reference.train(0)
    gc.collect()
    return reference.now(), engine._weight_gradients.num_kept


def test_layers_of_all_kinds_and_a_batch_that_breaks_off() -> None:
    (found,) = run_ranks(layered_jobs, 1)
    assert found.pop("after an error") == (0, 0)
    rng = torch.get_rng_state().numel()
    for name, (losses, measured, lines) in found.items():
        assert losses == found["stock Block 0"][0], name
        schedule, kind, interval = name.split()
        if kind == "Packed":
            assert measured.stage is None and "packed away by a hook" in measured.why
            assert len(lines) == 1 and "stage 0 cannot be measured" in lines[0]
            continue
        pairs = 2 * LAYERS * TENSOR * (schedule == "zb-h1")
        # Input and labels of the slot, the clone of the input, and a result a layer.
        kept = (3 + LAYERS) * TENSOR
        if kind == "Graded":
            kept += LAYERS * TENSOR  # the sum after the tanh: of the last layer the output, of the others the next one's input
        if interval == "1":
            kept += LAYERS * 2 * rng  # each of DeepSpeed's checkpoints keeps the state of the CPU's generator twice
        if kind == "Checkpointed":
            kept += LAYERS * rng
        assert (measured.stage.forward_bytes, measured.stage.pair_bytes, lines) == (kept, pairs, []), (name, measured)
