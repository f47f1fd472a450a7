"""The trade-off between freezing and makespan."""

import itertools
import random

import pytest

from rlfreeze_ds.errors import ConfigError, TargetError
from rlfreeze_ds.planning.frontier import frontier
from rlfreeze_ds.planning.solver import Limits, solve


@pytest.fixture(scope="module")
def found(published):
    return frontier(*published, Limits(0.8), num_points=17)


def test_it_runs_from_nothing_to_the_shortest_batch_and_is_convex(published, found) -> None:
    plans = found.plans
    assert len(plans) == 17
    assert plans[0].mean_freeze_ratio == 0 and plans[0].planned_makespan_s == pytest.approx(0.675)
    assert plans[-1].planned_makespan_s == pytest.approx(0.42340, abs=1e-4)
    assert plans[-1].mean_freeze_ratio == pytest.approx(0.681, abs=6e-4)
    slopes = [
        (b.mean_freeze_ratio - a.mean_freeze_ratio) / (a.planned_makespan_s - b.planned_makespan_s)
        for a, b in itertools.pairwise(plans)
    ]
    assert all(b >= a - 1e-4 for a, b in itertools.pairwise(slopes))
    assert slopes[-1] > 2 * slopes[0]


def test_every_point_is_what_the_simulator_says(published, found) -> None:
    dag, costs = published
    for plan in found.plans:
        assert dag.simulate(costs.seconds(plan.ratios)).makespan == plan.planned_makespan_s
        assert max(plan.stage_freeze_ratio) <= 0.8 + 1e-9


def test_no_point_is_beaten_by_ten_thousand_random_plans(published, found) -> None:
    dag, costs = published
    draw = random.Random(0)
    stages = [[i for i in costs.freezable if i.stage_id == s] for s in range(4)]
    line = sorted((plan.planned_makespan_s, plan.mean_freeze_ratio) for plan in found.plans)
    for attempt in range(10_000):
        ratios = {}
        if attempt % 2:  # near a plan of the frontier
            base = draw.choice(found.plans).ratios
            ratios = {i: min(1.0, max(0.0, r + draw.gauss(0, 0.05))) for i, r in base.items()}
        else:
            for stage in stages:
                level = draw.uniform(0, 0.8)
                ratios.update({i: min(1.0, max(0.0, draw.gauss(level, 0.3))) for i in stage})
        for stage in stages:  # within the limit
            mean = sum(ratios[i] for i in stage) / len(stage)
            if mean > 0.8:
                ratios.update({i: ratios[i] * 0.8 / mean for i in stage})
        seconds = dag.simulate(costs.seconds(ratios)).makespan
        mean = sum(ratios.values()) / len(ratios)
        assert seconds >= line[0][0] * (1 - 1e-6) and mean >= at_least(line, seconds) - 1e-4


def at_least(line: list[tuple[float, float]], seconds: float) -> float:
    """A convex function through these points lies above each line through two neighbours, outside of them."""
    return max(
        y0 + (y1 - y0) * (seconds - x0) / (x1 - x0)
        for (x0, y0), (x1, y1) in itertools.pairwise(line)
        if not x0 < seconds < x1
    )


def test_knee_and_best(found) -> None:
    plans = found.plans
    assert 0 < found.knee < 16
    gains = [plan.expected_loss_per_second_gain for plan in plans]
    assert found.best == gains.index(max(gains)) and gains[found.best] == pytest.approx(1.128, abs=0.01)
    text = found.table()
    assert len(text.splitlines()) == 18 and text.count("knee") == 1
    data = found.to_json()
    assert data["knee"] == found.knee and len(data["points"]) == 17


def test_a_target_is_met_with_the_least_freezing(published) -> None:
    plan = solve(*published, Limits(0.8, target_speedup=1.3))
    assert plan.speedup == pytest.approx(1.3, abs=1e-5)
    slower = solve(*published, Limits(0.8, time_slack=0.675 / 1.3 / 0.42340 - 1))
    assert plan.mean_freeze_ratio == pytest.approx(slower.mean_freeze_ratio, abs=1e-3)


def test_a_target_out_of_reach_says_what_is_in_reach(published) -> None:
    with pytest.raises(TargetError, match=r"target_speedup = 1.5: at most 1.39\d can be reached here .*max_freeze_ratio 0.5"):
        solve(*published, Limits(0.5, target_speedup=1.5))
    for wrong in (1.0, 0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="target_speedup"):
            Limits(target_speedup=wrong)
