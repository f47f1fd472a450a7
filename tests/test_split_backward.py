"""I and W apart in the engine: the same losses and weights, to the bit, as with whole backwards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests import jobs
from tests.exact.cells import LAYERS, Cell
from tests.exact.job import inner, optimizer_arguments, parts, pipeline_of
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
        x = torch.tanh(self.shared(torch.relu(self.shared(self.norm(x)))) + self.positions)
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


def train(cell: Cell, delay: int | None) -> dict[str, Any]:
    """``STEPS`` steps; what they brought, and what ran in the last one."""
    from rlfreeze_ds.engine import BackwardInputPass, BackwardWeightPass

    engine = build_mixed(cell)
    engine._weight_delay = delay
    if cell.masks == "random":
        force_random_masks(engine)
    ran, most_kept = [], 0

    def watch(kind: type) -> Any:
        handler = engine._INSTRUCTION_MAP[kind]

        def run(self: Any, **kwargs: Any) -> None:
            nonlocal most_kept
            ran.append(("I" if kind is BackwardInputPass else "W", kwargs["micro_batch_id"]))
            waiting = self._weight_gradients.num_kept
            handler(self, **kwargs)
            most_kept = max(most_kept, self._weight_gradients.num_kept)
            if kind is BackwardInputPass:
                frozen = {id(p) for unit in kwargs["mask"] for p in self.freeze_controller.units[unit].parameters}
                kept = {id(p) for p in self._weight_gradients.waiting(kwargs["micro_batch_id"])}
                assert not frozen & kept, "a pair of a masked unit was kept"
            else:
                assert self._weight_gradients.num_kept <= waiting

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
        "timed": sorted(timing[-1].timing.seconds), "optimizer": type(engine.optimizer).__name__,
        "inner": type(inner(engine)).__name__,
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


@pytest.mark.parametrize("cells", [CELLS[:5], CELLS[5:]], ids=["fp32", "zero and bf16"])
def test_losses_and_weights_are_those_of_whole_backwards(cells: list[Cell]) -> None:
    for found in run_ranks(split_job, 2, cells, [0, 1, 2, AT_THE_END]):
        for where, ran in found.items():
            assert ran == order(4, int(where.split()[-2])), where


def test_with_data_parallel_replicas() -> None:
    cells = [Cell(mode, dp=2, stages=1, clip=0.05) for mode in ("fp32", "bf16", "bf16 zero1")]
    assert all(len(found) == 6 for found in run_ranks(split_job, 2, cells, [0, 2]))
