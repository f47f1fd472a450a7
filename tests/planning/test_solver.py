import itertools
import math
import random

import numpy as np
import pytest

from rlfreeze_ds.errors import ConfigError, ProfileError, SolverError
from rlfreeze_ds.planning import linear_program
from rlfreeze_ds.planning.builders import gpipe, one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule
from rlfreeze_ds.planning.solver import Limits, available_solvers, solve


def uniform(schedule: Schedule, unfrozen_s: float, frozen_s: float, transfer_s: float = 0.0) -> Costs:
    forward, backward = Duration(1.0, 1.0), Duration(unfrozen_s, frozen_s)
    return Costs({i: forward if i.kind == "F" else backward for i in schedule.instructions}, transfer_s)


def makespan(dag: PipelineDag, costs: Costs, ratios: dict[Instruction, float]) -> float:
    return dag.simulate(costs.seconds(ratios), costs.transfer_s).makespan


# DESIGN.md section 5, found there by an independent solver:
# max_freeze_ratio, least makespan, and the least mean ratio at 0, 2 and 5 % slack.
TABLE = [(0.3, 0.5235, 0.280, 0.208, 0.166), (0.5, 0.4830, 0.435, 0.324, 0.276), (0.8, 0.4234, 0.681, 0.572, 0.514)]


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize(("max_freeze_ratio", "least_s", "at_0", "at_2", "at_5"), TABLE)
def test_the_published_table(published, solver, max_freeze_ratio, least_s, at_0, at_2, at_5) -> None:
    if solver not in available_solvers():
        pytest.skip(f"{solver} is not installed")
    for time_slack, mean in ((0.0, at_0), (0.02, at_2), (0.05, at_5)):
        plan = solve(*published, Limits(max_freeze_ratio, time_slack), solver=solver)
        assert plan.unfrozen_makespan_s == pytest.approx(0.675, abs=1e-9)
        assert plan.all_frozen_makespan_s == pytest.approx(0.385, abs=1e-9)
        assert plan.planned_makespan_s == pytest.approx(least_s * (1 + time_slack), abs=1e-4)
        assert plan.mean_freeze_ratio == pytest.approx(mean, abs=6e-4)
        assert max(plan.stage_freeze_ratio) <= max_freeze_ratio + 1e-9
        assert plan.solver == solver


def two_by_two_makespan(forward, backward):
    """1F1B with 2 stages and 2 micro-batches, written out by hand; works on arrays."""
    (f00, f01), (f10, f11) = forward
    (b00, b01), (b10, b11) = backward
    second_forward_0 = f00 + f01
    backward_10 = f00 + f10 + b10
    backward_11 = np.maximum(backward_10, second_forward_0) + f11 + b11
    backward_00 = np.maximum(second_forward_0, backward_10) + b00
    return np.maximum(backward_00, backward_11) + b01


@pytest.mark.parametrize("time_slack", [0.0, 0.1])
@pytest.mark.parametrize("cap", [0.25, 0.5, 0.8])
def test_two_by_two_equals_brute_force(cap: float, time_slack: float) -> None:
    forward = [[1.0, 2.0], [2.0, 1.0]]
    unfrozen, frozen = [[4.0, 3.0], [5.0, 4.0]], [[2.0, 1.0], [3.0, 2.0]]
    schedule = one_f_one_b(2, 2)
    costs = Costs(
        {
            i: Duration(*(2 * [forward[i.stage_id][i.micro_batch_id]]))
            if i.kind == "F"
            else Duration(unfrozen[i.stage_id][i.micro_batch_id], frozen[i.stage_id][i.micro_batch_id])
            for i in schedule.instructions
        }
    )
    step = 0.025
    grid = np.meshgrid(*[np.arange(0, 1 + step / 2, step)] * 4, indexing="ij", sparse=True)
    r00, r01, r10, r11 = grid
    allowed = ((r00 + r01) / 2 <= cap + 1e-9) & ((r10 + r11) / 2 <= cap + 1e-9)
    backward = [
        [unfrozen[s][m] - r * (unfrozen[s][m] - frozen[s][m]) for m, r in enumerate(row)]
        for s, row in enumerate([[r00, r01], [r10, r11]])
    ]
    spans = np.where(allowed, two_by_two_makespan(forward, backward), np.inf)
    least = spans.min()
    plan = solve(PipelineDag(schedule), costs, Limits(cap, time_slack=0.0))
    # All savings are 2 s and all durations whole seconds: the least makespan lies on the grid.
    assert plan.planned_makespan_s == pytest.approx(least, abs=1e-6)
    total = np.broadcast_to(r00 + r01 + r10 + r11, spans.shape)
    least_total = total[spans <= (1 + time_slack) * least + 1e-9].min()
    found = 4 * solve(PipelineDag(schedule), costs, Limits(cap, time_slack)).mean_freeze_ratio
    assert least_total - 4 * step < found <= least_total + 1e-6


