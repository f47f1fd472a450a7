"""What a job saw since the last decision, as one observation and the reward of the decision before. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from rlfreeze_ds.policy.observation import Observation, Thresholds
from rlfreeze_ds.policy.reward import reward

# Of the loss's trend and of the spread around it: weight of the past, per step.
_EMA = 0.98
# Where the length of a run is not told, it counts as half done after so many steps.
HALF_LIFE_STEPS = 1000


@dataclass(frozen=True)
class PlanFacts:
    """What the plan in force means, and the seconds of a batch with nothing frozen (None: never measured)."""

    kept_progress: float
    mean_freeze_ratio: float
    largest_freeze_ratio: float
    eligible_share: float
    bubble_ratio: float
    unfrozen_s: float | None


class Window:
    """Losses and seconds of the steps since the last :meth:`finish`; the loss's trend and level outlive a window."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.reference: float | None = None
        self.trend: float | None = None
        self.spread = 0.0
        self.deviations: list[float] = []
        self.before: float | None = None

    def add_loss(self, loss: float) -> None:
        """Of one step. One that is not finite counts as far above the trend."""
        if not math.isfinite(loss):
            self.deviations.append(10.0)
            return
        self.losses.append(loss)
        if self.trend is None:
            self.trend = loss
        beyond = loss - self.trend
        if self.spread > 0:
            self.deviations.append(min(max(beyond / self.spread, -10.0), 10.0))
        self.trend += (1 - _EMA) * beyond
        self.spread = _EMA * self.spread + (1 - _EMA) * abs(beyond) if self.spread > 0 else abs(beyond)

    def add_seconds(self, seconds: float) -> None:
        """Of one batch."""
        self.seconds.append(seconds)

    def set_reference(self) -> None:
        """Call once, at the end of warm-up: the level that later losses are compared with."""
        self.reference = self.trend

    def finish(self, step: int, thresholds: Thresholds, plan: PlanFacts) -> tuple[Observation, float]:
        """The window's observation, and the reward of what was decided before it. The next window begins."""
        mean = statistics.fmean(self.losses) if self.losses else None
        slope = (self.before - mean) / abs(self.before) if mean is not None and self.before else 0.0
        level = math.log(mean / self.reference) if mean and self.reference and mean / self.reference > 0 else 0.0
        deviation = statistics.fmean(self.deviations) if self.deviations else 0.0
        batch_s = statistics.median(self.seconds) if self.seconds else 0.0
        throughput = plan.unfrozen_s / batch_s if plan.unfrozen_s and batch_s > 0 else 1.0
        done = step / self.total_steps if self.total_steps else step / (step + HALF_LIFE_STEPS)
        observation = Observation(
            progress=done,
            loss_level=level,
            loss_slope=slope,
            kept_progress=plan.kept_progress,
            loss_deviation=deviation,
            throughput=throughput,
            mean_freeze_ratio=plan.mean_freeze_ratio,
            largest_freeze_ratio=plan.largest_freeze_ratio,
            eligible_share=plan.eligible_share,
            bubble_ratio=plan.bubble_ratio,
            log_gradient_threshold=math.log(thresholds.gradient),
            log_variation_threshold=math.log(thresholds.variation),
        )
        self.before = mean if mean is not None else self.before
        self.losses, self.seconds, self.deviations = [], [], []
        return observation, reward(throughput, plan.kept_progress, deviation)

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON values. The length of the run is the config's."""
        return {key: value for key, value in vars(self).items() if key != "total_steps"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        vars(self).update(state)
