"""Ratios and eligible units to masks, as a pure function; and the switch that applies a mask.

Units are laid on a circle, each as long as its share of the weight-gradient time. Micro-batch after micro-batch freezes the
next arc, as long as its ratio. So every unit is frozen equally often up to one, whatever the sizes and ratios, and what
one micro-batch rounds away the next one gets (systematic sampling). Of several orders of the units on the circle, the one
whose masks come closest to the ratios is taken: units differ in size, and a mask that misses its ratio lengthens the batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # units.py needs torch; masks are also made where there is none
    from rlfreeze_ds.freezing.units import FreezeUnit

Mask = tuple[int, ...]
"""Indices of the units frozen for one micro-batch on one stage, ascending."""

# Orders of the units to choose from, and about how many (unit, micro-batch) pairs they may have together: under 1 ms a step.
DEALS, DEALS_SIZE = 16, 100_000
COARSE = 0.25
_EPS = 1e-9


def step_masks(
    ratios: Sequence[float],
    weights: Sequence[float],
    eligible: Sequence[bool],
    *,
    selection: str,
    whole: bool,
    seed: int,
    step: int,
    stage_id: int,
) -> tuple[Mask, ...]:
    """One mask per micro-batch of a step: the same on every data-parallel replica, and again after resume.

    Args:
        ratios: per micro-batch, the share of the stage's freezable weight-gradient time to skip, in [0, 1].
        weights: per unit, its share of that time; they sum to 1.
        eligible: per unit, whether the criterion lets it freeze.
        selection: ``"strict"``, ``"prefer"`` or ``"spread"`` (DESIGN: choice of units).
        whole: freeze a pool of units all together or not at all. Right for a first stage, where nothing upstream needs a
            gradient: only a frozen prefix saves the input gradient, and the whole stage is the longest prefix.
    """
    rng = np.random.default_rng([seed, step, stage_id])
    everything = list(range(len(weights)))
    first = everything if selection == "spread" else [unit for unit in everything if eligible[unit]]
    others = [unit for unit in everything if unit not in set(first)] if selection == "prefer" else []
    share = sum(weights[unit] for unit in first)
    rest = sum(weights[unit] for unit in others)
    frozen: list[set[int]] = [set() for _ in ratios]
    for pool, pool_share, wanted in (
        (first, share, [min(ratio, share) for ratio in ratios]),
        (others, rest, [max(0.0, ratio - share) for ratio in ratios]),
    ):
        if pool and pool_share > 0:
            arcs = [min(1.0, ratio / pool_share) for ratio in wanted]
            for chosen, units in zip(frozen, _deal(pool, weights, arcs, whole, rng), strict=True):
                chosen.update(units)
    return tuple(tuple(sorted(chosen)) for chosen in frozen)


def _deal(
    pool: Sequence[int], weights: Sequence[float], arcs: Sequence[float], whole: bool, rng: np.random.Generator
) -> list[list[int]]:
    ends = np.concatenate([[0.0], np.cumsum(arcs)])
    # A random start, so that over many steps no unit and no micro-batch is favoured.
    ends += rng.random()
    size = np.array([weights[unit] for unit in pool])
    size /= size.sum()
    best: tuple[float, np.ndarray] | None = None
    # With a unit this large the closest mask is on one side of its ratio every time; at random both are hit as they should be.
    one = whole or size.max() > COARSE
    deals = 1 if one else max(1, min(DEALS, DEALS_SIZE // (len(pool) * len(arcs))))
    orders = rng.permuted(np.tile(np.arange(len(pool)), (deals, 1)), axis=1)
    places = np.zeros(orders.shape)
    if not whole:
        np.put_along_axis(places, orders, np.cumsum(size[orders], axis=1) - size[orders] / 2, axis=1)
    # [deal, micro-batch, unit]: whether the arc of that micro-batch covers the unit's place.
    turns = np.floor(ends[:, None] + (_EPS - places[:, None, :]))
    chosen = turns[:, 1:] > turns[:, :-1]
    best = np.square(chosen @ size - arcs).sum(axis=1).argmin()
    return [[pool[index] for index in np.flatnonzero(row)] for row in chosen[best]]


def masks_checksum(masks: Sequence[Mask]) -> int:
    """A 32-bit checksum; equal masks have equal sums on every machine."""
    return zlib.crc32(repr([list(mask) for mask in masks]).encode())


@contextmanager
def masked(units: Sequence[FreezeUnit], mask: Mask) -> Iterator[None]:
    """Within the block the units of ``mask`` do not require gradients; afterwards they do again."""
    # One that the user froze meanwhile stays frozen.
    parameters = [parameter for unit in mask for parameter in units[unit].parameters if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
