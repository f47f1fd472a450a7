"""Memory in real jobs: what a micro-batch keeps against sums by hand, peaks against predictions, and the limit."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlfreeze_ds.planning.lean_orders import stock_order
from rlfreeze_ds.planning.memory import StageMemory, peak_bytes
from rlfreeze_ds.planning.schedule import from_commands, to_commands
from rlfreeze_ds.planning.transfers import blocking_zb_h1
from rlfreeze_ds.telemetry.memory_probe import MeasuredMemory, UnseenMemoryError, saved_tensors
from tests import jobs
from tests.harness import run_ranks
from tests.test_engine import QUICK

MICRO_BATCHES = 4
LAYERS = 3  # of a stage
SCHEDULES = ("stock", "zb-h1", "planned")
TENSOR = 2 * jobs.WIDTH * 4  # [2, WIDTH] in fp32: every activation, input, label and gradient of these jobs


def by_hand(stage_id: int, *, split: bool) -> StageMemory:
    """Of a stage of ``LAYERS`` times Linear and tanh: DeepSpeed clones the input, each Linear saves its own, each tanh its result;
    a pair is the input of a Linear and the gradient of its output."""
    clone, results, received = 1, LAYERS, int(stage_id > 0)
    loaded = 1  # on the first stage the input, on the last the labels
    return StageMemory(
        input_bytes=received * TENSOR,
        forward_bytes=(clone + results + loaded) * TENSOR,
        gradient_bytes=received * TENSOR,
        pair_bytes=2 * LAYERS * TENSOR * split,
    )


def build_blocks(block: dict[str, Any], layers: list[Any] | None = None, **config: Any) -> Any:
    import rlfreeze_ds

    model = jobs.pipeline(2, 2 * LAYERS, layers)
    return rlfreeze_ds.initialize(model=model, config=jobs.ds_config(MICRO_BATCHES, rlfreeze=block, **config))[0]


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
    block = {**QUICK, "ramp_steps": 3, "planning": {"background": False, "schedule": schedule, **planning}}
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
