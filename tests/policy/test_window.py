"""What a window says of its steps, and who moves thresholds, without any job."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rlfreeze_ds.config import PolicyConfig
from rlfreeze_ds.policy.observation import HIGH, LOW, NAMES, SIZE, STEP_FACTOR, Observation, Thresholds
from rlfreeze_ds.policy.policies import RandomPolicy
from rlfreeze_ds.policy.reward import DEVIATION_WEIGHT, reward
from rlfreeze_ds.policy.tuner import Tuner
from rlfreeze_ds.policy.window import PlanFacts, Window

PLAN = PlanFacts(0.9, 0.3, 0.5, 0.8, 0.25, unfrozen_s=1.2)


def test_a_window_in_numbers() -> None:
    window = Window(total_steps=200)
    for _ in range(20):
        window.add_loss(4.0)
    window.set_reference()
    for _ in range(5):
        window.add_seconds(1.0)
    first, gained = window.finish(50, Thresholds(2.0, 0.5), PLAN)
    assert gained == pytest.approx(1.2 * 0.9 - 1)
    assert first.progress == 0.25 and first.throughput == pytest.approx(1.2) and first.loss_level == first.loss_slope == 0.0
    assert (first.log_gradient_threshold, first.log_variation_threshold) == (math.log(2.0), math.log(0.5))
    for _ in range(10):
        window.add_loss(3.0)
    second, _ = window.finish(100, Thresholds(2.0, 0.5), PLAN)
    assert second.loss_level == pytest.approx(math.log(0.75)) and second.loss_slope == pytest.approx(0.25)
    assert second.throughput == 1.0  # nothing was timed, so nothing is claimed


def test_a_loss_above_its_trend_costs_and_one_that_is_not_finite_costs_most() -> None:
    rng = np.random.default_rng(0)
    seen = []
    for jump in (0.0, 0.5, math.nan):
        window = Window(None)
        for _ in range(400):
            window.add_loss(2.0 + 0.05 * rng.standard_normal())
        window.finish(400, Thresholds(1.0, 1.0), PLAN)
        for _ in range(20):
            window.add_loss(2.0 + jump)
        window.add_seconds(1.0)
        seen.append(window.finish(500, Thresholds(1.0, 1.0), PLAN))
    deviations = [observation.loss_deviation for observation, _ in seen]
    assert abs(deviations[0]) < 0.5 < 1.0 < deviations[1] < deviations[2]
    rewards = [gained for _, gained in seen]
    assert rewards[0] > rewards[1] > rewards[2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_whatever_happens_an_observation_and_a_reward_are_finite_and_in_bounds(value: float) -> None:
    vector = Observation(*[value] * SIZE).vector()
    assert vector.dtype == np.float32 and vector.shape == (len(NAMES),)
    assert np.isfinite(vector).all() and (vector >= LOW).all() and (vector <= HIGH).all()
    for position in range(4):
        arguments = [1.1, 0.9, 0.0, 1.0]
        arguments[position] = value
        assert -2.0 <= reward(*arguments) <= 9.0


def test_a_reward_is_the_gain_in_loss_per_second() -> None:
    assert reward(1.0, 1.0, 0.0) == 0.0
    assert reward(1.25, 0.8, -3.0) == pytest.approx(0.0)
    assert reward(1.5, 1.0, 2.0) == pytest.approx(0.5 - 2 * DEVIATION_WEIGHT)
    assert reward(1.0, 1.0, 0.0, slope_ratio=0.5) < 0 < reward(1.0, 1.0, 0.0, slope_ratio=1.5)


def test_an_action_multiplies_and_is_clipped() -> None:
    moved = Thresholds(2.0, 1.0).moved(np.array([1.0, -1.0]))
    assert (moved.gradient, moved.variation) == pytest.approx((2 * STEP_FACTOR, 1 / STEP_FACTOR))
    assert Thresholds(2.0, 1.0).moved(np.array([math.nan, 0.0])) == Thresholds(2.0, 1.0)
    far = Thresholds(90.0, 0.011).moved(np.array([50.0, -50.0]))
    assert (far.gradient, far.variation) == (100.0, 0.01)


class Slow(RandomPolicy):
    """Answers each question after some calls, or never."""

    def __init__(self, calls: int | None) -> None:
        super().__init__(0)
        self.calls = calls
        self.rewards: list[float | None] = []

    def offer(self, window: int, observation: np.ndarray, gained: float | None) -> None:
        super().offer(window, observation, gained)
        self.rewards.append(gained)
        self._left = self.calls

    def take(self) -> np.ndarray | None:
        if self._left is None or self._left > 0:
            self._left = None if self._left is None else self._left - 1
            return None
        return super().take()


@pytest.mark.parametrize(("calls", "asked"), [(0, 1), (3, 4), (None, 6)])
def test_an_answer_is_waited_for_a_bounded_number_of_steps(calls: int | None, asked: int) -> None:
    policy = Slow(calls)
    tuner = Tuner(policy, Thresholds(2.0, 1.0), PolicyConfig(patience_steps=5))
    for window in range(3):
        before = tuner.thresholds
        tuner.offer(100 * window, PLAN)
        readies = [tuner.ready()]
        while not readies[-1]:
            readies.append(tuner.ready())
        assert len(readies) == asked and (tuner.thresholds == before) == (calls is None)
        json.dumps(tuner.last)
    # A reward is that of an answer: the first window has none, and one after silence has none either.
    assert [gained is None for gained in policy.rewards] == [True, calls is None, calls is None]


def test_a_tuner_goes_on_where_it_was() -> None:
    def run(tuner: Tuner, windows: range) -> list[Thresholds]:
        found = []
        for window in windows:
            for step in range(5):
                tuner.window.add_loss(3.0 - 0.01 * (5 * window + step))
                tuner.window.add_seconds(1.0)
            tuner.offer(5 * window, PLAN)
            assert tuner.ready()
            found.append(tuner.thresholds)
        return found

    def new() -> Tuner:
        return Tuner(RandomPolicy(7), Thresholds(2.0, 1.0), PolicyConfig())

    whole = run(new(), range(10))
    first, second = new(), new()
    begun = run(first, range(4))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + run(second, range(4, 10)) == whole and len(set(whole)) == 10


@pytest.mark.parametrize(("configured", "found"), [(None, "first"), ("mine", "mine")])
def test_a_resumed_run_goes_on_with_the_name_of_its_episode_unless_it_is_given_one(configured: str | None, found: str) -> None:
    def new(name: str) -> Tuner:
        policy = RandomPolicy(0)
        policy.run_id = configured or name
        return Tuner(policy, Thresholds(2.0, 1.0), PolicyConfig(run_id=configured))

    resumed = new("second")
    resumed.load_state_dict(json.loads(json.dumps(new("first").state_dict())))
    assert resumed.policy.run_id == found
    alone = Tuner(RandomPolicy(0), Thresholds(2.0, 1.0), PolicyConfig())
    alone.load_state_dict(new("first").state_dict())
    assert alone.policy.run_id is None
