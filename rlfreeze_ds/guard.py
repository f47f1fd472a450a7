"""The loss guard: notices, without any policy, that the loss has left its trend."""

from __future__ import annotations

import math

from rlfreeze_ds.config import GuardConfig

_EMA = 0.95


class LossGuard:
    """Compares each loss with the moving average of the losses before it. State: average and steps beyond it."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.average: float | None = None
        self.beyond = 0

    def observe(self, loss: float) -> bool:
        """Take a step's loss; True when it is time to thaw everything."""
        if self.average is None:
            self.average = loss if math.isfinite(loss) else None
            return False
        too_high = not math.isfinite(loss) or loss > self.average + self.config.tolerance * abs(self.average)
        self.beyond = self.beyond + 1 if too_high else 0
        if math.isfinite(loss):
            self.average = _EMA * self.average + (1 - _EMA) * loss
        if self.config.enabled and self.beyond >= self.config.patience:
            self.beyond = 0
            return True
        return False
