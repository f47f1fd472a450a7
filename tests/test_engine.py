"""The engine against references that share none of its code: stock DeepSpeed, and a single-process loop."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests import jobs
from tests.harness import run_ranks
from tests.split_job import use_order

LAYERS = 4
OFF = {"enabled": False}
ZERO = {
    "enabled": True,
    "warmup_steps": 3,
    "profile_steps": 3,
    "replan_interval": 4,
    "planning": {"max_freeze_ratio": 0},
}
QUICK = {
    "enabled": True,
    "warmup_steps": 3,
    "profile_steps": 4,
    "ramp_steps": 2,
    "replan_interval": 5,
    "selection": "spread",
    "planning": {"background": False},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "momentum": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}},
    "adam": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False}},
    "adamw": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
}


# -- masks of the tests' own choice: one set of parameter names per (step, micro-batch) ----------------------------------


def parameter_names() -> list[str]:
    return [f"{layer}.linear.{kind}" for layer in range(LAYERS) for kind in ("weight", "bias")]


def random_masks(steps: int, micro_batches: int, seed: int = 3) -> list[list[set[str]]]:
    """Random masks, with one name frozen throughout each even step, and the whole first half in step 2."""
    rng = random.Random(seed)
    plan = []
    for step in range(steps):
        masks = [{name for name in parameter_names() if rng.random() < 0.4} for _ in range(micro_batches)]
        always: set[str] = set()
        if step % 2 == 0:
            always = {rng.choice(parameter_names())}
        if step == 2:
            always = set(parameter_names()[: len(parameter_names()) // 2])
        plan.append([mask | always for mask in masks])
    return plan


def force_masks(engine: Any, plan: list[list[set[str]]]) -> None:
    """Make the engine's controller hand out ``plan``."""
    from rlfreeze_ds.controller import StepMasks

    controller = engine.freeze_controller
    names = [unit.name for unit in controller.units]

    def begin_step(num_micro_batches: int) -> StepMasks:
        masks = plan[controller.step]
        assert len(masks) == num_micro_batches
        return StepMasks(
            controller.step, "test", tuple(tuple(i for i, n in enumerate(names) if n in mask) for mask in masks)
        )

    controller.begin_step = begin_step


# -- the reference: one process, one loop, nothing of ours ---------------------------------------------------------------


def reference_model(first_weights: dict[str, torch.Tensor]) -> nn.Sequential:
    model = nn.Sequential(*[jobs.Block() for _ in range(LAYERS)])
    model.load_state_dict(first_weights)
    return model


def reference_run(
    first_weights: dict[str, torch.Tensor],
    plan: list[list[set[str]]],
    optimizer_name: str,
    dp: int = 1,
    clip: float = 0.0,
) -> tuple[list[dict[str, torch.Tensor]], list[list[dict[str, torch.Tensor]]]]:
    """Weights after every step, and per step the accumulated gradients after every micro-batch."""
    model = reference_model(first_weights)
    parameters = dict(model.named_parameters())
    kwargs = {k: v for k, v in OPTIMIZERS[optimizer_name]["params"].items() if k not in ("torch_adam", "adam_w_mode")}
    kind = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer = kind[optimizer_name](list(parameters.values()), **kwargs)
    after, accumulated = [], []
    for step, masks in enumerate(plan):
        total: dict[str, torch.Tensor] = {}
        for replica in range(dp):
            optimizer.zero_grad(set_to_none=True)
            trace = []
            for m, mask in enumerate(masks):
                for name, parameter in parameters.items():
                    parameter.requires_grad_(name not in mask)
                inputs, labels = jobs.micro_batch(step, m, replica)
                loss = nn.functional.mse_loss(model(inputs), labels) / len(masks)
                if loss.requires_grad:
                    loss.backward()
                trace.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
            if replica == 0:
                accumulated.append(trace)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad / dp
        for name, parameter in parameters.items():
            parameter.requires_grad_(True)
            live = sum(name not in mask for mask in masks)
            parameter.grad = total[name] * (len(masks) / live) if live else None
        if clip:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip)
        optimizer.step()
        after.append({n: p.detach().clone() for n, p in parameters.items()})
    return after, accumulated


