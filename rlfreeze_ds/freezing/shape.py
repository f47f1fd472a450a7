"""A stage as the planner sees it: sizes and depths of its freeze units, no tensor. Pure, so that a plan needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StageShape:
    """What the planner knows about a stage without holding its tensors; travels to rank 0.

    ``barrier`` is the depth of the first trainable parameter that never freezes (the number of trainable parameters if
    there is none): a frozen prefix cannot reach past it. ``has_others``: whether there is one.
    """

    stage_id: int
    names: tuple[str, ...]
    weights: tuple[float, ...]
    starts: tuple[int, ...]
    barrier: int
    has_others: bool = False

    def share(self, mask: Iterable[int]) -> float:
        """Share of the freezable weight-gradient time that ``mask`` skips."""
        return min(1.0, sum(self.weights[unit] for unit in mask))

    def prefix_share(self, mask: Iterable[int]) -> float:
        """Share of the units, by weight, that lie before the first live parameter of the stage."""
        frozen = set(mask)
        live = [self.starts[unit] for unit in range(len(self.weights)) if unit not in frozen]
        first_live = min([*live, self.barrier])
        return min(1.0, sum(weight for weight, start in zip(self.weights, self.starts, strict=True) if start < first_live))
