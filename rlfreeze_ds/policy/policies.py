"""Who answers a window with an action, seen from a training job: at once, or later from a server. Neither ray nor torch."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.policy.observation import NUM_ACTIONS


def make_policy(config: FreezeConfig) -> Policy:
    """The one that ``policy.type`` names, which is not "fixed"."""
    return RandomPolicy(config.seed)


class Policy(Protocol):
    """Lives on rank 0. None of its methods may take longer than a millisecond, :meth:`close` excepted, or raise."""

    def offer(self, window: int, observation: np.ndarray, reward: float | None) -> None:
        """Take window number ``window``: float32 [SIZE], and the reward of the answer before (None: there was none)."""

    def take(self) -> np.ndarray | None:
        """The action for the last window, [NUM_ACTIONS] in [-1, 1], once; None while there is none."""

    def close(self) -> None:
        """The job ends."""


class RandomPolicy:
    """Uniform actions, the same for the same seed and window: the baseline that any policy has to beat."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._action: np.ndarray | None = None

    def offer(self, window: int, observation: np.ndarray, reward: float | None) -> None:
        self._action = np.random.default_rng([self.seed, window]).uniform(-1.0, 1.0, NUM_ACTIONS)

    def take(self) -> np.ndarray | None:
        action, self._action = self._action, None
        return action

    def close(self) -> None:
        pass
