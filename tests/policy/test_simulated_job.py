"""The learning model against closed forms written out here, and the directions that it must have."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.progress import kept_progress as kept_of_one
from rlfreeze_ds.policy.job_traits import JobTraits, draw_job
from rlfreeze_ds.policy.observation import Thresholds
from rlfreeze_ds.policy.simulated_job import WARM_UP_WINDOWS, WINDOW_STEPS, SimulatedJob, kept_progress
from rlfreeze_ds.policy.simulated_pipeline import BatchTimes, SimulatedPipeline

EVERYTHING, NOTHING = Thresholds(100.0, 100.0), Thresholds(0.01, 0.01)


@cache
def pipeline() -> SimulatedPipeline:
    durations = {}
    for stage_id in range(2):
        for micro_batch_id in range(4):
            durations[Instruction(stage_id, micro_batch_id, "F")] = Duration(1.0, 1.0)
            durations[Instruction(stage_id, micro_batch_id, "B")] = Duration(3.0, 1.5)
    return SimulatedPipeline(2, 4, Costs(durations), 0.5)


def one_unit_a_stage(**changes: object) -> JobTraits:
    """Two units of different size, speed and noise; no noise in what a job sees."""
    traits = JobTraits(
        seed=0,
        pipeline=pipeline(),
        from_scratch=True,
        stages=np.array([0, 1]),
        num_elements=np.array([4.0, 9.0]),
        time_shares=np.ones(2),
        weights=np.array([0.3, 0.2]),
        rates=np.array([2.0, 0.5]),
        noise_scales=np.array([3.0, 12.0]),
        dimensions=np.full(2, 30.0),
        floor=0.5,
        loss_noise=1e-6,
    )
    return replace(traits, **changes)


def after(traits: JobTraits, thresholds: Thresholds, num_windows: int = 10) -> tuple[SimulatedJob, list]:
    job = SimulatedJob(traits, num_windows)
    return job, [job.run_window(thresholds) for _ in range(num_windows)]


def test_kept_is_the_planner_s() -> None:
    rng = np.random.default_rng(0)
    live, scale = rng.uniform(0, 1, 50), rng.lognormal(1.0, 2.0, 50)
    live[:2] = 0.0, 1.0
    expected = [kept_of_one(share, 8, b) for share, b in zip(live.tolist(), scale.tolist(), strict=True)]
    assert kept_progress(live, 8, scale) == pytest.approx(expected, abs=1e-5)


def test_with_nothing_frozen_a_unit_decays_by_the_closed_form() -> None:
    job, windows = after(one_unit_a_stage(), NOTHING)
    share_of_run = (10 + WARM_UP_WINDOWS) / 10
    left = np.exp(-np.array([2.0, 0.5]) * share_of_run)
    assert job.progress_left == pytest.approx(left, rel=1e-9)
    # The mean over the last window's steps, each after it was taken.
    steps = np.arange((9 + WARM_UP_WINDOWS) * WINDOW_STEPS + 1, (10 + WARM_UP_WINDOWS) * WINDOW_STEPS + 1) / (10 * WINDOW_STEPS)
    loss = 0.5 + np.mean(0.3 * np.exp(-2.0 * steps) + 0.2 * np.exp(-0.5 * steps))
    assert windows[-1].loss == pytest.approx(loss, abs=1e-5)
    assert all(w.kept_progress == 1.0 and w.seconds == w.unfrozen_s for w in windows)


def test_a_frozen_unit_decays_by_what_is_kept() -> None:
    job, windows = after(one_unit_a_stage(), EVERYTHING)
    ratios = pipeline().batch(np.ones(2)).stage_ratios
    assert ratios.max() > 0.3
    for unit, (rate, scale) in enumerate([(2.0, 3.0), (0.5, 12.0)]):
        left = math.exp(-rate * WARM_UP_WINDOWS / 10)
        for _ in range(10):
            b, live = scale / left, 1 - ratios[unit]
            left *= math.exp(-rate / 10 * math.sqrt((1 + b / 4) / (1 + b / (4 * live))))
        assert job.progress_left[unit] == pytest.approx(left, rel=1e-9)
    assert windows[0].unfrozen_s / windows[0].seconds == pytest.approx(windows[0].observation.throughput)


def test_learning_rate_and_coupling() -> None:
    job, _ = after(one_unit_a_stage(learning_rate=lambda done: np.where(done < 0.5, 1.0, 0.1)), NOTHING)
    assert job.progress_left == pytest.approx(np.exp(-np.array([2.0, 0.5]) * (WARM_UP_WINDOWS / 10 + 0.55)), rel=1e-9)
    coupled, _ = after(one_unit_a_stage(coupling=0.3), NOTHING)
    alone, _ = after(one_unit_a_stage(), NOTHING)
    assert (coupled.progress_left > alone.progress_left).all()


def test_what_is_faster_at_the_start_fades() -> None:
    job, _ = after(one_unit_a_stage(early_speed=4.0, early_share=0.2), NOTHING, 100)
    # Both windows of warm-up at the full early speed, then its integral over the run.
    fast = 1 + WARM_UP_WINDOWS / 100 + 4 * (WARM_UP_WINDOWS / 100 + 0.2 * (1 - math.exp(-1 / 0.2)))
    assert job.progress_left == pytest.approx(np.exp(-np.array([2.0, 0.5]) * fast), rel=0.01)


@pytest.mark.parametrize(("exponent", "early"), [(1.0, 0.0), (0.0, 0.0), (0.5, 3.0)])
def test_gradient_norms_have_the_mean_and_variance_of_their_formula(exponent: float, early: float) -> None:
    job = SimulatedJob(one_unit_a_stage(gradient_exponent=exponent, early_gradient=early, early_share=0.2), 10)
    path, live = np.full((40_000, 2), 0.5), np.array([0.25, 1.0])
    job._progress = lambda: np.full(len(path), 0.1)
    squared = job._norms(path, live) ** 2
    at_start = (np.array([0.3, 0.2]) * np.array([2.0, 0.5])) ** 2 / np.array([4.0, 9.0])
    at_start *= (1 + early * math.exp(-0.5)) ** 2
    signal, noise = at_start * 0.25**exponent, np.array([3.0, 12.0]) * at_start * 0.5**exponent / (live * 4)
    job.progress_left = path[0]
    assert job.noise_scale == pytest.approx(noise * live * 4 / signal)
    assert squared.mean(axis=0) == pytest.approx(signal + noise, rel=0.02)
    variance = 4 * signal * noise / 30 + 2 * noise**2 / 30
    assert squared.var(axis=0) == pytest.approx(variance, rel=0.05)


def test_all_frozen_throughout_learns_nothing_and_is_punished() -> None:
    everything = SimulatedPipeline(2, 4, pipeline().costs, 1.0)
    everything.batch = lambda shares: BatchTimes(15.0, 0.2, shares)
    traits = one_unit_a_stage(pipeline=everything)
    job = SimulatedJob(traits, 10)
    before, statistics = job.progress_left.copy(), job.statistics.gradient.copy()
    frozen = [job.run_window(EVERYTHING) for _ in range(10)]
    assert job.progress_left == pytest.approx(before, rel=1e-4) and (job.statistics.gradient == statistics).all()
    assert all(w.kept_progress < 1e-3 and w.reward < -0.7 for w in frozen)


@pytest.mark.parametrize("seed", range(8))
def test_freezing_costs_loss_a_step_and_saves_seconds(seed: int) -> None:
    traits = replace(draw_job(seed, 40), loss_noise=1e-5)
    _, frozen = after(traits, EVERYTHING, 40)
    _, stock = after(traits, NOTHING, 40)
    assert frozen[-1].loss > stock[-1].loss
    assert all(0 <= w.kept_progress <= 1 and w.seconds <= w.unfrozen_s for w in frozen)
    assert all(-2 <= w.reward <= 9 and math.isfinite(w.reward) for w in (*frozen, *stock))


def test_never_freezing_is_rewarded_with_about_nothing() -> None:
    rewards = []
    for seed in range(20):
        _, windows = after(replace(draw_job(seed, 40), shocks={}), NOTHING, 40)
        assert all(w.observation.mean_freeze_ratio == 0 and w.kept_progress == pytest.approx(1) for w in windows)
        rewards.append(np.mean([w.reward for w in windows]))
    assert abs(np.mean(rewards)) < 0.01 and max(map(abs, rewards)) < 0.03


def test_the_reward_pays_for_what_is_true() -> None:
    """A job's own estimate may err, but not to one side."""
    errors = []
    for seed in range(20):
        _, windows = after(replace(draw_job(seed, 40), shocks={}), EVERYTHING, 40)
        errors += [w.observation.kept_progress - w.kept_progress for w in windows]
    assert abs(np.mean(errors)) < 0.02 and np.std(errors) > 0.001


