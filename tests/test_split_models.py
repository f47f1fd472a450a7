"""Backwards in two in models that do something of their own: the same bits as with whole ones, in ZB-H1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests import jobs
from tests.exact.cells import Cell
from tests.harness import run_ranks
from tests.split_job import BLOCK, Mixed, build_mixed, differing, force_random_masks, state, train

STEPS = 10
TOKENS = 11


class CheckpointsItself(Mixed):
    """The first layer that a stage gets has an input without a gradient, which reentrant checkpointing cannot do with."""

    reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0 * self.positions.view_as(x)
        if self.reentrant is None:
            import deepspeed

            return deepspeed.checkpointing.checkpoint(super().forward, x)
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(CheckpointsItself):
    reentrant = True


class NonReentrant(CheckpointsItself):
    reentrant = False


class Autocast(Mixed):
    """A part in bf16, whose backward stays whole. (Of a weight used in both parts the terms are added up in another order.)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.shared(torch.relu(self.shared(self.norm(x)))) + self.positions.view_as(x))
        return self.last(x.float() + self.conv(x.float().unsqueeze(1)).squeeze(1))


class Pair(Mixed):
    """Hands on two tensors, which is two backwards, and an index, which needs none."""

    def forward(self, inputs: Any) -> Any:
        x, y, index = inputs if isinstance(inputs, tuple) else (inputs, inputs, torch.arange(jobs.WIDTH))
        x, y = super().forward(x[:, index]) + y, self.shared(y)
        return x, y, index


def mean_of_pair(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs[0] + outputs[1], labels)


class Byte(nn.Module):
    """Embedding at one end, projection at the other, of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(TOKENS, jobs.WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight)


def project(byte: Byte, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, byte.weight)


def unfrozen_positions(engine: Any) -> None:
    """Masks that leave the parameter live through which the layers of a stage get a gradient."""
    units = engine.freeze_controller.units
    force_random_masks(engine)
    begin_step = engine.freeze_controller.begin_step
    spared = {place for place, unit in enumerate(units) if "positions" in unit.name}

    def spare(num_micro_batches: int) -> Any:
        from dataclasses import replace

        found = begin_step(num_micro_batches)
        return replace(found, masks=tuple(tuple(u for u in mask if u not in spared) for mask in found.masks))

    engine.freeze_controller.begin_step = spare


def compare(build: Callable[[str], Any], run: Callable[[Any], list[float]], cell: Cell, masks: Any) -> dict[str, Any]:
    runs, kept = [], 0
    for schedule in ("stock", "zb-h1"):
        engine = build(schedule)
        masks(engine)
        keep = engine._weight_gradients.keep

        def counted(*args: Any, keep: Any = keep) -> None:
            nonlocal kept
            kept += 1
            keep(*args)

        engine._weight_gradients.keep = counted
        runs.append((run(engine), state(engine, cell)))
    return {"losses": runs[0][0] == runs[1][0], "differing": differing(runs[0][1], runs[1][1]), "kept": kept}


def layers_job(kinds: list[tuple[str, type[nn.Module], Cell]]) -> dict[str, Any]:
    found = {}
    for name, layer, cell in kinds:
        masks = unfrozen_positions if issubclass(layer, CheckpointsItself) else force_random_masks
        found[name] = compare(
            lambda schedule, cell=cell, layer=layer: build_mixed(cell, layer, schedule),
            lambda engine, cell=cell: train(engine, cell, range(STEPS)), cell, masks,
        )  # fmt: skip
    return found


KINDS = [
    ("own checkpoints, reentrant", Reentrant, Cell("fp32")),
    ("own checkpoints, non-reentrant", NonReentrant, Cell("fp32")),
    ("own checkpoints, DeepSpeed's", CheckpointsItself, Cell("fp32")),
    ("own checkpoints within checkpoints", NonReentrant, Cell("bf16 zero1", checkpointing=(2, True))),
    ("autocast in a layer", Autocast, Cell("fp32")),
    ("autocast in a layer, ZeRO", Autocast, Cell("fp32 zero1")),
]


def test_layers_with_checkpoints_or_autocast_of_their_own() -> None:
    for found in run_ranks(layers_job, 2, KINDS):
        assert found.keys() == {name for name, _, _ in KINDS}
        for name, run in found.items():
            assert run["losses"] and run["differing"] == [] and run["kept"] > 0, (name, run)


def models_job(num_stages: int) -> dict[str, Any]:
    """Several tensors between stages; an embedding tied to the projection, on one stage or on two."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    import rlfreeze_ds

    def pairs(schedule: str) -> Any:
        return PipelineModule([LayerSpec(Pair) for _ in range(4)], loss_fn=mean_of_pair, **common)

    def bytes_in_and_out(schedule: str) -> Any:
        ends = (TiedLayerSpec("byte", Byte), TiedLayerSpec("byte", Byte, forward_fn=project))
        layers = [ends[0], *(LayerSpec(jobs.Block) for _ in range(3)), ends[1]]
        return PipelineModule(layers, loss_fn=nn.functional.cross_entropy, **common)

    def tokens(step: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + m)
        return torch.randint(TOKENS, (6,), generator=generator), torch.randint(TOKENS, (6,), generator=generator)

    common = {"num_stages": num_stages, "partition_method": "uniform", "seed_layers": True, "base_seed": 7}
    found = {}
    for name, model, data in (("pairs", pairs, jobs.micro_batch), ("tied embedding", bytes_in_and_out, tokens)):

        def build(schedule: str, model: Any = model) -> Any:
            block = BLOCK | {"planning": {"schedule": schedule}}
            return rlfreeze_ds.initialize(model=model(schedule), config=jobs.ds_config(4, rlfreeze=block))[0]

        def run(engine: Any, data: Any = data) -> list[float]:
            return [float(engine.train_batch(iter([data(step, m) for m in range(4)]))) for step in range(STEPS)]

        found[name] = compare(build, run, Cell("fp32"), force_random_masks)
    return found


@pytest.mark.parametrize("num_stages", [1, 2])
def test_several_tensors_between_stages_and_an_embedding_tied_to_the_projection(num_stages: int) -> None:
    for found in run_ranks(models_job, num_stages, num_stages):
        for name, run in found.items():
            assert run["losses"] and run["differing"] == [] and run["kept"] > 0, (name, run)


def fp16_job() -> dict[str, Any]:
    """On the CPU, which DeepSpeed calls unsupported: with steps that overflow."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    found = {}
    for accumulation in ("", " fp32-accum"):
        skipped = []

        def run(engine: Any, cell: Cell, skipped: list[int]) -> list[float]:
            losses = train(engine, cell, range(2 * STEPS))
            skipped.append(engine.skipped_steps)
            return losses

        cell = Cell(f"fp16 zero1{accumulation}", clip=None)
        found[accumulation] = compare(
            lambda schedule, cell=cell: build_mixed(cell, Mixed, schedule),
            lambda engine, cell=cell, skipped=skipped, run=run: run(engine, cell, skipped), cell, force_random_masks,
        ) | {"skipped": skipped}  # fmt: skip
    return found


def test_fp16_with_steps_that_overflow() -> None:
    for found in run_ranks(fp16_job, 2):
        for run in found.values():
            assert run["losses"] and run["differing"] == [] and run["kept"] > 0, run
            assert 0 < run["skipped"][0] == run["skipped"][1] < 2 * STEPS
