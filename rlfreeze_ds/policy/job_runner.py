"""RLlib's EnvRunner for environments that are jobs elsewhere: they ask, it acts; what came of it is its sample."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlfreeze_ds.policy.fragment import Decision, Fragment
from rlfreeze_ds.policy.observation import HIGH, LOW, NUM_ACTIONS

OBSERVATION_SPACE = gymnasium.spaces.Box(LOW, HIGH, dtype=np.float32)
ACTION_SPACE = gymnasium.spaces.Box(-1.0, 1.0, (NUM_ACTIONS,), dtype=np.float32)

Drain = Callable[[int, float], list[Fragment]]
"""``drain(min_transitions, timeout_s)``: that many or more, none of which was handed out before, or none after that time."""

MOST_BATCHES = 4
"""Of transitions that one update takes."""

_EXTRAS = (Columns.ACTION_LOGP, Columns.ACTION_DIST_INPUTS)


class JobRunner(SingleAgentEnvRunner):
    """RLlib's local EnvRunner without an environment: jobs ask it to act, and :meth:`sample` returns what came of it.

    :meth:`act` may run in any thread; everything else belongs to the training thread.
    """

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        self._module_lock = threading.Lock()  # before super(), which sets a state
        self._waiting: deque[SingleAgentEpisode] = deque()
        self.num_waiting = 0
        self.num_learned = 0
        self.drain: Drain | None = None
        self.stopping = threading.Event()
        super().__init__(config=config, **kwargs)

    def make_env(self) -> None:
        """There is none: the environments are jobs elsewhere."""
        self.env, self.num_envs = None, 0

    def get_spaces(self) -> dict[str, Any]:
        spaces = (OBSERVATION_SPACE, ACTION_SPACE)
        return {INPUT_ENV_SPACES: spaces, INPUT_ENV_SINGLE_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    def assert_healthy(self) -> None:
        assert self.module is not None

    def set_state(self, state: dict[str, Any]) -> None:
        with self._module_lock:
            super().set_state(state)

    @property
    def updates(self) -> int:
        """How often the policy was updated, over restores too."""
        return self._weights_seq_no

    def act(self, observation: np.ndarray, explore: bool = True) -> Decision:
        """What the policy makes of one observation, through RLlib's connectors.

        Args:
            observation: float32 [SIZE], finite; what is out of bounds is clipped.
            explore: draw from the policy; False takes its mean, which must not be learned from.
        """
        episode = SingleAgentEpisode(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
        episode.add_env_reset(observation=np.clip(observation, LOW, HIGH))
        shared = {"episodes": [episode], "explore": explore, "shared_data": {}}
        with self._module_lock, torch.no_grad():
            batch = self._env_to_module(rl_module=self.module, batch={}, **shared)
            out = self.module.forward_exploration(batch) if explore else self.module.forward_inference(batch)
            out = self._module_to_env(rl_module=self.module, batch=out, **shared)
            updates = self._weights_seq_no
        actions = np.asarray(out[Columns.ACTIONS][0], dtype=np.float32)
        return Decision(
            actions=actions,
            actions_for_env=np.asarray(out.get(Columns.ACTIONS_FOR_ENV, [actions])[0], dtype=np.float32),
            extras={name: np.asarray(out[name][0], dtype=np.float32) for name in _EXTRAS if name in out},
            updates=updates,
        )

    def add(self, episodes: list[SingleAgentEpisode]) -> None:
        """Have the next :meth:`sample` return these too."""
        self._waiting += episodes
        self.num_waiting += sum(len(episode) for episode in episodes)

    def collect(self, num_transitions: int, wait_s: float) -> bool:
        """Whether :meth:`sample` would return that many; waits for them, but no longer than ``wait_s``."""
        lacking = num_transitions - self.num_waiting
        if lacking > 0 and self.drain is not None:
            self.add([_episode(fragment) for fragment in self.drain(lacking, wait_s)])
        return self.num_waiting >= num_transitions and not self.stopping.is_set()

    def sample(self, **_: Any) -> list[SingleAgentEpisode]:
        """What was collected, each transition once. Not more than a few batches at a time: were jobs faster than learning,
        updates would take longer and longer."""
        most, episodes, num = MOST_BATCHES * self.config.total_train_batch_size, [], 0
        while self._waiting and num < most:
            episodes.append(self._waiting.popleft())
            num += len(episodes[-1])
        self.num_waiting -= num
        self.num_learned += num
        self._increase_sampled_metrics(num, sum(episode.is_done for episode in episodes))
        return episodes

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics.reduce()

    def stop(self) -> None:
        self.stopping.set()


def _episode(fragment: Fragment) -> SingleAgentEpisode:
    """As RLlib's learners want it. Each fragment is an episode of its own: a policy without memory needs no more."""
    return SingleAgentEpisode(
        observations=list(np.clip(fragment.observations, LOW, HIGH)),
        observation_space=OBSERVATION_SPACE,
        actions=list(fragment.actions),
        action_space=ACTION_SPACE,
        rewards=[float(reward) for reward in fragment.rewards],
        extra_model_outputs={name: list(fragment.extras[name]) for name in _EXTRAS if name in fragment.extras},
        terminated=fragment.terminated,
        truncated=fragment.truncated,
        len_lookback_buffer=0,
    ).to_numpy()