# -- jobs that run on every rank -----------------------------------------------------------------------------------------


def build(num_stages: int, config: dict[str, Any]) -> Any:
    import rlfreeze_ds

    # A copy: DeepSpeed before 0.19 takes keys out of the dict it is given.
    return rlfreeze_ds.initialize(model=jobs.pipeline(num_stages, LAYERS), config=copy.deepcopy(config))[0]


def dp_rank(engine: Any) -> int:
    return engine.grid.get_data_parallel_id()


def masked_job(
    num_stages: int, dp: int, micro_batches: int, optimizer: str, plan: Any, clip: float = 0.0, order: str = "stock"
) -> dict[str, Any]:
    """With the masks of ``plan``. ``traces``: per step and micro-batch the gradients so far, each after the instruction that
    made it: B, or where the backward is in two I (biases) and W (weights)."""
    from rlfreeze_ds.engine import BackwardInputPass, BackwardWeightPass, FreezePipelineEngine, MaskedBackwardPass

    config = jobs.ds_config(
        micro_batches, rlfreeze=QUICK, dp=dp, optimizer=copy.deepcopy(OPTIMIZERS[optimizer]), gradient_clipping=clip
    )
    engine = build(num_stages, config)
    force_masks(engine, plan)
    use_order(engine, order)
    trace: list[dict[str, torch.Tensor]] = []

    def traced(kind: type, endings: tuple[str, ...]) -> Any:
        def run(self: Any, **kwargs: Any) -> None:
            FreezePipelineEngine._INSTRUCTION_MAP[kind](self, **kwargs)
            parameters = [(n, p) for n, p in self.module.named_parameters() if n.endswith(endings) and p.grad is not None]
            trace[kwargs["micro_batch_id"]].update({n: p.grad.clone() for n, p in parameters})

        return run

    made_by = {MaskedBackwardPass: ("weight", "bias"), BackwardInputPass: ("bias",), BackwardWeightPass: ("weight",)}
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **{kind: traced(kind, made) for kind, made in made_by.items()}}
    first = jobs.weights(engine)
    after, traces, untouched = [], [], []
    for step, masks in enumerate(plan):
        trace[:] = [{} for _ in masks]
        before, before_state = jobs.weights(engine), optimizer_state(engine)
        engine.train_batch(jobs.batches(step, micro_batches, dp_rank(engine)))
        now, now_state = jobs.weights(engine), optimizer_state(engine)
        for name in set.intersection(*masks) & set(now):
            untouched.append(torch.equal(before[name], now[name]) and equal_state(before_state[name], now_state[name]))
        after.append(now)
        traces.append(list(trace))
    flags = [p.requires_grad for p in engine.module.parameters()]
    return {"first": first, "after": after, "traces": traces, "untouched": untouched, "flags": flags}


