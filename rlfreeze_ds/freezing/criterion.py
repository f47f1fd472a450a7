"""The mixed criterion: a unit may freeze when its gradient is small and no longer varies.

For unit p: G = EMA of its gradient's norm over the level at the end of warm-up, V = EMA of the norm's absolute change over the
EMA of the norm. Both are dimensionless. Eligible: G <= ``gradient_threshold`` and V <= ``variation_threshold``.
Reconstructed: RLFreeze's own formula is not public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class MixedCriterion:
    """Statistics of every unit of this stage, kept on the gradients' device so that looking costs no synchronisation."""

    def __init__(self, num_units: int, ema: float, device: torch.device) -> None:
        self.ema = ema
        nan = torch.full((num_units,), float("nan"), device=device)
        self._norm, self._change, self._last, self._reference = nan, nan.clone(), nan.clone(), nan.clone()
        self._before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def observe(self, norm: torch.Tensor) -> None:
        """Take the norms of a step's final gradients, [num_units]. A unit whose norm is not finite keeps its statistics."""
        self._before = (self._norm, self._change, self._last)
        seen = norm.isfinite()
        self._change = self._blend(self._change, (norm - self._last).abs(), seen & self._last.isfinite())
        self._norm = self._blend(self._norm, norm, seen)
        self._last = torch.where(seen, norm, self._last)

    def forget_last(self) -> None:
        """Undo the last :meth:`observe`: its step was skipped."""
        if self._before is not None:
            (self._norm, self._change, self._last), self._before = self._before, None

    def _blend(self, average: torch.Tensor, value: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        blended = torch.where(average.isfinite(), self.ema * average + (1 - self.ema) * value, value)
        return torch.where(where, blended, average)

    def set_reference(self) -> None:
        """Call once, at the end of warm-up."""
        self._reference = self._norm.clone()

    def statistics(self) -> tuple[list[float], list[float]]:
        """G and V of every unit; NaN where nothing was seen."""
        return (self._norm / self._reference).tolist(), (self._change / self._norm).tolist()

    def norms(self) -> list[float]:
        """Running mean of every unit's gradient norm; NaN where nothing was seen."""
        return self._norm.tolist()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, exact."""
        return {
            "norm": self._norm.tolist(),
            "change": self._change.tolist(),
            "last": self._last.tolist(),
            "reference": self._reference.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        device = self._norm.device
        self._norm, self._change, self._last, self._reference = (
            torch.tensor(state[key], device=device) for key in ("norm", "change", "last", "reference")
        )


def eligible_units(
    statistics: tuple[Sequence[float], Sequence[float]], gradient_threshold: float, variation_threshold: float
) -> list[bool]:
    """Which units may freeze. A unit that was never seen (NaN) may not. A unit whose gradient is exactly zero
    (V is 0 / 0) is not seen either: nothing is known about it."""
    return [g <= gradient_threshold and v <= variation_threshold for g, v in zip(*statistics, strict=True)]
