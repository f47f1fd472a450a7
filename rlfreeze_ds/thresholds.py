"""The criterion's thresholds over a run: rank 0's policy moves them between windows of steps, and the next plan carries them to
every rank; nothing else is sent but whether to wait on."""

from __future__ import annotations

from typing import Any

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.control_group import ControlGroup
from rlfreeze_ds.decision import Decision
from rlfreeze_ds.errors import ConfigError, RLFreezeError
from rlfreeze_ds.policy.observation import Thresholds
from rlfreeze_ds.policy.policies import make_policy
from rlfreeze_ds.policy.tuner import Tuner, plan_facts
from rlfreeze_ds.telemetry.run_log import RunLog


class RunThresholds:
    """On every rank; the policy behind it lives on rank 0. Where none is configured nothing ever moves.

    Args:
        config: the whole block.
        group: of all ranks. Making one of these is collective.
        run_log: gets each window.

    Raises:
        ConfigError: on every rank; the policy's file or token cannot be used.
    """

    def __init__(self, config: FreezeConfig, group: ControlGroup, run_log: RunLog) -> None:
        self.config, self.group, self.run_log = config, group, run_log
        self.initial = Thresholds(config.criterion.gradient_threshold, config.criterion.variation_threshold)
        self.moves = config.policy.type != "fixed" and config.planning.max_freeze_ratio > 0
        self.tuner = self._tuner() if self.moves else None
        self.start_afresh(0)

    def _tuner(self) -> Tuner | None:
        tuner, reason = None, ""
        if self.group.rank == 0:
            try:
                tuner = Tuner(make_policy(self.config.policy, self.config.seed), self.initial, self.config.policy)
            except RLFreezeError as error:
                reason = str(error)
        reason = self.group.broadcast(reason)
        if reason:
            raise ConfigError(reason)
        return tuner

    def start_afresh(self, step: int) -> None:
        """As at the start of a run."""
        self.waits = False  # whether for an answer of the policy, to the window that ended before
        self.window_end = step
        if self.tuner is not None:
            self.tuner.start_afresh()

    @property
    def current(self) -> Thresholds:
        """Those to plan with, on rank 0."""
        return self.initial if self.tuner is None else self.tuner.thresholds

    @property
    def interval(self) -> int:
        """Steps between two plans."""
        replan = self.config.replan_interval
        return min(replan, self.config.policy.interval) if self.moves else replan

    def add_loss(self, loss: float) -> None:
        """Of one step."""
        if self.tuner is not None:
            self.tuner.window.add_loss(loss)

    def add_seconds(self, seconds: float) -> None:
        """Of one batch under the plan."""
        if self.tuner is not None:
            self.tuner.window.add_seconds(seconds)

    def set_reference(self) -> None:
        """Call once, at the end of warm-up."""
        if self.tuner is not None:
            self.tuner.window.set_reference()

    def end_window(self, step: int, decision: Decision, unfrozen_s: float | None) -> None:
        """Ask the policy; then call :meth:`answered` once a step until it says so."""
        if self.tuner is not None:
            self.tuner.offer(step, plan_facts(decision, unfrozen_s))
        self.waits, self.window_end = True, step

    def answered(self, step: int) -> bool:
        """Collective. The policy has answered, or was waited for long enough: time to plan."""
        self.waits = not self.group.broadcast(self.tuner.ready() if self.tuner is not None else False)
        if not self.waits and self.tuner is not None:
            self.run_log.write("policy", step=step, **self.tuner.last)
        return not self.waits

    def close(self) -> None:
        """The job ends."""
        if self.tuner is not None:
            self.tuner.policy.close()

    def state_dict(self) -> dict[str, Any] | None:
        """As plain JSON values; None where nothing moves."""
        return None if self.tuner is None else self.tuner.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """The reverse of :meth:`state_dict`."""
        self.waits = False
        if self.tuner is not None and state is not None:
            self.tuner.load_state_dict(state)