def optimizer_state(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    state = engine.optimizer.state
    return {
        n: {k: torch.as_tensor(v).clone() for k, v in state.get(p, {}).items() if v is not None}
        for n, p in engine.module.named_parameters()
    }


def equal_state(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def merge(results: Sequence[dict[str, Any]], key: str, *index: int) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for result in results:
        value = result[key]
        for i in index:
            value = value[i]
        merged.update(value)
    return merged


# -- tests ---------------------------------------------------------------------------------------------------------------


# Micro-batches, optimizer and order of the jobs of as many stages.
JOBS = {
    1: [(4, "adamw", "stock"), (4, "adamw", "W 0 later"), (4, "adamw", "W 2 later")],
    2: [
        (4, "sgd", "stock"), (4, "momentum", "stock"), (4, "adam", "stock"), (4, "adamw", "stock"), (1, "adamw", "stock"),
        (8, "adamw", "stock"), (4, "sgd", "zb-h1"), (4, "momentum", "searched"), (4, "adam", "zb-h1"), (8, "adamw", "drawn"),
        (1, "adamw", "zb-h1"), (4, "adamw", "W 0 later"), (4, "adamw", "W 2 later"),
    ],
    3: [(4, "adamw", "stock"), (4, "adamw", "zb-h1"), (8, "sgd", "searched")],
    4: [(6, "adamw", "stock"), (6, "adamw", "zb-h1"), (6, "adamw", "searched"), (8, "sgd", "drawn")],
}  # fmt: skip


def masked_jobs(num_stages: int, cases: list[tuple[int, str, str]]) -> list[dict[str, Any]]:
    return [
        masked_job(num_stages, 1, micro_batches, optimizer, random_masks(4, micro_batches), order=order)
        for micro_batches, optimizer, order in cases
    ]


@pytest.mark.parametrize("num_stages", JOBS)
def test_masked_training_equals_a_single_process_loop(num_stages: int) -> None:
    ranks = run_ranks(masked_jobs, num_stages, num_stages, JOBS[num_stages])
    for case, results in zip(JOBS[num_stages], zip(*ranks, strict=True), strict=True):
        micro_batches, optimizer, _ = case
        plan = random_masks(4, micro_batches)
        after, accumulated = reference_run(merge(results, "first"), plan, optimizer)
        for step in range(len(plan)):
            for m in range(micro_batches):
                got, expected = merge(results, "traces", step, m), accumulated[step][m]
                assert got.keys() == expected.keys(), (case, step, m)
                for name in expected:
                    torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, msg=f"{case} {step} {m} {name}")
            for name, weight in merge(results, "after", step).items():
                torch.testing.assert_close(weight, after[step][name], rtol=0, atol=0, msg=f"{case} {step} {name}")
        checked = [ok for result in results for ok in result["untouched"]]
        assert checked and all(checked)
        assert all(flag for result in results for flag in result["flags"])


@pytest.mark.parametrize("frozen", ["first", "last", "all"])
def test_a_whole_stage_frozen_then_thawed_with_default_clipping(frozen: str) -> None:
    half = len(parameter_names()) // 2
    whole = {
        "first": set(parameter_names()[:half]),
        "last": set(parameter_names()[half:]),
        "all": set(parameter_names()),
    }
    plan = [[set()] * 4, [whole[frozen]] * 4, [whole[frozen]] * 4, [set()] * 4, [set()] * 4]
    results = run_ranks(masked_job, 2, 2, 1, 4, "adamw", plan, 1.0)
    after, _ = reference_run(merge(results, "first"), plan, "adamw", clip=1.0)
    for step in range(len(plan)):
        for name, weight in merge(results, "after", step).items():
            # The norm is summed stage by stage here and at once there: another order of additions.
            torch.testing.assert_close(weight, after[step][name], rtol=1e-5, atol=1e-6)
    assert all(ok for result in results for ok in result["untouched"])
    moved = merge(results, "after", 3)
    for name in whole[frozen]:
        assert not torch.equal(moved[name], merge(results, "after", 2)[name]), f"{name} did not thaw"


@pytest.mark.parametrize(("num_stages", "dp"), [(1, 2), (2, 2)])
def test_data_parallel_replicas_agree_and_equal_the_mean(num_stages: int, dp: int) -> None:
    plan = random_masks(3, 4)
    results = run_ranks(masked_job, num_stages * dp, num_stages, dp, 4, "adamw", plan)
    after, _ = reference_run(merge(results, "first"), plan, "adamw", dp=dp)
    for step in range(len(plan)):
        for result in results:
            for name, weight in result["after"][step].items():
                assert torch.equal(weight, merge(results, "after", step)[name]), "replicas differ"
                torch.testing.assert_close(weight, after[step][name], rtol=1e-5, atol=1e-6)
    assert all(ok for result in results for ok in result["untouched"])


def parity_job(num_stages: int, block: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    engine = build(num_stages, jobs.ds_config(4, rlfreeze=block))
    losses = [engine.train_batch(jobs.batches(step, 4)).clone() for step in range(steps)]
    evaluated = [engine.eval_batch(jobs.batches(99, 4)).clone()]
    losses.append(engine.train_batch(jobs.batches(steps, 4)).clone())
    return {"type": type(engine).__name__, "losses": losses + evaluated, "weights": jobs.weights(engine)}


def test_ratio_zero_and_flag_off_are_bit_identical_to_stock() -> None:
    stock, off, zero = (run_ranks(parity_job, 2, 2, block, 20) for block in (None, OFF, ZERO))
    assert {result["type"] for result in stock + off} == {"PipelineEngine"}
    assert {result["type"] for result in zero} == {"FreezePipelineEngine"}
    for ours in (off, zero):
        for expected, got in zip(stock, ours, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected["losses"], got["losses"], strict=True))
            assert all(torch.equal(expected["weights"][name], got["weights"][name]) for name in expected["weights"])


def whole_run_job(num_stages: int, sleep_s: float) -> dict[str, Any]:
    """A run through all phases whose layers' weight gradients take time, so that freezing pays."""
    engine = build(num_stages, jobs.ds_config(4, rlfreeze=QUICK))
    controller = engine.freeze_controller
    phases, losses = [], []
    for step in range(24):
        slow_weight_gradients(engine, sleep_s)
        phases.append(controller.phase)
        losses.append(float(engine.train_batch(jobs.batches(step, 4))))
    decision = controller.decision
    return {
        "phases": phases,
        "losses": losses,
        "decision": decision.to_json(),
        "step": controller.step,
        "gain": decision.unfrozen_makespan_s / decision.predicted_makespan_s,
        "mean": decision.mean_freeze_ratio,
    }


def slow_weight_gradients(engine: Any, seconds: float) -> None:
    """Sleep wherever autograd computes a parameter's gradient; nowhere when it skips it."""
    for parameter in engine.module.parameters():
        if not hasattr(parameter, "slowed"):
            parameter.slowed = parameter.register_hook(lambda grad: time.sleep(seconds))


def test_a_run_walks_all_phases_and_plans_a_real_gain() -> None:
    results = run_ranks(whole_run_job, 2, 2, 0.002)
    for result in results:
        assert result["phases"][0] == "warmup" and result["phases"][4] == "profile"
        assert result["phases"][7] == "ramp" and result["phases"][-1] == "steady"
        assert result["gain"] > 1.1 and 0 < result["mean"] <= 0.5
        assert all(loss == loss for loss in result["losses"])
    assert results[0]["decision"] == results[1]["decision"]


def mismatch_job() -> str:
    from rlfreeze_ds.decision import Decision
    from rlfreeze_ds.errors import MaskMismatchError

    engine = build(1, jobs.ds_config(4, rlfreeze=QUICK, dp=2))
    if engine.global_rank == 1:
        Decision.masks = lambda self, config, shape, step, scale=1.0: ((0,), (), (), ())
    try:
        for step in range(9):
            slow_weight_gradients(engine, 0.002)
            engine.train_batch(jobs.batches(step, 4, dp_rank(engine)))
    except MaskMismatchError as error:
        return str(error)
    return "no error"


def test_replicas_that_disagree_are_an_error_on_every_rank() -> None:
    for message in run_ranks(mismatch_job, 2):
        assert "stage 0" in message and "[0]" in message and "[1]" in message


def refusal_job(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, str]:
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import LayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    import rlfreeze_ds
    from rlfreeze_ds.errors import RLFreezeError

    def pipeline_of(name: str, **kwargs: Any) -> Any:
        if name == "tensor parallel":
            return jobs.pipeline(None, LAYERS, topology=PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1))
        if name == "moe":
            expert = LayerSpec(MoE, jobs.WIDTH, jobs.Block(), num_experts=2)
            return jobs.pipeline(2, layers=[expert] * 4, **kwargs)
        return jobs.pipeline(2, LAYERS, **kwargs)

    messages = {}
    for name, changes, kwargs in cases:
        try:
            model = nn.Linear(4, 4) if name == "no pipeline" else pipeline_of(name, **kwargs)
            rlfreeze_ds.initialize(
                model=model, config=jobs.ds_config(4, rlfreeze=changes.pop("block", QUICK), **changes)
            )
            messages[name] = "no error"
        except RLFreezeError as error:
            messages[name] = str(error)
    # After every refusal the stock class is back, and a job without the block runs on it.
    messages["afterwards"] = type(build(2, jobs.ds_config(4))).__name__
    return messages


