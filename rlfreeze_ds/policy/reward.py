"""What a policy is rewarded for: loss per second against the same job unfrozen. Pure."""

from __future__ import annotations

import math

DEVIATION_WEIGHT = 0.1
"""Reward that a loss one spread above its trend costs."""

SLOPE_WEIGHT = 0.25
"""Share of the measured slope in ``kept``; the rest is the expected share, which is far less noisy."""


def reward(throughput: float, kept_progress: float, loss_deviation: float, slope_ratio: float | None = None) -> float:
    """The gain in loss per second of one window, about 0 for a job that freezes nothing: throughput * kept - 1, less what a loss
    above its trend costs. Always finite, in [-2, 9].

    Args:
        throughput: seconds of an unfrozen batch over those of this window's batches.
        kept_progress: share of the expected loss decrease that is kept, in [0, 1].
        loss_deviation: loss above its own trend, over the spread around that.
        slope_ratio: measured decrease of the loss over what an unfrozen job's would be; None where nothing tells.
    """
    kept = _clip(kept_progress, 0.0, 1.0)
    if slope_ratio is not None and math.isfinite(slope_ratio):
        kept = (1 - SLOPE_WEIGHT) * kept + SLOPE_WEIGHT * _clip(slope_ratio, 0.0, 1.5)
    gain = _clip(throughput, 0.0, 10.0) * kept - 1.0
    deviation = 10.0 if math.isnan(loss_deviation) else _clip(loss_deviation, 0.0, 10.0)
    return _clip(gain - DEVIATION_WEIGHT * deviation, -2.0, 9.0)


def _clip(value: float, low: float, high: float) -> float:
    """What is not a number counts as the worst: a window that cannot be judged was no good one."""
    return low if math.isnan(value) else min(max(value, low), high)
