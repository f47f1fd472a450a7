"""Two hundred steps with backwards in two, in every kind of order, against whole ones: the same bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from tests.exact.cells import Cell, Layer
from tests.harness import run_ranks
from tests.split_job import Mixed, build_mixed, differing, force_random_masks, state, train, use_order

STEPS = 200
# The orders of a cell share its run with whole backwards. "drawn": another order in every step. Half of them run every day.
Jobs = list[tuple[Cell, list[str]]]
PP2: Jobs = [
    (Cell("fp32", "sgd", clip=None), ["zb-h1"]),
    (Cell("fp32", "adamw"), ["zb-h1", "drawn"]),
    (Cell("bf16", "adamw", clip=None), ["zb-h1"]),
    (Cell("bf16 zero1", "adamw"), ["searched"]),
]
PP4: Jobs = [
    (Cell("fp32", "sgd", stages=4), ["zb-h1"]),
    (Cell("fp32", "adamw", stages=4, micro_batches=6), ["zb-h1", "drawn"]),
]
PP2_DP2: Jobs = [
    (Cell("fp32", "adamw", dp=2), ["zb-h1"]),
    (Cell("bf16", "sgd", dp=2), ["searched"]),
]
MORE = {
    2: [
        (Cell("fp32", "adamw"), ["searched"]),
        (Cell("fp32 zero1", "sgd"), ["zb-h1"]),
        (Cell("fp32 zero1", "adamw"), ["zb-h1"]),
        (Cell("bf16", "sgd"), ["zb-h1", "drawn"]),
        (Cell("bf16 zero1", "sgd"), ["zb-h1"]),
        (Cell("bf16 zero1 fp32-accum", "adamw"), ["drawn"]),
    ],
    4: [
        (Cell("bf16", "adamw", stages=4), ["zb-h1", "drawn"]),
        (Cell("bf16 zero1", "adamw", stages=4), ["searched"]),
        (Cell("fp32 zero1", "sgd", dp=2), ["zb-h1"]),
        (Cell("bf16 zero1", "adamw", dp=2), ["zb-h1"]),
    ],
}


def long_job(jobs: Jobs, layer: type[nn.Module]) -> dict[str, Any]:
    found = {}
    for cell, names in jobs:
        runs = []
        for name in ["stock", *names]:
            configured = name in ("stock", "zb-h1")
            engine = build_mixed(cell, layer, schedule=name if configured else "stock")
            if not configured:
                use_order(engine, name)
            force_random_masks(engine)
            first = state(engine, cell)
            runs.append((train(engine, cell, range(STEPS)), state(engine, cell)))
            assert ("W" in engine._order.split()) == (name != "stock")
        losses, whole = runs[0]
        for name, (losses_in_two, in_two) in zip(names, runs[1:], strict=True):
            found[f"{cell.name}, {name}"] = {
                "losses": [step for step in range(STEPS) if losses[step] != losses_in_two[step]],
                "state": differing(whole, in_two),
                "finite": all(map(math.isfinite, losses)),
                "moved": differing({key: in_two[key] for key in first}, first),
            }
    return found


@pytest.mark.parametrize(
    ("jobs", "num_ranks", "layer"), [(PP2, 2, Mixed), (PP4, 4, Layer), (PP2_DP2, 4, Layer)], ids=["PP2", "PP4", "PP2 x DP2"]
)
def test_losses_weights_and_optimizer_state_are_the_same_bits(jobs: Jobs, num_ranks: int, layer: type[nn.Module]) -> None:
    check(jobs, num_ranks, layer)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", MORE)
def test_in_every_mode(num_ranks: int, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--matrix"):
        pytest.skip("minutes; runs with --matrix")
    check(MORE[num_ranks], num_ranks, Mixed)


def check(jobs: Jobs, num_ranks: int, layer: type[nn.Module]) -> None:
    for found in run_ranks(long_job, num_ranks, jobs, layer, timeout_s=800):
        assert len(found) == sum(len(names) for _, names in jobs)
        for name, run in found.items():
            assert run["losses"] == [] and run["state"] == [], name
            assert run["finite"] and run["moved"], name
