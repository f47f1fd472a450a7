"""What a policy learns from: transitions in a row, of one job. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Decision:
    """What a policy made of one observation."""

    actions: np.ndarray
    """float32 [NUM_ACTIONS], as sampled: what is learned from."""
    actions_for_env: np.ndarray
    """float32 [NUM_ACTIONS], clipped to [-1, 1]: what the job is told."""
    extras: Mapping[str, np.ndarray | float] = field(default_factory=dict)
    """What the learner wants to know of it, such as ``action_logp`` and ``action_dist_inputs``; the same keys every time."""
    updates: int = 0
    """How often the policy had been updated."""


@dataclass(frozen=True, eq=False)
class Transition:
    """From one window to the next. ``window``: the number of the one in which ``decision`` was made."""

    window: int
    observation: np.ndarray
    decision: Decision
    reward: float
    next_observation: np.ndarray


@dataclass(frozen=True, eq=False)
class Fragment:
    """Transitions in a row: the whole of a session, or a part. Neither terminated nor truncated: the session goes on."""

    run_id: str
    session_id: str
    first_window: int
    observations: np.ndarray
    """float32 [n + 1, SIZE]."""
    actions: np.ndarray
    """float32 [n, NUM_ACTIONS], as sampled."""
    rewards: np.ndarray
    """float32 [n]."""
    extras: dict[str, np.ndarray]
    """[n, ...] each."""
    updates: np.ndarray
    """int64 [n]: how often the policy had been updated when it decided."""
    terminated: bool
    truncated: bool

    def __len__(self) -> int:
        """Transitions."""
        return len(self.rewards)

    def windows(self) -> Iterator[int]:
        """Numbers of the windows in which the decisions were made."""
        return iter(range(self.first_window, self.first_window + len(self)))


def assemble(run_id: str, session_id: str, transitions: Sequence[Transition], terminated: bool, truncated: bool) -> Fragment:
    """One fragment of ``transitions``, of which there is at least one and each begins where the one before ends."""
    decisions = [transition.decision for transition in transitions]
    return Fragment(
        run_id=run_id,
        session_id=session_id,
        first_window=transitions[0].window,
        observations=np.stack([*(transition.observation for transition in transitions), transitions[-1].next_observation]),
        actions=np.stack([np.asarray(decision.actions, dtype=np.float32) for decision in decisions]),
        rewards=np.array([transition.reward for transition in transitions], dtype=np.float32),
        extras={key: np.stack([np.asarray(decision.extras[key]) for decision in decisions]) for key in decisions[0].extras},
        updates=np.array([decision.updates for decision in decisions], dtype=np.int64),
        terminated=terminated,
        truncated=truncated,
    )
