"""What a learnt policy has to beat: never freezing, fixed thresholds, random ones; and a measure of what is possible, the best
fixed pair of each job, found by trying them all on that very job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlfreeze_ds.policy.env import START, FreezeThresholdEnv
from rlfreeze_ds.policy.observation import NUM_ACTIONS, SMALLEST, Thresholds

GRID = tuple(
    Thresholds(gradient, variation)
    for gradient in (SMALLEST, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 2.0)
    for variation in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
)
"""Pairs to search. The first gradient threshold is never to freeze; above the largest of either nothing is kept out."""


class Policy(Protocol):
    """``start``: thresholds before the first action."""

    start: Thresholds

    def act(self, observation: np.ndarray) -> np.ndarray:
        """float32 [2] in [-1, 1], from float32 [12]."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Holds one pair of thresholds."""

    start: Thresholds

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Nothing moves."""
        return np.zeros(NUM_ACTIONS, dtype=np.float32)


NEVER = Fixed(Thresholds(SMALLEST, SMALLEST))
"""Freezes nothing."""


class Random:
    """Moves both thresholds at random, evenly in [-1, 1]."""

    def __init__(self, seed: int, start: Thresholds = START) -> None:
        self.start = start
        self._rng = np.random.default_rng(seed)

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Whatever is seen."""
        return self._rng.uniform(-1.0, 1.0, NUM_ACTIONS).astype(np.float32)


def episode_reward(env: FreezeThresholdEnv, job: int, policy: Policy) -> float:
    """Sum of the rewards of one run of the job with this seed."""
    observation, _ = env.reset(options={"job": job, "thresholds": policy.start})
    total, done = 0.0, False
    while not done:
        observation, reward, done, _, _ = env.step(policy.act(observation))
        total += reward
    return total


def grid_rewards(env: FreezeThresholdEnv, jobs: Sequence[int], grid: Sequence[Thresholds] = GRID) -> np.ndarray:
    """Episode rewards of every fixed pair on every job, [pairs, jobs]."""
    return np.array([[episode_reward(env, job, Fixed(thresholds)) for job in jobs] for thresholds in grid])


def best_fixed(env: FreezeThresholdEnv, jobs: Sequence[int], grid: Sequence[Thresholds] = GRID) -> Thresholds:
    """The pair with the largest mean episode reward over these jobs."""
    return grid[int(grid_rewards(env, jobs, grid).mean(axis=1).argmax())]


def oracle_rewards(env: FreezeThresholdEnv, jobs: Sequence[int], grid: Sequence[Thresholds] = GRID) -> np.ndarray:
    """Of each job's own best pair, [jobs]."""
    return grid_rewards(env, jobs, grid).max(axis=0)