@pytest.mark.parametrize("cap", [0.25, 0.5, 0.8])
def test_one_ratio_a_stage_equals_brute_force(cap: float) -> None:
    """Masks for a whole step: two numbers in all, so every pair of them can be tried."""
    forward = [[1.0, 2.0], [2.0, 1.0]]
    unfrozen, saving = [[4.0, 3.0], [5.0, 4.0]], 2.0
    schedule = one_f_one_b(2, 2)
    costs = Costs(
        {
            i: Duration(*(2 * [forward[i.stage_id][i.micro_batch_id]]))
            if i.kind == "F"
            else Duration(unfrozen[i.stage_id][i.micro_batch_id], unfrozen[i.stage_id][i.micro_batch_id] - saving)
            for i in schedule.instructions
        }
    )
    step = 0.0125
    first, second = np.meshgrid(np.arange(0, cap + step / 2, step), np.arange(0, cap + step / 2, step), indexing="ij")
    backward = [[u - r * saving for u in row] for row, r in zip(unfrozen, (first, second), strict=True)]
    spans = two_by_two_makespan(forward, backward)
    plan = solve(PipelineDag(schedule), costs, Limits(cap, 0.0, equal_in_stage=True))
    assert plan.planned_makespan_s == pytest.approx(spans.min(), abs=1e-6)
    assert 2 * plan.mean_freeze_ratio == pytest.approx((first + second)[spans <= spans.min() + 1e-9].min(), abs=2 * step)
    for stage in range(2):
        assert plan.ratio(stage, 0) == plan.ratio(stage, 1)
    assert plan.planned_makespan_s >= solve(PipelineDag(schedule), costs, Limits(cap, 0.0)).planned_makespan_s - 1e-9


def random_case(seed: int) -> tuple[PipelineDag, Costs, Limits]:
    draw = random.Random(seed)
    num_stages, num_micro_batches = draw.randint(1, 4), draw.randint(1, 5)
    schedule = draw.choice([one_f_one_b, gpipe])(num_stages, num_micro_batches)
    if seed % 3 == 0:  # split some backwards
        split = {pair for pair in itertools.product(range(num_stages), range(num_micro_batches)) if draw.random() < 0.5}
        ranks = [
            [
                Instruction(i.stage_id, i.micro_batch_id, kind)
                for i in rank
                for kind in ("IW" if i.kind == "B" and (i.stage_id, i.micro_batch_id) in split else i.kind)
            ]
            for rank in schedule.ranks
        ]
        schedule = Schedule(tuple(map(tuple, ranks)))
    scale = 10.0 ** draw.randint(-4, 4)
    durations = {}
    for i in schedule.instructions:
        unfrozen_s = scale * draw.uniform(0.0, 2.0)
        durations[i] = Duration(unfrozen_s, unfrozen_s * draw.choice([0.0, 0.3, 0.5, 0.9, 1.0, 1.2]))
    limits = Limits(
        max_freeze_ratio=draw.choice([0.1, 0.5, 0.8, 1.0]),
        time_slack=draw.choice([0.0, 0.02, 0.1]),
        stage_ratio_cap={0: draw.choice([0.0, 0.4, 1.0])} if draw.random() < 0.5 else {},
        stage_mean_cap={num_stages - 1: draw.choice([0.0, 0.2, 0.7])} if draw.random() < 0.5 else {},
    )
    return PipelineDag(schedule), Costs(durations, transfer_s=scale * draw.choice([0.0, 0.1])), limits


