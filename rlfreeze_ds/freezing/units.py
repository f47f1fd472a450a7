"""The freeze units of one stage: what freezes as one, how large it is, what never freezes."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from rlfreeze_ds.freezing.shape import StageShape


@dataclass(frozen=True)
class FreezeUnit:
    """One unit. ``weight`` is its share of the stage's freezable weight-gradient time, in [0, 1]; element counts stand in
    for times. ``start`` is the unit's depth: the index of its first parameter among the stage's trainable ones."""

    name: str
    parameters: tuple[torch.nn.Parameter, ...]
    weight: float
    start: int


def find_units(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    unit: str,
    exclude: Sequence[str],
    optimized: Container[int] | None = None,
) -> tuple[list[FreezeUnit], int]:
    """The freeze units in the order of the forward pass, and the ``barrier`` of :class:`StageShape`.

    A parameter that the user froze (``requires_grad`` False) is no unit and is never touched. ``unit`` is ``"parameter"``
    or ``"layer"`` (the first component of the name, as ``PipelineModule`` numbers its layers). ``exclude``: name globs.
    ``optimized``: ``id`` of every parameter that an optimizer updates (all, if None); the others are no units either.
    """
    groups: dict[str, list[torch.nn.Parameter]] = {}
    starts: dict[str, int] = {}
    barrier = None
    depth = 0
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        unknown = optimized is not None and id(parameter) not in optimized
        if unknown or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            barrier = depth if barrier is None else barrier
        else:
            key = name.split(".", 1)[0] if unit == "layer" else name
            groups.setdefault(key, []).append(parameter)
            starts.setdefault(key, depth)
        depth += 1
    total = sum(parameter.numel() for group in groups.values() for parameter in group) or 1
    units = [
        FreezeUnit(key, tuple(group), sum(p.numel() for p in group) / total, starts[key])
        for key, group in groups.items()
    ]
    return units, depth if barrier is None else barrier


def shape_of(stage_id: int, units: Sequence[FreezeUnit], barrier: int, *, has_others: bool = False) -> StageShape:
    """The travelling description of a stage's units."""
    return StageShape(
        stage_id,
        tuple(unit.name for unit in units),
        tuple(unit.weight for unit in units),
        tuple(unit.start for unit in units),
        barrier,
        has_others,
    )
