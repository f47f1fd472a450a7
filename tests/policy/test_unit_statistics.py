"""The criterion's statistics, a window at a time, against the real criterion, a step at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlfreeze_ds.freezing.criterion import MixedCriterion, eligible_units
from rlfreeze_ds.policy.observation import Thresholds
from rlfreeze_ds.policy.unit_statistics import UnitStatistics


@pytest.mark.parametrize("windows", [(1, 1, 1), (1, 7, 3), (5, 32, 1), (32, 32, 32)])
@pytest.mark.parametrize("ema", [0.0, 0.6, 0.9])
def test_equal_to_the_mixed_criterion_on_the_same_norms(windows: tuple[int, ...], ema: float) -> None:
    rng = np.random.default_rng(0)
    ours, real = UnitStatistics(6, ema), MixedCriterion(6, ema, torch.device("cpu"))
    for index, num_steps in enumerate(windows):
        norms = rng.lognormal(0.0, 0.7, (num_steps, 6)) * 0.9**index
        # A unit that no micro-batch sees has no norm.
        seen = np.array([True] * 6) if index == 0 else rng.random(6) < 0.7
        ours.observe(norms, seen)
        for row in norms:
            real.observe(torch.tensor(np.where(seen, row, np.nan)))
        if index == 0:
            ours.set_reference()
            real.set_reference()
    gradient, variation = real.statistics()
    assert ours.gradient == pytest.approx(gradient, rel=1e-5)
    assert ours.variation == pytest.approx(variation, rel=1e-5, nan_ok=True)
    found = set()
    for share in (0.3, 0.6, 0.9):
        # Between two values, where rounding does not decide.
        limits = [float(np.nanquantile(values, share, method="lower")) * 1.0001 for values in (gradient, variation)]
        expected = eligible_units((gradient, variation), *limits)
        assert ours.eligible(Thresholds(*limits)).tolist() == expected
        found |= set(expected)
    assert found == {True, False}


def test_what_was_never_seen_may_not_freeze() -> None:
    statistics = UnitStatistics(3, 0.9)
    assert not statistics.eligible(Thresholds(100.0, 100.0)).any()
    statistics.observe(np.ones((1, 3)))
    statistics.set_reference()
    assert not statistics.eligible(Thresholds(100.0, 100.0)).any(), "one norm says nothing about how it varies"
