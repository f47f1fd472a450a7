"""What a policy sees and does: the contract between training jobs, simulated jobs and policies. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

SMALLEST, LARGEST = 0.01, 100.0
"""Bounds of either threshold."""

STEP_FACTOR = 2.0
"""An action of 1 multiplies its threshold by this, of -1 divides it."""

NUM_ACTIONS = 2


@dataclass(frozen=True)
class Thresholds:
    """Of the mixed criterion, dimensionless, each in [:data:`SMALLEST`, :data:`LARGEST`]. A unit may freeze while both of its
    statistics are at most these."""

    gradient: float
    variation: float

    def moved(self, action: np.ndarray) -> Thresholds:
        """Each multiplied by ``STEP_FACTOR ** a``, then clipped. ``action``: [2], clipped to [-1, 1]; NaN counts as 0."""
        by = np.clip(np.nan_to_num(np.asarray(action, dtype=float), nan=0.0), -1.0, 1.0)
        pairs = zip((self.gradient, self.variation), by.tolist(), strict=True)
        return Thresholds(*(min(max(threshold * STEP_FACTOR**a, SMALLEST), LARGEST) for threshold, a in pairs))


@dataclass(frozen=True)
class Observation:
    """One window of steps of a job, in numbers that mean the same in every job; all dimensionless.

    ======================  ==============  =============================================================================
    field                   low .. high     meaning
    ======================  ==============  =============================================================================
    progress                0 .. 1          share of the run that is done
    loss_level              -10 .. 10       log of the window's mean loss over its level at the end of warm-up
    loss_slope              -1 .. 1         share of the loss that the window took off, against the window before
    kept_progress           0 .. 1          share of the expected loss decrease that is kept
    loss_deviation          -10 .. 10       loss above its own trend, over the spread around that
    throughput              0 .. 10         seconds of an unfrozen batch over those of the window's batches
    mean_freeze_ratio       0 .. 1          realised, over stages and micro-batches
    largest_freeze_ratio    0 .. 1          realised, of the stage that freezes most
    eligible_share          0 .. 1          share of the weight-gradient time of units that may freeze
    bubble_ratio            0 .. 1          share of rank-seconds spent waiting
    log_gradient_threshold  -4.7 .. 4.7     natural logarithm
    log_variation_threshold -4.7 .. 4.7     natural logarithm
    ======================  ==============  =============================================================================
    """

    progress: float
    loss_level: float
    loss_slope: float
    kept_progress: float
    loss_deviation: float
    throughput: float
    mean_freeze_ratio: float
    largest_freeze_ratio: float
    eligible_share: float
    bubble_ratio: float
    log_gradient_threshold: float
    log_variation_threshold: float

    def vector(self) -> np.ndarray:
        """float32 [:data:`SIZE`], within :data:`LOW` and :data:`HIGH`; what is not a number becomes 0."""
        values = np.array([getattr(self, name) for name in NAMES], dtype=np.float64)
        return np.clip(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf), LOW, HIGH).astype(np.float32)


NAMES = tuple(field.name for field in fields(Observation))
SIZE = len(NAMES)
_LOG = math.log(LARGEST) + 0.1
LOW = np.array([0, -10, -1, 0, -10, 0, 0, 0, 0, 0, -_LOG, -_LOG], dtype=np.float32)
HIGH = np.array([1, 10, 1, 1, 10, 10, 1, 1, 1, 1, _LOG, _LOG], dtype=np.float32)
