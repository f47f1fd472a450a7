"""Looked-up batch times against the solver, the limits and a closed form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.profile import read_profile
from rlfreeze_ds.policy.simulated_job import kept_progress
from rlfreeze_ds.policy.simulated_pipeline import LEVELS, TIME_SLACK, SimulatedPipeline, draw_pipeline

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "profiles" / "llama8b_h200_pp4_1f1b.csv"


def even(num_stages: int, num_micro_batches: int, max_freeze_ratio: float, tail_s: float = 0.0) -> SimulatedPipeline:
    durations = {}
    for stage_id in range(num_stages):
        for micro_batch_id in range(num_micro_batches):
            durations[Instruction(stage_id, micro_batch_id, "F")] = Duration(1.0, 1.0)
            durations[Instruction(stage_id, micro_batch_id, "B")] = Duration(3.0, 1.5)
    return SimulatedPipeline(
        num_stages, num_micro_batches, Costs(durations, 0.0, dict.fromkeys(range(num_stages), tail_s)), max_freeze_ratio
    )


def test_an_even_pipeline_takes_the_closed_form() -> None:
    pipeline = even(4, 8, 1.0, tail_s=2.0)
    assert pipeline.unfrozen.seconds == pytest.approx((8 + 3) * (1 + 3) + 2)
    assert pipeline.unfrozen.bubble_ratio == pytest.approx(1 - (8 * 4 + 2) / (11 * 4 + 2))
    assert not pipeline.unfrozen.stage_ratios.any()
    shortest = (8 + 3) * (1 + 1.5) + 2
    assert shortest <= pipeline.batch(np.ones(4)).seconds <= shortest * (1 + TIME_SLACK) + 1e-6


def test_the_published_profile() -> None:
    """The least makespan at 0.5 is 0.4830 s by an independent solver. With B = 14 the best loss per second is 1.197x."""
    _, costs = read_profile(PUBLISHED)
    pipeline = SimulatedPipeline(4, 8, costs, 0.5)
    assert pipeline.unfrozen.seconds == pytest.approx(0.675)
    times = pipeline.batch(np.ones(4))
    assert times.seconds == pytest.approx(1.02 * 0.4830, rel=1e-3)
    assert times.stage_ratios.mean() == pytest.approx(0.326, abs=0.002)
    gains = []
    for share in np.linspace(0, 1, 21):
        times = pipeline.batch(np.full(4, share))
        kept = kept_progress(1 - times.stage_ratios, 8, np.full(4, 14.0)).mean()
        gains.append(pipeline.unfrozen.seconds / times.seconds * kept)
    assert gains[0] == 1.0 and 1.17 < max(gains) <= 1.2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", LEVELS)
def test_as_the_solver_at_the_levels(seed: int, level: float) -> None:
    pipeline = draw_pipeline(seed)
    shares = np.full(pipeline.num_stages, level)
    plan, times = pipeline.plan(shares), pipeline.batch(shares)
    if plan.speedup < 1.021:
        assert times is pipeline.unfrozen or times.seconds == pytest.approx(plan.planned_makespan_s, rel=0.01)
        return
    assert times.seconds == pytest.approx(plan.planned_makespan_s, rel=1e-6)
    assert times.stage_ratios == pytest.approx(plan.stage_freeze_ratio, abs=1e-6)
    assert times.bubble_ratio == pytest.approx(plan.bubble_ratio, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_near_the_solver_and_within_its_limits_elsewhere(seed: int) -> None:
    pipeline, rng = draw_pipeline(seed), np.random.default_rng(seed)
    for _ in range(3):
        shares = np.clip(rng.uniform(0.2, 0.9) + 0.15 * rng.standard_normal(pipeline.num_stages), 0, 1)
        plan, times = pipeline.plan(shares), pipeline.batch(shares)
        assert (pipeline.ratios(shares) <= shares[:, None] + 1e-9).all(), "more than the eligible units skipped"
        assert (times.stage_ratios <= pipeline.max_freeze_ratio * shares + 1e-9).all()
        assert times.seconds * (1 + TIME_SLACK) >= plan.planned_makespan_s * (1 - 1e-6), "faster than the least makespan"
        assert times.seconds <= 1.1 * plan.planned_makespan_s


def test_nothing_is_frozen_where_nothing_may_be_or_nothing_is_gained() -> None:
    pipeline = even(4, 8, 0.5)
    assert pipeline.batch(np.zeros(4)) is pipeline.unfrozen
    assert pipeline.batch(np.full(4, 0.02)) is pipeline.unfrozen
    assert pipeline.batch(np.full(4, 0.5)) is not pipeline.unfrozen


def test_only_whole_micro_batches_count_for_the_limit() -> None:
    assert even(2, 8, 0.65).max_freeze_ratio == 5 / 8 and even(2, 4, 0.8).max_freeze_ratio == 3 / 4
    assert even(2, 4, 0.2).max_freeze_ratio == 0.2, "less than one micro-batch: the limit holds over the steps"


def test_equal_seeds_give_equal_pipelines() -> None:
    draw_pipeline.cache_clear()
    first = draw_pipeline(3)
    draw_pipeline.cache_clear()
    again, other = draw_pipeline(3), draw_pipeline(4)
    assert first is not again and first.costs == again.costs and first.costs != other.costs
    shares = np.linspace(0, 1, first.num_stages)
    assert first.batch(shares).seconds == again.batch(shares).seconds
