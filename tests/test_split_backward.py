"""I and W apart in the engine: the same losses and weights, to the bit, as with whole backwards."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import TrainSchedule
from torch import nn
from torch.nn import functional

from rlfreeze_ds.planning.schedule import command_name
from tests import jobs
from tests import test_engine as whole_backwards
from tests.exact.cells import LAYERS, Cell
from tests.exact.job import optimizer_arguments, parts, pipeline_of
from tests.exact.reference import inputs_of
from tests.harness import run_ranks

STEPS = 20
BLOCK = {"enabled": True, "selection": "spread", "planning": {"background": False}}
AT_THE_END = 100


class Ends(nn.Module):
    """A tied weight at both ends of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(jobs.WIDTH, jobs.WIDTH))
        nn.init.uniform_(self.weight, -0.3, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.linear(x, self.weight))


class Mixed(nn.Module):
    """What is caught and what is not, side by side: a shared linear weight, a norm, a convolution, a position parameter whose
    gradient is autograd's own tensor; the result is the very output of a linear layer, so its gradient is the receive buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(jobs.WIDTH)
        self.shared = nn.Linear(jobs.WIDTH, jobs.WIDTH)
        self.positions = nn.Parameter(torch.zeros(2, jobs.WIDTH))
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.last = nn.Linear(jobs.WIDTH, jobs.WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(torch.relu(self.shared(self.norm(x)))) + self.positions.view_as(x))
        return self.last(x + self.conv(x.unsqueeze(1)).squeeze(1))


def build_mixed(cell: Cell) -> Any:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    import rlfreeze_ds

    layers: list[Any] = [LayerSpec(Mixed) for _ in range(LAYERS)]
    if cell.tied:
        layers[0] = layers[-1] = TiedLayerSpec("ends", Ends)
    model = pipeline_of(cell, layers)
    config = cell.config() | {"rlfreeze": BLOCK}
    return rlfreeze_ds.initialize(model=model, config=config, **optimizer_arguments(cell, model))[0]


def force_random_masks(engine: Any) -> None:
    """Changing every step, always with a unit frozen throughout; in every fifth step the whole stage is."""
    from rlfreeze_ds.controller import StepMasks

    controller = engine.freeze_controller

    def begin_step(num_micro_batches: int) -> StepMasks:
        rng = random.Random(1000 * controller.step + engine.stage_id)
        units = range(len(controller.units))
        always = set(rng.sample(units, 1)) if controller.step % 5 else set(units)
        masks = [always | {unit for unit in units if rng.random() < 0.4} for _ in range(num_micro_batches)]
        return StepMasks(controller.step, "test", tuple(tuple(sorted(mask)) for mask in masks))

    controller.begin_step = begin_step


def delayed(num_stages: int, delay: int) -> Callable[[int], list[str]]:
    """Orders for the engine: stock's, each W right after the I of ``delay`` micro-batches later, or at the end."""

    def orders(num_micro_batches: int) -> list[str]:
        found = []
        for stage_id in range(num_stages):
            words, num_run = [], 0
            commands = [c for step in TrainSchedule(num_micro_batches, num_stages, stage_id) for c in step]
            for word in filter(None, map(command_name, commands)):
                words.append("I" if word == "B" else word)
                num_run += word == "B"
                words += ["W"] * (word == "B" and num_run > delay)
            found.append(" ".join([*words, *["W"] * min(delay, num_micro_batches)]))
        return found

    return orders


