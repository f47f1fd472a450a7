"""Signal and noise of every unit's gradient, from norms that are known anyway.

A mean over m micro-batches has the expected squared norm s + sigma^2 / m (McCandlish et al., 2018, appendix A). Freezing makes m
differ from step to step, so a regression of the squared norm on 1 / m tells the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlfreeze_ds.freezing.gradients import on_device

# Weight of the past, per step: gradients change, and a regression needs steps with several m.
DECAY = 0.98
# Standard deviations that the noise must be away from nothing to be told to anyone.
CONFIDENCE = 2.0

_SUMS = ("weight", "x", "y", "xx", "xy", "yy", "weights")


class GradientNoise:
    """Running weighted sums of the regression, [len(_SUMS), num_units], on the gradients' device: looking costs no
    synchronisation."""

    def __init__(self, num_units: int, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), num_units, dtype=torch.float64, device=device)
        decays = [DECAY**2 if name == "weights" else DECAY for name in _SUMS]
        self._decays = torch.tensor(decays, dtype=torch.float64, device=device)[:, None]
        self._before: torch.Tensor | None = None

    @torch.no_grad()
    def observe(self, norm: torch.Tensor, live_counts: Sequence[int], num_replicas: int) -> None:
        """Take a step's norms, [num_units], of gradients that are means over ``live_counts`` micro-batches on each of
        ``num_replicas`` replicas. A norm that is not finite counts for nothing."""
        live = on_device([max(1, live) * num_replicas for live in live_counts], torch.float64, norm.device)
        x, y = 1.0 / live, norm.double().square()
        seen = y.isfinite()
        y = torch.where(seen, y, 0.0)
        one = torch.ones_like(y)
        new = torch.stack([one, x, y, x * x, x * y, y * y, one])
        self._before = self._sums
        self._sums = torch.where(seen, self._decays * self._sums + new, self._sums)

    def forget_last(self) -> None:
        """Undo the last :meth:`observe`: its step was skipped."""
        if self._before is not None:
            self._sums, self._before = self._before, None

    def estimates(self) -> tuple[list[float], list[float]]:
        """Per unit the squared signal, and the noise of one micro-batch in the same unit; NaN where they cannot be told apart
        (too few steps, equal m, or a difference that could be chance)."""
        weight, x, y, xx, xy, yy, weights = self._sums.cpu()
        mean_x, mean_y = x / weight, y / weight
        spread = xx / weight - mean_x.square()
        slope = (xy / weight - mean_x * mean_y) / spread
        intercept = mean_y - slope * mean_x
        residual = (yy / weight - mean_y.square() - slope.square() * spread).clamp(min=0)
        effective = weight.square() / weights
        error = (residual / (spread * (effective - 2).clamp(min=1e-9))).sqrt()
        known = (effective > 4) & (spread > 1e-12) & (slope > CONFIDENCE * error) & slope.isfinite()
        signal = torch.where(known, intercept.clamp(min=0), torch.nan)
        return signal.tolist(), torch.where(known, slope, torch.nan).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, exact."""
        return dict(zip(_SUMS, self._sums.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        rows = [state[name] for name in _SUMS]
        self._sums = torch.tensor(rows, dtype=torch.float64, device=self._sums.device).reshape(len(_SUMS), -1)
