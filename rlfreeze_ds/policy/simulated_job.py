"""A training job on paper: what freezing does to its seconds and to its loss, a window of steps at a time. No torch, no ray.

Every freeze unit u has remaining progress x, 1 at the start. With all units live a step takes the share ``rate * speed`` of it
off, where speed is the learning rate's, and larger in a job's first steps, as losses on trained models fall; with fewer
micro-batches live, ``kept`` times that (:mod:`rlfreeze_ds.planning.progress`), so that

    loss = floor + sum_u weight_u x_u + spike + noise
    x after n steps = x exp(-rate kept (speed_1 + ... + speed_n))

As units move, the optimum of the others moves too: each gets ``coupling`` times the mean progress back. A shock puts some units
back and lets the loss spike. The gradient follows the progress, up to an exponent: to first order a normalising optimizer takes
lr sqrt(num_elements) |g| off the loss, so |E g| ~ weight rate x^e / sqrt(num_elements), and sigma^2 ~ x^e. With e = 1 the noise
scale B ~ x^-e grows by about an order of magnitude over a run, as McCandlish et al. (2018) saw it grow; with e = 0 norms stay
level while the loss falls, as they do on the main job after its first tenth, in which they fall fast. What the criterion sees is
the norm of a mean over m live micro-batches, |E g|^2 + sigma^2 / m in the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlfreeze_ds.policy.job_traits import JobTraits
from rlfreeze_ds.policy.observation import Observation, Thresholds
from rlfreeze_ds.policy.reward import reward
from rlfreeze_ds.policy.simulated_pipeline import BatchTimes
from rlfreeze_ds.policy.unit_statistics import UnitStatistics

WINDOW_STEPS = 32
"""Steps of one window."""

WARM_UP_WINDOWS = 2
"""Windows in which nothing is frozen, before the first decision."""

_EMA = 0.9  # of the criterion, as in the default configuration
_TREND_EMA = 0.95  # of the loss, from step to step
_SPREAD_EMA = 0.8  # of the loss's spread, from window to window
_SPIKE_LEFT = 0.5  # of a loss spike after a window in which nothing is frozen
_SMALLEST_PROGRESS = 1e-4
_UNSEEN = 1e-12  # live share that stands for 0 where one has to divide by it
# A measured slope tells something when what it should be is so many times its own standard error.
_TELLING_SLOPE = 3.0


def kept_progress(live: np.ndarray, num_micro_batches: int, noise_scale: np.ndarray) -> np.ndarray:
    """:func:`rlfreeze_ds.planning.progress.kept_progress` of all units at once, [num_units]."""
    live = np.maximum(live, _UNSEEN)
    return np.sqrt((1 + noise_scale / num_micro_batches) / (1 + noise_scale / (live * num_micro_batches)))


@dataclass(frozen=True)
class Window:
    """What a window of steps brought.

    Attributes:
        observation, reward: see there.
        seconds, unfrozen_s: of a batch, as it was and with nothing frozen.
        kept_progress: the true share, of which the observation holds a job's estimate.
        loss: mean of the window.
    """

    observation: Observation
    reward: float
    seconds: float
    unfrozen_s: float
    kept_progress: float
    loss: float


class SimulatedJob:
    """A job in progress: after construction its warm-up is done. Equal traits give equal jobs; random numbers do not depend on
    what is frozen, so that two policies meet the same luck.

    Args:
        traits: what the job is.
        num_windows: after warm-up; the run's length, over which its speeds are spread.
    """

    def __init__(self, traits: JobTraits, num_windows: int) -> None:
        self.traits, self.num_windows = traits, num_windows
        self.window = -WARM_UP_WINDOWS
        self.progress_left = np.ones(traits.num_units)
        self.statistics = UnitStatistics(traits.num_units, _EMA)
        self._rng = np.random.default_rng([traits.seed, 1])
        self._spike = 0.0
        self._times: dict[bytes, BatchTimes] = {}
        self._trend = self._spread = self._last_mean = math.nan
        self._reference_loss = math.nan
        self._last_expected = 0.0
        nothing = np.zeros(traits.num_units, dtype=bool)
        for _ in range(WARM_UP_WINDOWS):
            self._run(nothing, Thresholds(1.0, 1.0))
        self.statistics.set_reference()
        self._reference_loss = self._last_mean

    def first_observation(self, thresholds: Thresholds) -> Observation:
        """Of the end of warm-up, when nothing has been frozen yet. ``thresholds``: that the first plan would be made with."""
        eligible = self.statistics.eligible(thresholds)
        return self._observation(eligible, thresholds, self.traits.pipeline.unfrozen, 1.0, 1.0, 0.0, 0.0, self._last_mean)

    def run_window(self, thresholds: Thresholds) -> Window:
        """Plan with these thresholds, then train for a window."""
        return self._run(self.statistics.eligible(thresholds), thresholds)

    def _run(self, eligible: np.ndarray, thresholds: Thresholds) -> Window:
        traits, pipeline, rng = self.traits, self.traits.pipeline, self._rng
        times = self._batch(eligible)
        live = self._live_shares(eligible, times)
        seconds = pipeline.unfrozen.seconds - traits.realised * (pipeline.unfrozen.seconds - times.seconds)
        throughput = pipeline.unfrozen.seconds / (seconds * math.exp(traits.time_noise * rng.standard_normal()))

        self._shock()
        left, scale = self.progress_left, self.noise_scale
        kept = kept_progress(live, pipeline.num_micro_batches, scale)
        slope = traits.weights * traits.rates * left
        true_kept = min(1.0, float(slope @ kept / slope.sum()))
        guessed = slope * traits.weight_errors
        guessed_kept = kept_progress(live, pipeline.num_micro_batches, scale * traits.noise_scale_errors)
        estimate = min(1.0, float(guessed @ guessed_kept / guessed.sum()))

        path, expected = self._learn(kept)
        losses = self._losses(path)
        self._spike *= _SPIKE_LEFT**true_kept
        self.statistics.observe(self._norms(path, live), live > 0)

        mean = float(losses.mean())
        loss_slope, slope_ratio, deviation = self._judge(losses, mean, expected)
        self.window += 1
        observation = self._observation(eligible, thresholds, times, throughput, estimate, loss_slope, deviation, mean)
        gain = reward(throughput, estimate, deviation, slope_ratio)
        self._last_mean, self._last_expected = mean, expected
        return Window(observation, gain, seconds, pipeline.unfrozen.seconds, true_kept, mean)

    # -- seconds ------------------------------------------------------------------------------------------------------

    def _eligible_shares(self, eligible: np.ndarray) -> np.ndarray:
        """Of each stage's weight-gradient time, [num_stages]."""
        traits = self.traits
        return np.bincount(traits.stages, traits.time_shares * eligible, traits.pipeline.num_stages)

    def _batch(self, eligible: np.ndarray) -> BatchTimes:
        """Often the same units are eligible as before, and the answer is there already."""
        key = eligible.tobytes()
        if key not in self._times:
            self._times[key] = self.traits.pipeline.batch(self._eligible_shares(eligible))
        return self._times[key]

    def _live_shares(self, eligible: np.ndarray, times: BatchTimes) -> np.ndarray:
        """Per unit, share of the micro-batches in which it is live: masks are balanced, so the eligible units of a stage are
        live equally often."""
        shares = self._eligible_shares(eligible)
        frozen = np.divide(times.stage_ratios, shares, out=np.zeros_like(shares), where=shares > 0)
        return 1.0 - eligible * np.clip(frozen, 0.0, 1.0)[self.traits.stages]

    # -- loss ---------------------------------------------------------------------------------------------------------

    @property
    def noise_scale(self) -> np.ndarray:
        """B of every unit in micro-batches, [num_units]."""
        return self.traits.noise_scales / self.progress_left**self.traits.gradient_exponent

    @cached_property
    def _rate(self) -> np.ndarray:
        """Per step."""
        return self.traits.rates / (self.num_windows * WINDOW_STEPS)

    def _progress(self) -> np.ndarray:
        """Share of the run that is done before each step of the present window; warm-up counts as its start."""
        steps = self.window * WINDOW_STEPS + np.arange(WINDOW_STEPS)
        return np.clip(steps / (self.num_windows * WINDOW_STEPS), 0.0, 1.0)

    def _early(self) -> np.ndarray:
        """How much is left of what only a run's start has, before each step of the present window, [steps]."""
        return np.exp(-self._progress() / self.traits.early_share)

    def _learn(self, kept: np.ndarray) -> tuple[np.ndarray, float]:
        """x at every step of the window, [steps, num_units], and by how much the loss would fall with nothing frozen."""
        traits = self.traits
        progress, early = self._progress(), self._early()
        done = np.cumsum(traits.learning_rate(progress) * (1 + traits.early_speed * early))
        path = self.progress_left * np.exp(-np.outer(done, self._rate * kept))
        unfrozen = self.progress_left * (1 - np.exp(-done[-1] * self._rate))
        total = traits.weights.sum()
        back = traits.coupling * float(traits.weights @ (self.progress_left - path[-1])) / total
        self.progress_left = np.maximum(path[-1] + back, _SMALLEST_PROGRESS)
        return path, (1 - traits.coupling) * float(traits.weights @ unfrozen)

    def _losses(self, path: np.ndarray) -> np.ndarray:
        """Of every step, [steps]."""
        traits = self.traits
        noise = traits.loss_noise * self._rng.standard_normal(len(path))
        return traits.floor + path @ traits.weights + self._spike + noise

    def _shock(self) -> None:
        # The numbers are drawn whether or not there is a shock, so that what follows is the same for all jobs of a seed.
        hit = self._rng.random(self.traits.num_units) < 0.5
        size = self.traits.shocks.get(self.window, 0.0)
        self.progress_left = self.progress_left + size * hit
        self._spike += size * float(self.traits.weights.sum())

    def _norms(self, path: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Of the gradient at every step, [steps, num_units]: the squared norm of a mean over m micro-batches of a vector with
        noise in ``dimensions`` directions, its mean and its variance exact, its shape a normal's."""
        traits, early = self.traits, self._early()[:, None]
        level = path**traits.gradient_exponent
        at_start = (traits.weights * traits.rates) ** 2 / traits.num_elements * (1 + traits.early_gradient * early) ** 2
        signal = at_start * level**2
        noise = traits.noise_scales * at_start * level / (np.maximum(live, _UNSEEN) * traits.pipeline.num_micro_batches)
        inner, own, batch = self._rng.standard_normal((3, *path.shape))
        spread = 2 * np.sqrt(signal * noise / traits.dimensions) * inner + noise * np.sqrt(2 / traits.dimensions) * own
        jumpy = traits.jumpiness * (1 + traits.early_jumpiness * early)
        return np.sqrt(np.maximum(signal + noise + spread, 0.01 * (signal + noise))) * np.exp(jumpy * batch)

    # -- what a job sees ------------------------------------------------------------------------------------------------

    def _judge(self, losses: np.ndarray, mean: float, expected: float) -> tuple[float, float | None, float]:
        """Slope, measured over expected decrease (None: noise alone), and deviation from the trend."""
        spread = float(np.diff(losses).std()) / math.sqrt(2)
        if math.isnan(self._trend):
            self._trend, self._spread, self._last_mean = mean, spread, mean
        deviation = (mean - self._trend) / self._spread
        keep = _TREND_EMA ** np.arange(len(losses), -1, -1.0)
        self._trend = float(keep[0] * self._trend + (1 - _TREND_EMA) * keep[1:] @ losses)
        self._spread = _SPREAD_EMA * self._spread + (1 - _SPREAD_EMA) * spread
        between = (expected + self._last_expected) / 2  # from the middle of the last window to that of this one
        telling = between > _TELLING_SLOPE * self._spread * math.sqrt(2 / len(losses))
        fallen = self._last_mean - mean
        return fallen / self._last_mean, fallen / between if telling else None, deviation

    def _observation(
        self,
        eligible: np.ndarray,
        thresholds: Thresholds,
        times: BatchTimes,
        throughput: float,
        kept: float,
        loss_slope: float,
        deviation: float,
        loss: float,
    ) -> Observation:
        return Observation(
            progress=max(0, self.window) / self.num_windows,
            loss_level=math.log(loss / self._reference_loss),
            loss_slope=loss_slope,
            kept_progress=kept,
            loss_deviation=deviation,
            throughput=throughput,
            mean_freeze_ratio=float(times.stage_ratios.mean()),
            largest_freeze_ratio=float(times.stage_ratios.max()),
            eligible_share=float(self._eligible_shares(eligible).mean()),
            bubble_ratio=times.bubble_ratio,
            log_gradient_threshold=math.log(thresholds.gradient),
            log_variation_threshold=math.log(thresholds.variation),
        )