def test_a_shock_raises_loss_and_gradients() -> None:
    def run(shocks: dict[int, float]) -> tuple[SimulatedJob, list]:
        job = SimulatedJob(one_unit_a_stage(shocks=shocks, seed=2), 10)
        return job, [job.run_window(NOTHING) for _ in range(6)]

    (calm, before), (hit, shocked) = run({}), run({5: 0.5})
    assert [w.loss for w in before[:5]] == [w.loss for w in shocked[:5]]
    assert shocked[5].loss > before[5].loss + 0.2 and shocked[5].observation.loss_deviation > 3
    assert (hit.statistics.gradient > calm.statistics.gradient).any()


def test_a_spike_lasts_longer_where_much_is_frozen() -> None:
    left = {}
    for thresholds in (NOTHING, EVERYTHING):
        job = SimulatedJob(one_unit_a_stage(shocks={2: 0.4}), 10)
        windows = [job.run_window(thresholds) for _ in range(4)]
        left[thresholds] = job._spike
        assert left[thresholds] == pytest.approx(0.4 * 0.5 * 0.5 ** sum(w.kept_progress for w in windows[2:]))
    assert left[NOTHING] < left[EVERYTHING]


def test_a_part_of_the_planned_saving_comes_true() -> None:
    _, (full, *_) = after(one_unit_a_stage(), EVERYTHING)
    _, (part, *_) = after(one_unit_a_stage(realised=0.75), EVERYTHING)
    saved = full.unfrozen_s - full.seconds
    assert saved > 1 and part.unfrozen_s - part.seconds == pytest.approx(0.75 * saved)


def test_equal_seeds_give_equal_jobs_and_other_lengths_the_same_job() -> None:
    (_, first), (_, again), (_, other) = (after(draw_job(seed, 12), EVERYTHING, 12) for seed in (5, 5, 6))
    assert first == again and first != other


def test_held_out_jobs_share_no_pipeline_with_training() -> None:
    training = {id(draw_job(seed, 40).pipeline) for seed in range(10)}
    held_out = {id(draw_job(seed, 40).pipeline) for seed in range(1_000_000, 1_000_010)}
    assert not training & held_out