def test_what_cannot_be_exact_is_refused_on_every_rank() -> None:
    lamb = {"type": "Lamb", "params": {"lr": 0.01}}
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    cases = [
        ("zero2", {"zero_optimization": {"stage": 2}}, {}),
        ("zero3", {"zero_optimization": {"stage": 3}}, {}),
        ("fp16", {"fp16": {"enabled": True}}, {}),
        ("offload", {"zero_optimization": offload}, {}),
        ("round robin", {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, {}),
        ("autocast", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}),
        ("lamb", {"optimizer": lamb}, {}),
        ("tensor parallel", {}, {}),
        ("moe", {}, {}),
        ("no pipeline", {}, {}),
        ("wrong key", {"block": {"enabled": True, "warmup_stps": 3}}, {}),
    ]
    expected = {
        "zero2": "zero_optimization.stage = 2",
        "zero3": "zero_optimization.stage = 3",
        "fp16": "fp16.enabled",
        "offload": "offload_optimizer",
        "round robin": "round_robin_gradients",
        "autocast": "torch_autocast",
        "lamb": "optimizer \"lamb\"",
        "tensor parallel": "tensor parallelism",
        "moe": "mixture-of-experts",
        "no pipeline": "Linear",
        "wrong key": '"warmup_steps"',
        "afterwards": "PipelineEngine",
    }
    for messages in run_ranks(refusal_job, 2, cases):
        for name, part in expected.items():
            assert part in messages[name], (name, messages[name])