@pytest.mark.parametrize("seed", range(60))
def test_random_plans_keep_every_limit(seed: int) -> None:
    dag, costs, limits = random_case(seed)
    plan = solve(dag, costs, limits)
    assert set(plan.ratios) == set(costs.freezable)
    for instruction, ratio in plan.ratios.items():
        assert 0 <= ratio <= limits.stage_ratio_cap.get(instruction.stage_id, 1.0)
        assert math.copysign(1, ratio) == 1
    for stage_id, mean in enumerate(plan.stage_freeze_ratio):
        cap = min(limits.max_freeze_ratio, limits.stage_mean_cap.get(stage_id, 1.0))
        assert mean <= cap + 1e-6
        of_stage = [ratio for i, ratio in plan.ratios.items() if i.stage_id == stage_id]
        assert mean == pytest.approx(sum(of_stage) / len(of_stage) if of_stage else 0.0)
    assert plan.planned_makespan_s == makespan(dag, costs, plan.ratios)
    fastest = solve(dag, costs, Limits(limits.max_freeze_ratio, 0.0, limits.stage_ratio_cap, limits.stage_mean_cap))
    assert plan.planned_makespan_s <= (1 + limits.time_slack) * fastest.planned_makespan_s * (1 + 2e-6)
    assert plan.mean_freeze_ratio <= fastest.mean_freeze_ratio + 1e-6
    # Freezing as much, but the same everywhere, is no faster. With savings that differ, neither is any draw.
    draw = random.Random(seed)
    for attempt in range(20):
        rivals = {}
        for stage_id, freezable in itertools.groupby(costs.freezable, key=lambda i: i.stage_id):
            group = list(freezable)
            cap = limits.stage_ratio_cap.get(stage_id, 1.0)
            mean = min(limits.max_freeze_ratio, limits.stage_mean_cap.get(stage_id, 1.0), cap)
            drawn = [draw.random() if attempt else 1.0 for _ in group]
            fit = min(mean * len(group) / sum(drawn), cap / max(drawn))
            rivals.update({i: fit * x for i, x in zip(group, drawn, strict=True)})
        assert fastest.planned_makespan_s <= makespan(dag, costs, rivals) * (1 + 2e-6)


@pytest.mark.skipif("cbc" not in available_solvers(), reason="cbc is not installed")
@pytest.mark.parametrize("seed", range(0, 60, 12))
def test_cbc_agrees_with_highs(seed: int) -> None:
    dag, costs, limits = random_case(seed)
    highs, cbc = (solve(dag, costs, limits, solver=name) for name in ("highs", "cbc"))
    assert cbc.planned_makespan_s == pytest.approx(highs.planned_makespan_s, rel=1e-5)
    assert cbc.mean_freeze_ratio == pytest.approx(highs.mean_freeze_ratio, abs=1e-5)


def test_transfers_are_respected() -> None:
    schedule = one_f_one_b(2, 1)
    costs = uniform(schedule, 2.0, 1.0, transfer_s=0.25)
    plan = solve(PipelineDag(schedule), costs, Limits(1.0, 0.0))
    assert plan.unfrozen_makespan_s == pytest.approx(6.5)
    assert plan.planned_makespan_s == pytest.approx(4.5)


def test_only_what_is_critical_is_frozen() -> None:
    schedule = one_f_one_b(2, 4)
    durations = {i: Duration(1.0, 1.0) for i in schedule.instructions}
    durations.update({i: Duration(9.0, 4.0) for i in schedule.instructions if i.kind == "B" and i.stage_id == 1})
    durations.update({i: Duration(2.0, 1.0) for i in schedule.instructions if i.kind == "B" and i.stage_id == 0})
    plan = solve(PipelineDag(schedule), Costs(durations), Limits(0.5, 0.0))
    assert plan.stage_freeze_ratio[1] == pytest.approx(0.5)
    # Of stage 0 only the last backward runs after stage 1 has ended.
    assert [plan.ratio(0, m) for m in range(4)] == pytest.approx([0, 0, 0, 1])


def no_solver_may_be_called(name: str, *_: object) -> None:
    raise AssertionError(f"{name} was called")


