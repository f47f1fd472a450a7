"""The fitted cost of a backward pass against the model that made the samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlfreeze_ds.planning.fit import StageFit, fit_stage, fit_transfer


def samples(truth: StageFit, first_stage: bool, noise: float) -> list[tuple[float, float, float]]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        share = float(rng.choice([0.0, 1.0, 0.95, rng.random()]))
        prefix = float(share if share in (0.0, 1.0) else 0.0) if first_stage else 0.0
        rows.append((share, prefix, truth.backward(share, prefix) * (1 + noise * rng.standard_normal())))
    return rows


@pytest.mark.parametrize("first_stage", [False, True])
def test_fit_finds_the_model_despite_outliers_and_broken_clocks(first_stage: bool) -> None:
    truth = StageFit(0.02, 0.05, 0.02, 0.028 if first_stage else 0.0)
    rows = samples(truth, first_stage, 0.02) + [(0.0, 0.0, 1.0), (0.5, 0.0, 2.0), (1.0, 0.0, 0.5)]
    rows += [(0.0, 0.0, math.nan), (1.0, 1.0, -1.0), (0.5, 0.0, math.inf)]
    fit = fit_stage([0.02, 0.021, 0.019, 5.0, math.nan], rows, first_stage=first_stage)
    assert fit is not None
    for share, prefix in ((0.0, 0.0), (1.0, float(first_stage)), (0.5, 0.0)):
        assert fit.backward(share, prefix) == pytest.approx(truth.backward(share, prefix), abs=0.001)
    assert fit.forward_s == pytest.approx(0.02, rel=0.06)


def test_freezing_that_makes_it_slower_saves_nothing_and_no_samples_give_no_fit() -> None:
    fit = fit_stage([0.01], [(0.0, 0.0, 0.02), (1.0, 0.0, 0.03)] * 5, first_stage=False)
    assert fit is not None and fit.weight_gradient_s == 0.0
    assert fit_stage([], [(0.0, 0.0, 0.02)], first_stage=False) is None
    assert fit_stage([0.1], [(0.0, 0.0, math.nan)], first_stage=False) is None


def test_transfer_meets_the_measured_makespan() -> None:
    assert fit_transfer(lambda transfer: 1.0 + 3 * transfer, 1.6) == pytest.approx(0.2)
    assert fit_transfer(lambda transfer: 2.0 + transfer, 1.6) == 0.0
