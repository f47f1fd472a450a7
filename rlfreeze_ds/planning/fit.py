"""Seconds of a stage's instructions as a function of its mask, fitted from what really ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

BackwardSample = tuple[float, float, float]
"""(share of the weight-gradient time skipped, share of the units in a frozen prefix, seconds)."""


@dataclass(frozen=True)
class StageFit:
    """backward = backward_s - share * weight_gradient_s - prefix_share * input_gradient_s; all in seconds.

    ``input_gradient_s`` is 0 on every stage but the first: elsewhere the input gradient is always needed.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float
    input_gradient_s: float = 0.0

    def backward(self, share: float, prefix_share: float) -> float:
        """Seconds of a backward pass; never negative."""
        saved = share * self.weight_gradient_s + prefix_share * self.input_gradient_s
        return max(0.0, self.backward_s - saved)


def fit_stage(forward_s: Sequence[float], backward: Sequence[BackwardSample], *, first_stage: bool) -> StageFit | None:
    """Robust least squares (Huber weights); None without a finite sample of both kinds."""
    forwards = np.array(forward_s, dtype=float)
    forwards = forwards[np.isfinite(forwards) & (forwards >= 0)]
    rows = np.array(backward, dtype=float).reshape(-1, 3)
    rows = rows[np.isfinite(rows).all(axis=1) & (rows[:, 2] >= 0)]
    if not len(forwards) or not len(rows):
        return None
    columns = [np.ones(len(rows)), -rows[:, 0]] + ([-rows[:, 1]] if first_stage else [])
    design, seconds = np.stack(columns, axis=1), rows[:, 2]
    weight = np.ones(len(rows))
    solution = np.zeros(design.shape[1])
    for _ in range(20):
        root = np.sqrt(weight)
        solution = np.linalg.lstsq(design * root[:, None], seconds * root, rcond=None)[0]
        residual = np.abs(seconds - design @ solution)
        # 1.345 sigma, sigma from the median absolute residual: the customary Huber constant.
        bound = max(1.345 * 1.4826 * float(np.median(residual)), 1e-9)
        weight = np.minimum(1.0, bound / np.maximum(residual, 1e-12))
    saved = [max(0.0, float(value)) for value in solution[1:]]
    return StageFit(
        float(np.median(forwards)), max(0.0, float(solution[0])), saved[0], saved[1] if first_stage else 0.0
    )


def fit_transfer(makespan_s: Callable[[float], float], measured_s: float) -> float:
    """Seconds per cross-rank edge with which the simulated makespan meets the measured one; 0 if it is longer already.

    The simulated makespan grows with the transfer, so bisection finds it.
    """
    low, high = 0.0, measured_s
    if makespan_s(low) >= measured_s:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if makespan_s(middle) < measured_s else (low, middle)
    return low
