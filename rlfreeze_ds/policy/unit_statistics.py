"""The mixed criterion's statistics on numpy, a window of steps at a time, for simulated jobs. Equal to
``freezing.criterion.MixedCriterion`` fed with the same norms step by step."""

from __future__ import annotations

import numpy as np

from rlfreeze_ds.policy.observation import Thresholds


class UnitStatistics:
    """G and V of every unit. The first window only starts the averages, as a job's first steps do.

    Args:
        num_units: of the whole job.
        ema: weight of the past from step to step, in [0, 1).
    """

    def __init__(self, num_units: int, ema: float) -> None:
        self.ema = ema
        nan = np.full(num_units, np.nan)
        self._norm, self._change, self._last, self._reference = nan, nan, nan, nan

    def observe(self, norms: np.ndarray, seen: np.ndarray | None = None) -> None:
        """Take the norms of consecutive steps' final gradients.

        Args:
            norms: [steps, num_units], finite.
            seen: bool [num_units]; a unit frozen throughout keeps its statistics. None, and always in the first window: all.
        """
        if np.isnan(self._last[0]):
            self._norm = self._last = norms[0]
            norms = norms[1:]
            if not len(norms):
                return
        changes = np.abs(np.diff(norms, axis=0, prepend=self._last[None]))
        # An average begins with its first value, which is the same as having been there before.
        before = np.where(np.isnan(self._change), changes[0], self._change)
        found = self._blend(self._norm, norms), self._blend(before, changes), norms[-1]
        if seen is not None and not seen.all():
            present = self._norm, self._change, self._last
            found = tuple(np.where(seen, new, old) for new, old in zip(found, present, strict=True))
        self._norm, self._change, self._last = found

    def _blend(self, average: np.ndarray, values: np.ndarray) -> np.ndarray:
        """All steps at once: ema^n average + (1 - ema) sum_k ema^(n - 1 - k) values[k]."""
        num_steps = len(values)
        weights = (1 - self.ema) * self.ema ** np.arange(num_steps - 1, -1, -1)
        return self.ema**num_steps * average + weights @ values

    def set_reference(self) -> None:
        """Call once, at the end of warm-up."""
        self._reference = self._norm

    @property
    def gradient(self) -> np.ndarray:
        """G, [num_units]: running mean of the norm over its level at the end of warm-up."""
        return self._norm / self._reference

    @property
    def variation(self) -> np.ndarray:
        """V, [num_units]: running mean of the norm's absolute change over that of the norm."""
        return self._change / self._norm

    def eligible(self, thresholds: Thresholds) -> np.ndarray:
        """Which units may freeze, bool [num_units]; what was never seen may not."""
        return (self.gradient <= thresholds.gradient) & (self.variation <= thresholds.variation)
