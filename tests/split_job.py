"""What the tests of split backwards share: a model with everything in it, random masks, orders, and the whole state of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import TrainSchedule
from torch import nn

from rlfreeze_ds.planning.schedule import command_name, to_commands
from rlfreeze_ds.planning.transfers import blocking_zb_h1
from tests import jobs, orders
from tests.exact.cells import LAYERS, Cell, Ends
from tests.exact.job import optimizer_arguments, parts, pipeline_of
from tests.exact.reference import inputs_of

# A warm-up without end: masks and orders are the tests' own.
BLOCK: dict[str, Any] = {"enabled": True, "selection": "spread", "warmup_steps": 10**6}
Orders = Callable[[int], Sequence[str]]


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


def build_mixed(cell: Cell, layer: type[nn.Module] = Mixed, schedule: str = "stock", **changes: Any) -> Any:
    """The cell's engine on layers of ``layer``; ``changes`` replace keys of the "rlfreeze" block."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    import rlfreeze_ds

    layers: list[Any] = [LayerSpec(layer) for _ in range(LAYERS)]
    if cell.tied:
        layers[0] = layers[-1] = TiedLayerSpec("ends", Ends)
    model = pipeline_of(cell, layers)
    config = cell.config() | {"rlfreeze": BLOCK | {"planning": {"schedule": schedule}} | changes}
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


def delayed(num_stages: int, delay: int) -> Orders:
    """Stock's order, each W right after the I of ``delay`` micro-batches later, or at the end."""

    def found(num_micro_batches: int) -> list[str]:
        of_stages = []
        for stage_id in range(num_stages):
            words, num_run = [], 0
            commands = [c for step in TrainSchedule(num_micro_batches, num_stages, stage_id) for c in step]
            for word in filter(None, map(command_name, commands)):
                words.append("I" if word == "B" else word)
                num_run += word == "B"
                words += ["W"] * (word == "B" and num_run > delay)
            of_stages.append(" ".join([*words, *["W"] * min(delay, num_micro_batches)]))
        return of_stages

    return found


def use_order(engine: Any, name: str) -> None:
    """From the next batch on: "zb-h1", "searched", "drawn" (another in every step), or "W 2 later"."""
    num_stages = engine.num_stages
    if name == "stock":
        engine._split_backwards(None)
    elif name == "searched":
        engine._split_backwards(cache(lambda num_micro_batches: orders.searched(num_stages, num_micro_batches, num_moves=100)))
    elif name == "drawn":
        engine._split_backwards(lambda num_micro_batches: orders.drawn(num_stages, num_micro_batches, engine.global_steps))
    elif name == "zb-h1":
        engine._split_backwards(lambda num_micro_batches: to_commands(blocking_zb_h1(num_stages, num_micro_batches)))
    else:
        engine._split_backwards(delayed(num_stages, int(name.split()[1])))


def train(engine: Any, cell: Cell, steps: range) -> list[float]:
    """The loss of every step."""
    replica = engine.grid.get_data_parallel_id()
    losses = []
    for step in steps:
        losses.append(float(engine.train_batch(iter([inputs_of(cell, step, m, replica) for m in range(cell.micro_batches)]))))
        assert engine._weight_gradients.num_kept == 0
    return losses


def state(engine: Any, cell: Cell) -> dict[str, torch.Tensor]:
    """Weights, masters and optimizer state of this rank."""
    return {
        f"{name} {key}": value
        for name, parameter in engine.module.named_parameters()
        for key, (_, value) in parts(engine, cell, parameter).items()
    }


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """What is not the same bits."""
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]