def two_engines_job(path: str) -> dict[str, Any]:
    import argparse

    import deepspeed
    from deepspeed.runtime.pipe.engine import PipelineEngine

    import rlfreeze_ds

    stock_map, stock_initialize = dict(PipelineEngine._INSTRUCTION_MAP), deepspeed.initialize
    config = jobs.ds_config(4, rlfreeze=ZERO)
    given = copy.deepcopy(config)
    ours = rlfreeze_ds.initialize(model=jobs.pipeline(2), config=config)[0]
    stock = deepspeed.initialize(model=jobs.pipeline(2), config=jobs.ds_config(4, rlfreeze=ZERO))[0]
    rlfreeze_ds.install()
    rlfreeze_ds.install()
    by_args = deepspeed.initialize(
        args=argparse.Namespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"])), model=jobs.pipeline(2)
    )
    by_file = deepspeed.initialize(model=jobs.pipeline(2), config=path)
    rlfreeze_ds.uninstall()
    losses = [
        [float(e.train_batch(jobs.batches(s, 4))) for s in range(3)] for e in (ours, stock, by_args[0], by_file[0])
    ]
    return {
        "types": [type(e).__name__ for e in (ours, stock, by_args[0], by_file[0])],
        "losses": losses,
        "tuple": len(by_file),
        "unchanged": config == given,
        "map": stock_map == PipelineEngine._INSTRUCTION_MAP,
        "restored": deepspeed.initialize is stock_initialize,
    }


def test_three_ways_in_beside_a_stock_engine(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(jobs.ds_config(4, rlfreeze=ZERO)))
    for result in run_ranks(two_engines_job, 2, str(path)):
        frozen = "FreezePipelineEngine"
        assert result["types"] == [frozen, "PipelineEngine", frozen, frozen]
        assert result["losses"][0] == result["losses"][1] == result["losses"][2] == result["losses"][3]
        assert result["unchanged"] and result["map"] and result["restored"] and result["tuple"] == 4


def test_the_package_imports_neither_torch_nor_ray() -> None:
    code = "import sys, rlfreeze_ds, rlfreeze_ds.config; print([m for m in ('torch', 'deepspeed', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_engine_imports_no_ray() -> None:
    code = "import sys, rlfreeze_ds.engine; print('last:', [m for m in ('ray', 'fastapi', 'gymnasium') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("last: []"), done.stdout + done.stderr

