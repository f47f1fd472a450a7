"""Moves the criterion's thresholds of a training job, window after window. Lives on rank 0; pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlfreeze_ds.config import PolicyConfig
from rlfreeze_ds.decision import Decision
from rlfreeze_ds.policy.observation import NAMES, Thresholds
from rlfreeze_ds.policy.policies import Policy
from rlfreeze_ds.policy.window import PlanFacts, Window


def plan_facts(decision: Decision, unfrozen_s: float | None) -> PlanFacts:
    """What a policy is told of the plan in force. ``unfrozen_s``: measured seconds of a batch with nothing frozen."""
    stages = list(zip(decision.eligible, decision.unit_shares, strict=True))
    eligible = [sum(share for share, allowed in zip(shares, row, strict=True) if allowed) for row, shares in stages]
    return PlanFacts(
        kept_progress=decision.expected_kept_progress,
        mean_freeze_ratio=decision.mean_freeze_ratio,
        largest_freeze_ratio=max(sum(row) / len(row) for row in decision.ratios),
        eligible_share=sum(eligible) / len(eligible),
        bubble_ratio=decision.bubble_ratio,
        unfrozen_s=unfrozen_s,
    )


class Tuner:
    """One window is open at a time: steps are added to it; :meth:`offer` ends it and asks the policy, :meth:`ready` takes the
    answer. Without one in time the thresholds stay."""

    def __init__(self, policy: Policy, thresholds: Thresholds, config: PolicyConfig) -> None:
        self.policy = policy
        self.config = config
        self._initial = thresholds
        self.start_afresh()

    def start_afresh(self) -> None:
        """As at the start of a run."""
        self.thresholds = self._initial
        self.window = Window(self.config.total_steps)
        self.number = 0
        self.last: dict[str, Any] = {}
        """What was last decided on, for a trace: observation by name, action, reward, thresholds."""
        self._answered = False
        self._waited = 0

    def offer(self, step: int, plan: PlanFacts) -> None:
        """The window ends with ``step``."""
        observation, reward = self.window.finish(step, self.thresholds, plan)
        vector = observation.vector()
        # Without an answer to the window before there was no decision that the reward could be for.
        self.policy.offer(self.number, vector, reward if self._answered else None)
        named = dict(zip(NAMES, vector.tolist(), strict=True))
        self.last = {"window": self.number, "observation": named, "reward": reward, "action": None, "updates": None}
        self.number += 1
        self._answered, self._waited = False, 0

    def ready(self) -> bool:
        """Call once a step after :meth:`offer`, until true: the answer is there, or was waited for long enough."""
        action = self.policy.take()
        if action is not None:
            self._answered = True
            self.thresholds = self.thresholds.moved(action)
            self.last |= {"action": [float(a) for a in action], "updates": self.policy.updates}
        self._waited += 1
        done = action is not None or self._waited > self.config.patience_steps
        if done:
            self.last["thresholds"] = asdict(self.thresholds)
        return done

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON values. A pending question is not part of it: the first window after a restart has no reward."""
        return {
            "thresholds": asdict(self.thresholds),
            "number": self.number,
            "window": self.window.state_dict(),
            "run_id": self.policy.run_id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.thresholds = Thresholds(**state["thresholds"])
        self.number = state["number"]
        if self.policy.run_id is not None and self.config.run_id is None and state.get("run_id") is not None:
            self.policy.run_id = state["run_id"]
        self.window.load_state_dict(state["window"])
        self._answered = False
