"""What a simulated job is, drawn at random from a seed. The ranges are those of jobs that were measured or published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlfreeze_ds.policy.simulated_pipeline import SimulatedPipeline, draw_pipeline

NUM_PIPELINES = 128
"""Pipelines that jobs of one kind (training, held-out) share; each is solved when a job first needs it, in about 0.1 s."""

TRAINING_JOBS = (0, 1_000_000)
"""Seeds of jobs to learn from: from, and up to but without."""

HELD_OUT_JOBS = (1_000_000, 2_000_000)
"""Seeds of jobs to judge by. No pipeline is shared with :data:`TRAINING_JOBS`."""

# Median, and standard deviation of the logarithm, of B over the micro-batches of a batch. Measured with 8 from scratch: B = 14 in
# the first steps, 7 in the last; 2 to 3 would fit fine-tuning. Larger batches are used where the noise is larger, so it is this
# quotient that jobs share.
_SCRATCH_NOISE = (10 / 8, 0.7)
_FINE_TUNING_NOISE = (2.5 / 8, 0.5)


@dataclass(frozen=True)
class JobTraits:
    """All that a job's seed decides. Arrays are [num_units], over all stages.

    Attributes:
        from_scratch: whether the job trains from scratch; else it fine-tunes.
        stages: stage of each unit, whole numbers.
        num_elements: of each unit.
        time_shares: each unit's share of its stage's weight-gradient time.
        weights: loss that a unit's whole progress stands for.
        rates: how many times a unit's progress falls by a factor e over the run, all live and at the full learning rate.
        noise_scales: B at the start, in micro-batches.
        dimensions: directions over which a unit's gradient noise is spread.
        floor: loss when all is learnt.
        loss_noise: standard deviation of a step's loss.
        coupling: share of the units' mean progress that comes back because the others moved, in [0, 1).
        jumpiness: standard deviation of the logarithm of a gradient norm from one batch to the next, beyond sampling noise.
        early_share: of the run, in which the following three fall to 1 / e.
        early_jumpiness: by how many times more than that at the start of the run.
        early_gradient: by how many times larger gradients are at the start of the run.
        early_speed: by how many times faster units learn at the start of the run.
        gradient_exponent: with which gradients follow a unit's progress.
        learning_rate: from progress of the run, [n] in [0, 1], to [n] in [0, 1].
        shocks: by window, progress that the units which are hit lose.
        realised: share of the planned saving that comes true.
        time_noise: standard deviation of the logarithm of a window's seconds.
        weight_errors, noise_scale_errors: factors by which the job misjudges its units.
    """

    seed: int
    pipeline: SimulatedPipeline
    from_scratch: bool
    stages: np.ndarray
    num_elements: np.ndarray
    time_shares: np.ndarray
    weights: np.ndarray
    rates: np.ndarray
    noise_scales: np.ndarray
    dimensions: np.ndarray
    floor: float
    loss_noise: float
    coupling: float = 0.0
    jumpiness: float = 0.0
    early_share: float = 0.1
    early_jumpiness: float = 0.0
    early_gradient: np.ndarray | float = 0.0
    early_speed: float = 0.0
    gradient_exponent: float = 1.0
    learning_rate: Callable[[np.ndarray], np.ndarray] = np.ones_like
    shocks: Mapping[int, float] = field(default_factory=dict)
    realised: float = 1.0
    time_noise: float = 0.0
    weight_errors: np.ndarray | float = 1.0
    noise_scale_errors: np.ndarray | float = 1.0

    @property
    def num_units(self) -> int:
        """Of all stages."""
        return len(self.stages)


def draw_job(seed: int, num_windows: int) -> JobTraits:
    """A random job; equal arguments give equal ones.

    Half of the jobs train from scratch, half fine-tune. Which one it is, no observation says.
    """
    rng = np.random.default_rng([seed, 0])
    held_out = seed >= TRAINING_JOBS[1]
    pipeline = draw_pipeline(int(rng.integers(NUM_PIPELINES)) + NUM_PIPELINES * held_out)
    scratch = bool(rng.random() < 0.5)
    counts = rng.integers(4, 11, pipeline.num_stages)
    stages = np.repeat(np.arange(pipeline.num_stages), counts)
    num_units = len(stages)

    def around(median: float, spread: float, size: int | None = num_units) -> np.ndarray:
        """Lognormal."""
        return median * np.exp(spread * rng.standard_normal(size))

    num_elements = around(1e6, 1.0)
    times = num_elements * around(1.0, 0.2)
    depth = stages / max(1, pipeline.num_stages - 1)
    # Units near the input settle first (Raghu et al., 2017), in some models more than in others.
    rates = around(float(around(2.5 if scratch else 1.5, 0.4, None)), rng.uniform(0.4, 1.2))
    rates *= np.exp(rng.uniform(0.0, 1.5) * (0.5 - depth))
    # To first order a normalising optimizer moves the loss by the square root of the elements.
    weights = np.sqrt(num_elements) * around(1.0, 0.5) / rates
    reducible = rng.uniform(0.3, 0.85) if scratch else rng.uniform(0.1, 0.3)
    weights *= reducible / weights.sum()
    level = float(around(*(_SCRATCH_NOISE if scratch else _FINE_TUNING_NOISE), None)) * pipeline.num_micro_batches
    return JobTraits(
        seed=seed,
        pipeline=pipeline,
        from_scratch=scratch,
        stages=stages,
        num_elements=num_elements,
        time_shares=times / np.bincount(stages, times)[stages],
        weights=weights,
        rates=rates,
        noise_scales=around(level, rng.uniform(0.3, 1.0)),
        dimensions=around(float(around(40.0, 0.7, None)), 0.7),
        floor=1.0 - reducible,
        loss_noise=rng.uniform(0.002, 0.03),
        coupling=rng.uniform(0.0, 0.3),
        jumpiness=rng.uniform(0.02, 0.1),
        early_share=rng.uniform(0.05, 0.2),
        early_jumpiness=rng.uniform(0.0, 12.0) if scratch else rng.uniform(0.0, 2.0),
        early_gradient=around(rng.uniform(0.5, 16.0) if scratch else rng.uniform(0.1, 2.0), 0.7),
        early_speed=rng.uniform(0.0, 20.0) if scratch else rng.uniform(0.0, 4.0),
        gradient_exponent=rng.uniform(0.0, 1.0) ** 2,
        learning_rate=_draw_learning_rate(rng),
        shocks=_draw_shocks(rng, num_windows),
        realised=rng.uniform(0.75, 1.0),
        time_noise=rng.uniform(0.002, 0.02),
        weight_errors=around(1.0, 0.3),
        noise_scale_errors=around(1.0, 0.3),
    )


def _draw_learning_rate(rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Constant, a line, a cosine or a single drop, each as likely."""
    kind, lowest, when = int(rng.integers(4)), rng.uniform(0.0, 0.2), rng.uniform(0.4, 0.8)
    curves: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
        np.ones_like,
        lambda done: 1 - (1 - lowest) * done,
        lambda done: lowest + (1 - lowest) * (1 + np.cos(np.pi * done)) / 2,
        lambda done: np.where(done < when, 1.0, 0.1),
    )
    return curves[kind]


def _draw_shocks(rng: np.random.Generator, num_windows: int) -> dict[int, float]:
    """None in six jobs of ten, else one or two."""
    num_shocks = int(rng.choice((0, 1, 2), p=(0.6, 0.3, 0.1)))
    return {int(rng.integers(1, max(2, num_windows))): float(rng.uniform(0.05, 0.3)) for _ in range(num_shocks)}