def train(cell: Cell, delay: int | None) -> dict[str, Any]:
    """``STEPS`` steps; what they brought, and what ran in the last one."""
    from rlfreeze_ds.engine import BackwardInputPass, BackwardWeightPass

    engine = build_mixed(cell)
    engine._split_backwards(None if delay is None else delayed(cell.stages, delay))
    if cell.masks == "random":
        force_random_masks(engine)
    ran, most_kept = [], 0

    def watch(kind: type) -> Any:
        handler = engine._INSTRUCTION_MAP[kind]

        def run(self: Any, **kwargs: Any) -> None:
            nonlocal most_kept
            ran.append(("I" if kind is BackwardInputPass else "W", kwargs["micro_batch_id"]))
            waiting, given = self._weight_gradients.num_kept, self._weight_gradients.waiting(kwargs["micro_batch_id"])
            handler(self, **kwargs)
            most_kept = max(most_kept, self._weight_gradients.num_kept)
            if kind is BackwardInputPass:
                frozen = {id(p) for unit in kwargs["mask"] for p in self.freeze_controller.units[unit].parameters}
                kept = {id(p) for p in self._weight_gradients.waiting(kwargs["micro_batch_id"])}
                assert not frozen & kept, "a pair of a masked unit was kept"
            else:
                assert self._weight_gradients.num_kept <= waiting
                if type(self.optimizer).__name__ == "BF16_Optimizer":  # else the next I would add it up again, or zeros
                    assert all(parameter.grad is None for parameter in given)

        return run

    engine._INSTRUCTION_MAP = {
        **engine._INSTRUCTION_MAP, **{kind: watch(kind) for kind in (BackwardInputPass, BackwardWeightPass)}
    }  # fmt: skip
    losses, fired = [], dict.fromkeys((name for name, _ in engine.module.named_parameters()), 0)
    for name, parameter in engine.module.named_parameters():

        def count(_: Any, name: str = name) -> None:
            fired[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    replica = engine.grid.get_data_parallel_id()
    for step in range(STEPS):
        ran.clear()
        batch = iter([inputs_of(cell, step, m, replica) for m in range(cell.micro_batches)])
        losses.append(float(engine.train_batch(batch)))
        assert engine._weight_gradients.num_kept == 0
    state = {
        f"{name} {key}": value
        for name, parameter in engine.module.named_parameters()
        for key, (_, value) in parts(engine, cell, parameter).items()
    }
    timing = engine.freeze_controller.history._recent or engine.freeze_controller.history._calibration
    return {
        "losses": losses, "state": state, "fired": fired, "ran": ran, "most kept": most_kept,
        "timed": sorted(timing[-1].timing.with_whole_backwards().seconds),
    }  # fmt: skip


def split_job(cells: list[Cell], delays: list[int]) -> dict[str, Any]:
    found = {}
    for cell in cells:
        whole = train(cell, None)
        assert whole["ran"] == [] and whole["most kept"] == 0
        for delay in delays:
            split = train(cell, delay)
            where = f"{cell.name}, W {delay} later"
            assert split["losses"] == whole["losses"], where
            assert split["fired"] == whole["fired"] and any(whole["fired"].values()), where
            differing = [key for key in whole["state"] if not torch.equal(whole["state"][key], split["state"][key])]
            assert split["state"].keys() == whole["state"].keys() and differing == [], f"{where}: {differing}"
            assert split["timed"] == whole["timed"]
            assert split["most kept"] > 0
            found[where] = split["ran"]
    return found


def order(num_micro_batches: int, delay: int) -> list[tuple[str, int]]:
    ran = []
    for m in range(num_micro_batches):
        ran.append(("I", m))
        ran += [("W", m - delay)] if m >= delay else []
    return ran + [("W", m) for m in range(max(0, num_micro_batches - delay), num_micro_batches)]


CELLS = [
    Cell("fp32", "sgd"),
    Cell("fp32", "adamw", clip=0.05),
    Cell("fp32", "adamw", tied=True, masks="no", clip=None),
    Cell("fp32", "adamw", checkpointing=(1, True)),
    Cell("fp32", "momentum", checkpointing=(2, False)),
    Cell("fp32 zero1", "adamw"),
    Cell("bf16", "adamw", clip=0.05),
    Cell("bf16", "adamw", tied=True),
    Cell("bf16 zero1", "adamw", tied=True, clip=0.05),
    Cell("bf16 zero1", "adamw", checkpointing=(1, True)),
    Cell("bf16 zero1 fp32-accum", "adamw"),
    Cell("bf16", "adamw", settings=(("immediate_grad_update", True),)),
]


@pytest.mark.parametrize(
    ("cells", "delays"),
    [(CELLS[:5], [0, 1, 2, AT_THE_END]), (CELLS[5:], [0, 2, AT_THE_END])],
    ids=["fp32", "zero and bf16"],
)
def test_losses_and_weights_are_those_of_whole_backwards(cells: list[Cell], delays: list[int]) -> None:
    for found in run_ranks(split_job, 2, cells, delays):
        assert len(found) == len(cells) * len(delays)
        for where, ran in found.items():
            assert ran == order(4, int(where.split()[-2])), where


def test_with_data_parallel_replicas() -> None:
    cells = [Cell(mode, dp=2, stages=1, clip=0.05) for mode in ("fp32", "bf16", "bf16 zero1")]
    assert all(len(found) == 6 for found in run_ranks(split_job, 2, cells, [0, 2]))


# -- against the single-process loop, micro-batch by micro-batch -----------------------------------------------------------


def traced_job(num_stages: int, micro_batches: int, delay: int, plan: Any) -> dict[str, Any]:
    """Per step the accumulated gradients after every W."""
    from rlfreeze_ds.engine import BackwardWeightPass, FreezePipelineEngine

    engine = whole_backwards.build(num_stages, jobs.ds_config(micro_batches, rlfreeze=BLOCK, gradient_clipping=0.0))
    engine._split_backwards(delayed(num_stages, delay))
    whole_backwards.force_masks(engine, plan)
    trace: list[dict[str, torch.Tensor]] = []

    def traced(self: Any, **kwargs: Any) -> None:
        FreezePipelineEngine._INSTRUCTION_MAP[BackwardWeightPass](self, **kwargs)
        trace.append({n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None})

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardWeightPass: traced}
    first, after, traces = jobs.weights(engine), [], []
    for step in range(len(plan)):
        trace.clear()
        engine.train_batch(jobs.batches(step, micro_batches))
        after.append(jobs.weights(engine))
        traces.append(list(trace))
    return {"first": first, "after": after, "traces": traces}


