"""What a rank remembers of its steps becomes seconds that tell the ends of a batch from its middle."""

from __future__ import annotations

import numpy as np
import pytest

from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.history import NEAR_END, StepHistory, StepMasks
from rlfreeze_ds.telemetry.profiler import StepTiming

MICRO_BATCHES = 12
SHAPE = StageShape(1, ("a", "b"), (0.5, 0.5), (0, 1), 0)
MASKS = ((), (0,), (1,), (0, 1))


def history(num_steps: int = 40, num_micro_batches: int = MICRO_BATCHES, noise_s: float = 1e-4) -> StepHistory:
    """F = 10 ms, 15 the first; B = 30 ms less 10 per frozen unit, 5 more in the last micro-batch and one in the middle."""
    rng, found = np.random.default_rng(0), StepHistory(SHAPE)
    for step in range(num_steps):
        masks = tuple(MASKS[index] for index in rng.integers(0, 4, num_micro_batches))
        seconds = {("F", m): 0.010 + 0.005 * (m == 0) for m in range(num_micro_batches)}
        for m, mask in enumerate(masks):
            seconds["B", m] = 0.030 - 0.010 * len(mask) + 0.005 * (m in (num_micro_batches - 1, num_micro_batches // 2))
        noisy = {key: value + noise_s * rng.standard_normal() for key, value in seconds.items()}
        found.add(StepTiming(step, noisy, 1.0, 0.002), StepMasks(step, "warmup" if step < 10 else "steady", masks))
    return found


def test_the_ends_of_a_batch_have_seconds_of_their_own() -> None:
    fit = history().fit()
    assert fit is not None and fit.tail_s == pytest.approx(0.002)
    assert fit.forward(0) == pytest.approx(0.015, abs=2e-4)
    assert [fit.forward(m) for m in range(1, MICRO_BATCHES)] == pytest.approx([0.010] * (MICRO_BATCHES - 1), abs=2e-4)
    assert fit.backward(0.5, 0.0, MICRO_BATCHES - 1) == pytest.approx(0.025, abs=2e-4)
    middle = range(NEAR_END, MICRO_BATCHES - NEAR_END)
    assert {fit.forward(m) for m in middle} == {fit.forward_s}
    assert {fit.backward(0.5, 0.0, m) for m in middle} == {fit.backward(0.5, 0.0)}


def test_a_batch_of_another_size_has_other_ends() -> None:
    found = history(num_micro_batches=3)
    found.add(StepTiming(99, {("F", 0): 0.010, ("B", 0): 0.030}, 1.0, 0.0), StepMasks(99, "steady", ((),)))
    fit = found.fit()
    assert fit is not None and len(fit.forward_beyond_s) == 1 and fit.forward(2) == fit.forward_s


def test_the_machine_got_slower_and_the_ends_with_it() -> None:
    found = history()
    before = found.fit()
    for step in range(100, 116):
        masks = tuple(MASKS[(m + step) % 4] for m in range(MICRO_BATCHES))
        slow = {("F", m): 2 * before.forward(m) for m in range(MICRO_BATCHES)}
        slow |= {("B", m): 2 * before.backward(0.5 * len(mask), 0.0, m) for m, mask in enumerate(masks)}
        found.add(StepTiming(step, slow, 2.0, 0.002), StepMasks(step, "steady", masks))
    found.rebase(100)
    after = found.fit()
    assert after.forward(0) == pytest.approx(2 * before.forward(0), rel=0.05)
    assert after.backward(0.5, 0.0, 3) == pytest.approx(2 * before.backward(0.5, 0.0, 3), rel=0.05)


def split_history(num_steps: int = 40) -> StepHistory:
    """I = 12 ms less 2 per frozen unit; W = 18 ms less 8, 4 more in the last micro-batch."""
    rng, found = np.random.default_rng(1), StepHistory(SHAPE)
    for step in range(num_steps):
        masks = tuple(MASKS[index] for index in rng.integers(0, 4, MICRO_BATCHES))
        seconds = {("F", m): 0.010 for m in range(MICRO_BATCHES)}
        for m, mask in enumerate(masks):
            seconds["I", m] = 0.012 - 0.002 * len(mask)
            seconds["W", m] = 0.018 - 0.008 * len(mask) + 0.004 * (m == MICRO_BATCHES - 1)
        noisy = {key: value + 1e-4 * rng.standard_normal() for key, value in seconds.items()}
        found.add(StepTiming(step, noisy, 1.0, 0.002), StepMasks(step, "warmup" if step < 10 else "steady", masks))
    return found


def test_a_backward_in_two_is_fitted_in_two() -> None:
    fit = split_history().fit()
    assert fit is not None and fit.weight_s == pytest.approx(0.018, abs=2e-4)
    for share in (0.0, 0.5, 1.0):
        assert fit.backward_input(share, 0.0, 5) == pytest.approx(0.012 - 0.004 * share, abs=3e-4)
        assert fit.backward_weight(share, 5) == pytest.approx(0.018 - 0.016 * share, abs=3e-4)
        assert fit.backward_weight(share, MICRO_BATCHES - 1) == pytest.approx(0.022 - 0.016 * share, abs=4e-4)
        whole = fit.backward_input(share, 0.0, 0) + fit.backward_weight(share, 0)
        assert fit.backward(share, 0.0, 0) == pytest.approx(whole, abs=1e-9)
    assert {name for name, _, _ in split_history().instruction_seconds(0)} == {"F", "I", "W"}


def test_a_split_history_survives_a_checkpoint() -> None:
    found, again = split_history(), StepHistory(SHAPE)
    again.load_state_dict(found.state_dict())
    assert again.fit() == found.fit()
