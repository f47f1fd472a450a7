"""Seconds of a stage's instructions as a function of its mask, fitted from what really ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

BackwardSample = tuple[Sequence[int], float, float]
"""(units that were frozen, share of the units in a frozen prefix, seconds)."""

# How far a unit's seconds may be expected to lie from what its size says, as a share of that.
UNIT_SPREAD = 0.5
# Of a Huber loss: beyond so many standard deviations an error counts with its size, not its square.
_HUBER = 1.345
_ROUNDS = 6


@dataclass(frozen=True)
class StageFit:
    """backward = backward_s - share * weight_gradient_s - prefix_share * input_gradient_s; all in seconds.

    ``input_gradient_s`` is 0 on every stage but the first: elsewhere the input gradient is always needed. ``unit_shares``: per
    unit its share of ``weight_gradient_s``; the share of a mask is the sum of its units'. ``tail_s``: gradient reduction and
    optimizer step, after the last backward.

    ``forward_beyond_s``, ``backward_beyond_s``: per micro-batch, seconds beyond these formulas. The first forward of a batch, for
    one, follows an optimizer step and finds everything cold.

    Where backwards run in two, ``weight_s`` is the whole of W and ``weight_saving_s`` what freezing all units takes off it; I is
    the rest of the backward, and of what freezing saves (biases and norms have their gradients there). ``backward_beyond_s`` is
    then of I. None: they run as one.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float
    input_gradient_s: float = 0.0
    unit_shares: tuple[float, ...] = ()
    tail_s: float = 0.0
    forward_beyond_s: tuple[float, ...] = ()
    backward_beyond_s: tuple[float, ...] = ()
    weight_s: float | None = None
    weight_saving_s: float = 0.0
    weight_beyond_s: tuple[float, ...] = ()

    def forward(self, micro_batch_id: int | None) -> float:
        """Seconds of a forward pass; never negative."""
        return max(0.0, self.forward_s + _at(self.forward_beyond_s, micro_batch_id))

    def backward(self, share: float, prefix_share: float, micro_batch_id: int | None = None) -> float:
        """Seconds of a backward pass, without a micro-batch of any but the special ones; never negative."""
        saved = share * self.weight_gradient_s + prefix_share * self.input_gradient_s
        beyond_s = _at(self.backward_beyond_s, micro_batch_id) + _at(self.weight_beyond_s, micro_batch_id)
        return max(0.0, self.backward_s - saved + beyond_s)

    def backward_weight(self, share: float, micro_batch_id: int | None = None) -> float:
        """Seconds of a W; never negative."""
        return max(0.0, (self.weight_s or 0.0) - share * self.weight_saving_s + _at(self.weight_beyond_s, micro_batch_id))

    def backward_input(self, share: float, prefix_share: float, micro_batch_id: int | None = None) -> float:
        """Seconds of an I; never negative."""
        saved = share * (self.weight_gradient_s - self.weight_saving_s) + prefix_share * self.input_gradient_s
        beyond_s = _at(self.backward_beyond_s, micro_batch_id)
        return max(0.0, self.backward_s - (self.weight_s or 0.0) - saved + beyond_s)

    def seconds(self, kind: str, share: float, prefix_share: float, micro_batch_id: int | None = None) -> float:
        """Seconds of an F, B, I or W."""
        if kind == "F":
            return self.forward(micro_batch_id)
        if kind == "W":
            return self.backward_weight(share, micro_batch_id)
        return (self.backward if kind == "B" else self.backward_input)(share, prefix_share, micro_batch_id)


def _at(beyond_s: tuple[float, ...], micro_batch_id: int | None) -> float:
    return beyond_s[micro_batch_id] if micro_batch_id is not None and micro_batch_id < len(beyond_s) else 0.0


def fit_stage(
    forward_s: Sequence[float], backward: Sequence[BackwardSample], sizes: Sequence[float], *, first_stage: bool
) -> StageFit | None:
    """Robust least squares; None without a finite sample of both kinds.

    Args:
        sizes: per unit, its share of the stage's elements. A unit's seconds are expected to be near its share of the whole,
            and the nearer, the less the masks that ran tell it apart from the others (ridge regression).
    """
    forwards = [value for value in forward_s if np.isfinite(value) and value >= 0]
    samples = [sample for sample in backward if np.isfinite(sample[1]) and np.isfinite(sample[2]) and sample[2] >= 0]
    if not forwards or not samples:
        return None
    size = np.asarray(sizes, dtype=float)
    frozen = np.zeros((len(samples), len(size)))
    for row, (mask, _, _) in zip(frozen, samples, strict=True):
        row[list(mask)] = 1.0
    prefix, seconds = (np.array([sample[k] for sample in samples]) for k in (1, 2))
    ones = np.ones(len(samples))
    columns = [ones, -frozen @ size] + ([-prefix] if first_stage else [])
    solution, deviation = _huber(np.stack(columns, axis=1), seconds, None)
    backward_s, whole = max(0.0, float(solution[0])), max(0.0, float(solution[1]))
    input_gradient_s = max(0.0, float(solution[2])) if first_stage else 0.0
    unit_s = whole * size
    if whole > 0 and len(size) > 1:
        # The same with one more unknown per unit: by how much, over its size's share, it differs.
        design = np.concatenate([np.stack(columns, axis=1), -frozen * size], axis=1)
        penalty = np.zeros(design.shape[1])
        penalty[len(columns) :] = (max(deviation, 1e-9 * whole) / (UNIT_SPREAD * whole)) ** 2
        solution, _ = _huber(design, seconds, penalty)
        backward_s = max(0.0, float(solution[0]))
        input_gradient_s = max(0.0, float(solution[2])) if first_stage else 0.0
        unit_s = np.maximum(0.0, size * (solution[1] + solution[len(columns) :]))
    total = float(unit_s.sum())
    shares = unit_s / total if total > 0 else size
    return StageFit(float(np.median(forwards)), backward_s, total, input_gradient_s, tuple(shares.tolist()))


def fit_weight(fit: StageFit, samples: Sequence[tuple[float, float]]) -> StageFit:
    """``fit`` with what of a backward is W's, from (share of the weight-gradient time that was frozen, seconds of W) pairs."""
    known = np.array([pair for pair in samples if np.isfinite(pair[1]) and pair[1] >= 0], dtype=float)
    if not len(known):
        return fit
    design = np.stack([np.ones(len(known)), -known[:, 0]], axis=1)
    solution, _ = _huber(design, known[:, 1], None)
    weight_s = min(max(0.0, float(solution[0])), fit.backward_s)
    return replace(fit, weight_s=weight_s, weight_saving_s=min(max(0.0, float(solution[1])), weight_s, fit.weight_gradient_s))


def _huber(design: np.ndarray, seconds: np.ndarray, penalty: np.ndarray | None) -> tuple[np.ndarray, float]:
    """The solution, and the standard deviation of what it leaves unexplained."""
    weight = np.ones(len(seconds))
    solution, deviation = np.zeros(design.shape[1]), 0.0
    for _ in range(_ROUNDS):
        weighted = design * weight[:, None]
        normal = design.T @ weighted
        if penalty is not None:
            normal[np.diag_indices_from(normal)] += penalty
        solution = np.linalg.lstsq(normal, weighted.T @ seconds, rcond=None)[0]
        residual = np.abs(seconds - design @ solution)
        # The median absolute residual of a normal distribution is 0.6745 standard deviations.
        deviation = max(float(np.median(residual)) / 0.6745, 1e-9)
        weight = np.minimum(1.0, _HUBER * deviation / np.maximum(residual, 1e-12))
    return solution, deviation


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