@pytest.mark.parametrize(("num_stages", "delay"), [(1, 0), (2, 0), (2, 2)])
def test_every_w_equals_a_single_process_loop(num_stages: int, delay: int) -> None:
    plan = whole_backwards.random_masks(3, 4)
    results = run_ranks(traced_job, num_stages, num_stages, 4, delay, plan)
    after, accumulated = whole_backwards.reference_run(whole_backwards.merge(results, "first"), plan, "adamw")
    for step in range(len(plan)):
        for m in range(4):
            got = whole_backwards.merge(results, "traces", step, m)
            # A bias comes with I, so ahead of a W that is late.
            compared = [name for name in accumulated[step][m] if delay == 0 or name.endswith("weight")]
            assert compared and all(torch.equal(got[name], accumulated[step][m][name]) for name in compared), (step, m)
        for name, weight in whole_backwards.merge(results, "after", step).items():
            assert torch.equal(weight, after[step][name]), (step, name)


# -- what else a job does --------------------------------------------------------------------------------------------------


def interrupted_job() -> dict[str, Any]:
    """An error in the middle of a batch. (Stock's timers let nobody train on after one.)"""
    from rlfreeze_ds.engine import BackwardInputPass, FreezePipelineEngine

    engine = build_mixed(Cell("fp32", stages=1))
    engine._split_backwards(delayed(1, AT_THE_END))
    kept: list[Any] = []

    def failing(self: Any, **kwargs: Any) -> None:
        FreezePipelineEngine._INSTRUCTION_MAP[BackwardInputPass](self, **kwargs)
        if kwargs["micro_batch_id"] == 2:
            kept.extend(
                weakref.ref(tensor) for pairs in self._weight_gradients._kept.values() for pair in pairs
                for tensor in (pair.x, pair.gradient)
            )  # fmt: skip
            raise ZeroDivisionError

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardInputPass: failing}
    with pytest.raises(ZeroDivisionError):
        engine.train_batch(iter([inputs_of(Cell(), 0, m, 0) for m in range(4)]))
    gc.collect()
    return {
        "pairs": len(kept) // 2, "kept": engine._weight_gradients.num_kept, "alive": sum(ref() is not None for ref in kept),
        "linear": functional.linear is torch._C._nn.linear,
    }  # fmt: skip


def test_an_error_in_the_middle_of_a_batch_leaves_no_pair() -> None:
    (found,) = run_ranks(interrupted_job, 1)
    assert found == {"pairs": 3 * 4 * LAYERS, "kept": 0, "alive": 0, "linear": True}


def watched_job() -> dict[str, Any]:
    """The profiler's kinds, in a run with evaluations between the steps."""
    found: dict[str, Any] = {}
    for delay in (None, 1):
        engine = build_mixed(Cell("fp32"))
        engine._split_backwards(None if delay is None else delayed(2, delay))
        seen: list[Any] = []
        end_step = engine.freeze_controller.end_step

        def watched(masks: Any, loss: Any, timings: Any, *args: Any, sink: Any = seen, end: Any = end_step, **kw: Any) -> None:
            sink.extend(timings)
            end(masks, loss, timings, *args, **kw)

        engine.freeze_controller.end_step = watched
        losses = []
        for step in range(3):
            losses.append(float(engine.train_batch(iter([inputs_of(Cell(), step, m, 0) for m in range(4)]))))
            losses.append(float(engine.eval_batch(iter([inputs_of(Cell(), 99, m, 0) for m in range(4)]))))
        found[str(delay)] = {"kinds": sorted(seen[-1].seconds), "losses": losses, "timing": seen[-1]}
    return found


def test_i_and_w_are_timed_and_evaluations_are_untouched() -> None:
    for found in run_ranks(watched_job, 2):
        assert found["None"]["losses"] == found["1"]["losses"]
        assert found["None"]["kinds"] == [(kind, m) for kind in "BF" for m in range(4)]
        assert found["1"]["kinds"] == [(kind, m) for kind in "FIW" for m in range(4)]
        timing = found["1"]["timing"]
        assert all(0 < seconds < timing.makespan_s for seconds in timing.seconds.values())
        whole = timing.with_whole_backwards().seconds
        assert whole[("B", 1)] == timing.seconds[("I", 1)] + timing.seconds[("W", 1)] and len(whole) == 8


def refusal_job() -> str:
    from rlfreeze_ds.errors import UnsupportedError

    engine = build_mixed(Cell("fp32", stages=1))
    engine._config.activation_checkpointing_config.contiguous_memory_optimization = True
    with pytest.raises(UnsupportedError) as caught:
        engine._split_backwards(delayed(1, 1))
    engine._split_backwards(None)
    return str(caught.value)


def test_a_mode_that_overwrites_kept_inputs_is_refused() -> None:
    assert "activation_checkpointing.contiguous_memory_optimization" in run_ranks(refusal_job, 1)[0]
