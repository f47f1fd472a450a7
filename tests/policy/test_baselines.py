"""What policies are compared with."""

from __future__ import annotations

import numpy as np
import pytest

from rlfreeze_ds.policy.baselines import GRID, NEVER, Fixed, Random, best_fixed, episode_reward, grid_rewards, oracle_rewards
from rlfreeze_ds.policy.env import FreezeThresholdEnv
from rlfreeze_ds.policy.job_traits import HELD_OUT_JOBS
from rlfreeze_ds.policy.observation import Thresholds

SMALL = (NEVER.start, Thresholds(0.5, 1.0), Thresholds(0.9, 0.2), Thresholds(2.0, 1.0))
JOBS = range(HELD_OUT_JOBS[0], HELD_OUT_JOBS[0] + 8)


@pytest.fixture(scope="module")
def env() -> FreezeThresholdEnv:
    return FreezeThresholdEnv(num_windows=20)


def test_never_freezes_nothing_and_earns_about_nothing(env: FreezeThresholdEnv) -> None:
    for job in JOBS:
        env.reset(options={"job": job, "thresholds": NEVER.start})
        for _ in range(20):
            observation, *_ = env.step(NEVER.act(np.zeros(12)))
            assert observation[6] == observation[8] == 0
    assert abs(np.mean([episode_reward(env, job, NEVER) for job in JOBS])) / 20 < 0.03


def test_best_and_oracle_are_those_of_a_search_by_hand(env: FreezeThresholdEnv) -> None:
    by_hand = {(t, job): episode_reward(env, job, Fixed(t)) for t in SMALL for job in JOBS}
    best = max(SMALL, key=lambda t: sum(by_hand[t, job] for job in JOBS))
    assert best_fixed(env, JOBS, SMALL) == best
    assert oracle_rewards(env, JOBS, SMALL).tolist() == [max(by_hand[t, job] for t in SMALL) for job in JOBS]
    assert grid_rewards(env, JOBS, SMALL)[1].tolist() == [by_hand[SMALL[1], job] for job in JOBS]


def test_the_best_pair_differs_from_job_to_job(env: FreezeThresholdEnv) -> None:
    jobs = range(24)
    winners = grid_rewards(env, jobs, SMALL).argmax(axis=0)
    assert np.bincount(winners, minlength=len(SMALL)).max() < 20, "one pair suits all jobs: there is nothing to learn"


def test_random_is_in_bounds_and_repeats_with_its_seed() -> None:
    first, again, other = Random(1), Random(1), Random(2)
    actions = [first.act(np.zeros(12)) for _ in range(50)]
    assert all(a.shape == (2,) and a.dtype == np.float32 and (abs(a) <= 1).all() for a in actions)
    assert [a.tolist() for a in actions] == [again.act(np.zeros(12)).tolist() for _ in range(50)]
    assert actions[0].tolist() != other.act(np.zeros(12)).tolist()


def test_the_grid_begins_with_never() -> None:
    assert GRID[0].gradient == NEVER.start.gradient and len(set(GRID)) == len(GRID)
