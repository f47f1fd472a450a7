"""Simulated jobs as a gymnasium environment. Importing this registers it as :data:`ENV_ID`; needs neither torch nor ray."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rlfreeze_ds.errors import ConfigError
from rlfreeze_ds.policy.job_traits import TRAINING_JOBS, draw_job
from rlfreeze_ds.policy.observation import HIGH, LARGEST, LOW, NUM_ACTIONS, SMALLEST, Thresholds
from rlfreeze_ds.policy.simulated_job import SimulatedJob

ENV_ID = "FreezeThreshold-v0"

NUM_WINDOWS = 40
"""Windows of an episode."""

START = Thresholds(gradient=2.0, variation=1.0)
"""The default configuration's, with which a run begins unless told otherwise."""


class FreezeThresholdEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """
    ## Description
    A pipeline-parallel training job whose weight gradients are skipped where its schedule gains by it. Which units may freeze is
    up to two thresholds; moving them during the run, so that the loss falls as fast as it can per second, is the task. An episode
    is a run after its warm-up, a step of the environment is a window of 32 training steps. Jobs are drawn at random; see
    :mod:`rlfreeze_ds.policy.simulated_job` for what they do and :mod:`rlfreeze_ds.policy.job_traits` for their ranges.

    ## Action space
    `Box(-1, 1, (2,), float32)`. Each threshold is multiplied by 2 to the power of its number, then clipped to [0.01, 100].

    | index | moves                                                                            |
    | ----- | -------------------------------------------------------------------------------- |
    | 0     | gradient threshold: most of a unit's gradient norm over its level after warm-up  |
    | 1     | variation threshold: most of the norm's change from step to step, over the norm  |

    ## Observation space
    `Box(LOW, HIGH, (12,), float32)` of :mod:`rlfreeze_ds.policy.observation`, of the window that just ended.

    | index | meaning                                                              | min  | max |
    | ----- | -------------------------------------------------------------------- | ---- | --- |
    | 0     | share of the run that is done                                        | 0    | 1   |
    | 1     | log of the mean loss over its level at the end of warm-up            | -10  | 10  |
    | 2     | share of the loss that the window took off                           | -1   | 1   |
    | 3     | share of the expected loss decrease that is kept, as a job judges it | 0    | 1   |
    | 4     | loss above its own trend, over the spread around that                | -10  | 10  |
    | 5     | seconds of an unfrozen batch over those of the window's              | 0    | 10  |
    | 6     | mean freeze ratio                                                    | 0    | 1   |
    | 7     | freeze ratio of the stage that freezes most                          | 0    | 1   |
    | 8     | eligible share of the weight-gradient time                           | 0    | 1   |
    | 9     | share of rank-seconds spent waiting                                  | 0    | 1   |
    | 10    | natural log of the gradient threshold                                | -4.7 | 4.7 |
    | 11    | natural log of the variation threshold                               | -4.7 | 4.7 |

    ## Reward
    :func:`rlfreeze_ds.policy.reward.reward`: throughput times kept progress, less 1, less 0.1 for each spread by which the loss
    is above its trend; in [-2, 9], about 0 for a job that freezes nothing.

    ## Start
    Warm-up is over, nothing was frozen yet, the thresholds are the default ones, 2 and 1.

    ## End
    Terminated when the run is done, after `num_windows` steps. Never truncated.

    ## Arguments
    - `jobs`: seeds to draw jobs from, `(first, after_last)`; by default those meant for training. A job's seed fixes all of it,
      its noise too, so that policies can be compared on equal luck.
    - `num_windows`: length of an episode.

    Options of `reset`: `job`, one seed in place of a drawn one; `thresholds`, a
    :class:`~rlfreeze_ds.policy.observation.Thresholds` to start with.

    `info` of a step: `job`, `loss`, `seconds` and `unfrozen_s` of a batch, `kept_progress` as it truly is.

    ## Version
    v0
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, jobs: tuple[int, int] = TRAINING_JOBS, num_windows: int = NUM_WINDOWS, render_mode: None = None) -> None:
        first, after_last = jobs
        if not 0 <= first < after_last:
            raise ConfigError(f"jobs = {tuple(jobs)}: must be (first, after_last) with 0 <= first < after_last (seeds of jobs).")
        if num_windows < 1:
            raise ConfigError(f"num_windows = {num_windows}: must be at least 1 (decisions in an episode).")
        self.jobs, self.num_windows, self.render_mode = (first, after_last), num_windows, render_mode
        self.observation_space = gymnasium.spaces.Box(LOW, HIGH, dtype=np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (NUM_ACTIONS,), dtype=np.float32)
        self.thresholds = START
        self._job: SimulatedJob | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a run.

        Raises:
            ConfigError: an unknown option, or a threshold out of bounds.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        job = options.pop("job", None)
        self.thresholds = options.pop("thresholds", START)
        if options:
            raise ConfigError(f'reset option {sorted(options)[0]!r}: no such option; must be one of "job", "thresholds".')
        for name, value in vars(self.thresholds).items():
            if not SMALLEST <= value <= LARGEST:
                raise ConfigError(f"{name} threshold = {value}: must be between {SMALLEST:g} and {LARGEST:g}.")
        number = int(self.np_random.integers(*self.jobs) if job is None else job)
        self._job = SimulatedJob(draw_job(number, self.num_windows), self.num_windows)
        return self._job.first_observation(self.thresholds).vector(), {"job": number}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the thresholds, then train for a window.

        Raises:
            RuntimeError: before ``reset`` or after the end.
        """
        job = self._job
        if job is None or job.window >= self.num_windows:
            raise RuntimeError("no run is in progress: call reset() first.")
        self.thresholds = self.thresholds.moved(action)
        window = job.run_window(self.thresholds)
        info = {
            "job": job.traits.seed,
            "loss": window.loss,
            "seconds": window.seconds,
            "unfrozen_s": window.unfrozen_s,
            "kept_progress": window.kept_progress,
        }
        return window.observation.vector(), window.reward, job.window >= self.num_windows, False, info


gymnasium.register(ENV_ID, entry_point=FreezeThresholdEnv)
