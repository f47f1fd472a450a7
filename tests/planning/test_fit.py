"""The fitted cost of a backward pass against the model that made the samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlfreeze_ds.planning.fit import StageFit, fit_stage, fit_transfer

SIZES = np.array([0.3, 0.02, 0.1, 0.08, 0.2, 0.1, 0.15, 0.05])
ALL = tuple(range(len(SIZES)))
# A unit's seconds are not always its size's: an embedding is large and cheap.
SECONDS = 0.02 * SIZES * np.array([0.1, 1.0, 1.3, 1.2, 1.4, 1.2, 1.5, 0.9])
BACKWARD_S = 0.05


def seconds_of(mask: tuple[int, ...], prefix: float, input_gradient_s: float) -> float:
    return BACKWARD_S - float(SECONDS[list(mask)].sum()) - prefix * input_gradient_s


def samples(input_gradient_s: float, noise: float, *, only_whole: bool = False) -> list[tuple[tuple[int, ...], float, float]]:
    rng = np.random.default_rng(0)
    rows = []
    for k in range(400):
        mask = tuple(int(u) for u in np.flatnonzero(rng.random(len(SIZES)) < rng.random()))
        if only_whole or k % 4 == 0:
            mask = ALL if k % 8 == 0 else ()
        prefix = float(mask == ALL) if input_gradient_s else 0.0
        rows.append((mask, prefix, seconds_of(mask, prefix, input_gradient_s) * (1 + noise * rng.standard_normal())))
    return rows


def predicted(fit: StageFit, mask: tuple[int, ...], prefix: float) -> float:
    return fit.backward(sum(fit.unit_shares[unit] for unit in mask), prefix)


@pytest.mark.parametrize("first_stage", [False, True])
def test_right_for_any_mask_despite_outliers_and_broken_clocks(first_stage: bool) -> None:
    input_gradient_s = 0.015 if first_stage else 0.0
    rows = samples(input_gradient_s, 0.02) + [((), 0.0, 1.0), ((0, 1), 0.0, 2.0), (ALL, 0.0, 0.5)]
    rows += [((), 0.0, math.nan), (ALL, 1.0, -1.0), ((2,), 0.0, math.inf)]
    fit = fit_stage([0.02, 0.021, 0.019, 5.0, math.nan], rows, SIZES, first_stage=first_stage)
    assert fit is not None and sum(fit.unit_shares) == pytest.approx(1)
    assert fit.forward_s == pytest.approx(0.02, rel=0.06)
    rng = np.random.default_rng(1)
    masks = [(), ALL, (0,), ALL[1:], *(tuple(np.flatnonzero(rng.random(8) < 0.5).tolist()) for _ in range(20))]
    for mask in masks:
        prefix = float(mask == ALL) if first_stage else 0.0
        assert predicted(fit, mask, prefix) == pytest.approx(seconds_of(mask, prefix, input_gradient_s), abs=0.0007)
    # Sizes alone would say that the first unit takes three tenths.
    assert fit.unit_shares[0] < 0.1


def test_masks_that_tell_units_apart_by_nothing_leave_their_sizes() -> None:
    fit = fit_stage([0.02], samples(0.0, 0.02, only_whole=True), SIZES, first_stage=False)
    assert fit is not None
    assert fit.unit_shares == pytest.approx(tuple(SIZES), abs=0.01)
    assert fit.weight_gradient_s == pytest.approx(SECONDS.sum(), rel=0.05)


def test_freezing_that_makes_it_slower_saves_nothing_and_no_samples_give_no_fit() -> None:
    fit = fit_stage([0.01], [((), 0.0, 0.02), ((0,), 0.0, 0.03)] * 5, [1.0], first_stage=False)
    assert fit is not None and fit.weight_gradient_s == 0.0 and fit.unit_shares == (1.0,)
    assert fit_stage([], [((), 0.0, 0.02)], [1.0], first_stage=False) is None
    assert fit_stage([0.1], [((), 0.0, math.nan)], [1.0], first_stage=False) is None
    nothing = fit_stage([0.1], [((), 0.0, 0.2)], [], first_stage=False)
    assert nothing is not None and nothing.backward(0.0, 0.0) == pytest.approx(0.2) and nothing.unit_shares == ()


def test_transfer_meets_the_measured_makespan() -> None:
    assert fit_transfer(lambda transfer: 1.0 + 3 * transfer, 1.6) == pytest.approx(0.2)
    assert fit_transfer(lambda transfer: 2.0 + transfer, 1.6) == 0.0