@pytest.mark.parametrize(
    "limits", [Limits(0.0), Limits(1.0, stage_ratio_cap={0: 0, 1: 0}), Limits(1.0, 0.0, {}, {0: 0, 1: 0})]
)
def test_nothing_may_be_frozen(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    monkeypatch.setattr(linear_program, "make_solver", no_solver_may_be_called)
    schedule = one_f_one_b(2, 3)
    plan = solve(PipelineDag(schedule), uniform(schedule, 2.0, 1.0), limits)
    assert set(plan.ratios.values()) == {0.0}
    assert len(plan.ratios) == 6
    assert plan.planned_makespan_s == plan.unfrozen_makespan_s == 12.0
    assert plan.all_frozen_makespan_s == 8.0
    assert plan.solver == "none"


@pytest.mark.parametrize("frozen_s", [2.0, 3.0])
def test_frozen_that_is_not_shorter_gives_an_empty_plan(monkeypatch: pytest.MonkeyPatch, frozen_s: float) -> None:
    monkeypatch.setattr(linear_program, "make_solver", no_solver_may_be_called)
    schedule = one_f_one_b(2, 3)
    plan = solve(PipelineDag(schedule), uniform(schedule, 2.0, frozen_s), Limits())
    assert plan.ratios == {}
    assert plan.stage_freeze_ratio == (0.0, 0.0)
    assert plan.planned_makespan_s == plan.all_frozen_makespan_s == plan.unfrozen_makespan_s == 12.0


def test_an_empty_batch_gives_an_empty_plan() -> None:
    plan = solve(PipelineDag(Schedule(())), Costs({}), Limits())
    assert (plan.ratios, plan.planned_makespan_s, plan.stage_freeze_ratio, plan.bubble_ratio) == ({}, 0.0, (), 0.0)


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
def test_numbers_that_are_no_seconds_never_reach_the_solver(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    monkeypatch.setattr(linear_program, "make_solver", no_solver_may_be_called)
    schedule = one_f_one_b(2, 2)
    with pytest.raises(ProfileError, match="must be a finite number of seconds"):
        solve(PipelineDag(schedule), uniform(schedule, bad, 1.0), Limits())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_freeze_ratio": 1.7}, r"max_freeze_ratio = 1.7: must be between 0 and 1 \(share of a stage's"),
        ({"max_freeze_ratio": math.nan}, "max_freeze_ratio = nan"),
        ({"time_slack": -0.1}, "time_slack = -0.1: must be a finite number >= 0"),
        ({"stage_ratio_cap": {2: 1.5}}, r"stage_ratio_cap\[2\] = 1.5"),
        ({"stage_mean_cap": {1: -1}}, r"stage_mean_cap\[1\] = -1"),
    ],
)
def test_limits_out_of_range(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limits(**keywords)


def test_unknown_solver_and_time_limit(published) -> None:
    with pytest.raises(ConfigError, match='must be "auto", "highs" or "cbc"'):
        solve(*published, Limits(), solver="glpk")
    with pytest.raises(ConfigError, match="time_limit_s = 0"):
        solve(*published, Limits(), time_limit_s=0)


def test_no_solver_installed(monkeypatch: pytest.MonkeyPatch, published) -> None:
    monkeypatch.setattr(linear_program, "make_solver", lambda *_: None)
    assert available_solvers() == []
    with pytest.raises(SolverError, match=r"HiGHS or CBC is not installed \(found: none\). Run `pip install"):
        solve(*published, Limits())


def test_the_wanted_solver_is_not_installed(monkeypatch: pytest.MonkeyPatch, published) -> None:
    real = linear_program.make_solver
    monkeypatch.setattr(linear_program, "make_solver", lambda name, *rest: real(name, *rest) if name != "cbc" else None)
    with pytest.raises(SolverError, match=r"'cbc' is not installed \(found: highs\)"):
        solve(*published, Limits(), solver="cbc")


def test_the_same_question_has_the_same_answer(published) -> None:
    assert solve(*published, Limits()) == solve(*published, Limits())


def test_a_tail_on_the_last_stage_makes_freezing_there_pay() -> None:
    """One micro-batch on two stages: 0F 1F 1B 0B. With a long tail on rank 1, stage 0's backward counts for nothing."""
    schedule = one_f_one_b(2, 1)
    costs = uniform(schedule, 2.0, 1.0)
    late = Costs(costs.durations, tail_s={1: 5.0})
    plan = solve(PipelineDag(schedule), late, Limits(1.0, 0.0))
    assert (plan.unfrozen_makespan_s, plan.planned_makespan_s) == pytest.approx((9.0, 8.0))
    assert plan.stage_freeze_ratio == pytest.approx((0.0, 1.0))
