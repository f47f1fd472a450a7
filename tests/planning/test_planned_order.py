"""Searched orders against an exact program on small batches, and against what DeepSpeed's engine can run."""

from __future__ import annotations

import itertools

import pulp
import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.linear_program import make_solver
from rlfreeze_ds.planning.planned_order import Batch, best_start, common_order, held, makespan, needs, ranks_of, search
from rlfreeze_ds.planning.schedule import Schedule, Transfer, from_commands
from rlfreeze_ds.planning.transfers import blocking_1f1b, blocking_zb_h1
from tests.orders import batch_of


def least_makespan(schedule: Schedule, batch: Batch) -> float:
    """By mixed-integer programming: of two events of a rank, one comes first."""
    events, num_ranks = common_order(schedule), schedule.num_ranks
    seconds = {event: batch.transfer_s if isinstance(event, Transfer) else batch.seconds[event] for event in events}
    horizon = makespan(events, batch, num_ranks)
    problem = pulp.LpProblem("order", pulp.LpMinimize)
    start = {event: problem.add_variable(f"t{k}", 0, horizon) for k, event in enumerate(events)}
    end = problem.add_variable("end", 0, horizon)
    problem += end
    for event in events:
        problem += end >= start[event] + seconds[event]
        for other in needs(event, num_ranks):
            problem += start[event] >= start[other] + seconds[other]
    for k, (one, other) in enumerate(itertools.combinations(events, 2)):
        if set(ranks_of(one)) & set(ranks_of(other)):
            first = problem.add_variable(f"first{k}", 0, 1, pulp.LpInteger)
            problem += start[other] >= start[one] + seconds[one] - horizon * (1 - first)
            problem += start[one] >= start[other] + seconds[other] - horizon * first
    for event in events:
        # A rank takes micro-batch m only after the W of micro-batch m - most_held.
        sender = event.sender if isinstance(event, Transfer) else event
        takes = sender.is_forward and (isinstance(event, Transfer) or sender.stage_id == 0)
        if takes and sender.micro_batch_id >= batch.most_held:
            rank = ranks_of(event)[-1]
            w = next(
                other for other in batch.seconds
                if (other.kind, other.stage_id, other.micro_batch_id) == ("W", rank, sender.micro_batch_id - batch.most_held)
            )  # fmt: skip
            problem += start[event] >= start[w] + seconds[w]
    problem.solve(make_solver("highs", 60.0))
    assert problem.status == pulp.LpStatusOptimal and problem.sol_status == pulp.LpSolutionOptimal
    return float(end.varValue)


@pytest.mark.parametrize(("stages", "micro_batches", "most_held"), [(2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 3, 3)])
def test_within_two_percent_of_the_exact_optimum(stages: int, micro_batches: int, most_held: int) -> None:
    for seed in range(2):
        schedule = blocking_zb_h1(stages, micro_batches)
        batch = batch_of(schedule, seed, most_held)
        exact_s = least_makespan(schedule, batch)
        found_s = makespan(common_order(search(schedule, batch, num_moves=4000)), batch, stages)
        assert exact_s * (1 - 1e-6) <= found_s <= exact_s * 1.02, (seed, found_s / exact_s)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 4), (2, 1), (3, 5), (4, 8), (5, 3), (8, 12)])
def test_what_is_found_can_run_and_is_no_longer_than_zb_h1(stages: int, micro_batches: int) -> None:
    start = blocking_zb_h1(stages, micro_batches)
    for extra in (0, 1):
        batch = batch_of(start, stages, min(stages, micro_batches) + extra)
        found = search(start, batch, num_moves=1500)
        order = common_order(found)
        assert max(held(order, stages)) <= batch.most_held
        assert sorted(map(str, order)) == sorted(map(str, common_order(start)))
        simulated = PipelineDag(found).simulate(batch.seconds, batch.transfer_s).makespan
        assert makespan(order, batch, stages) == pytest.approx(simulated)
        assert simulated <= PipelineDag(start).simulate(batch.seconds, batch.transfer_s).makespan + 1e-9
        assert found == search(start, batch, num_moves=1500)


def test_a_search_is_worth_something_and_a_looser_limit_more() -> None:
    start = blocking_zb_h1(4, 8)
    seconds = {i: {"F": 1.0, "I": 1.4, "W": 1.6}[i.kind] for i in start.instructions}
    tight, loose = (Batch(seconds, 0.03, most_held) for most_held in (4, 5))
    first, held_4, held_5 = (
        makespan(common_order(schedule), tight, 4)
        for schedule in (start, search(start, tight), search(start, loose))
    )
    assert held_5 < held_4 < 0.99 * first


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("F SA F SA RG RG I I W W", "RA F I RA F I SG SG W W"), "transfer of 1I1 comes before 0I0"),
        (("F SA F SA RG I RG I W W", "RA F RA F I SG I SG W W"), "1F1 comes before 1I0"),
        (("F RG SA I W", "RA F I SG W"), "wait for each other"),
    ],
)
def test_what_the_engine_cannot_run_is_named(orders: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        common_order(from_commands(orders))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (4, 8), (8, 24)])
def test_a_start_suits_the_seconds(stages: int, micro_batches: int) -> None:
    """With W frozen whole, ZB-H1's usual places lose against plain 1F1B; with F, I and W alike they win."""
    zero_bubble = blocking_zb_h1(stages, micro_batches)
    for w, transfer_s in itertools.product((0.0, 0.5, 1.0), (0.0, 0.05)):
        batch = Batch({i: w if i.kind == "W" else 1.0 for i in zero_bubble.instructions}, transfer_s, min(stages, micro_batches))
        found = common_order(best_start(stages, micro_batches, batch))
        whole = blocking_1f1b(stages, micro_batches)
        seconds = {i: 1.0 if i.is_forward else 1.0 + w for i in whole.instructions}
        stock_s = PipelineDag(whole).simulate(seconds, transfer_s).makespan
        usual_s = makespan(common_order(zero_bubble), batch, stages)
        found_s = makespan(found, batch, stages)
        assert max(held(found, stages)) <= batch.most_held and found_s <= min(usual_s, stock_s * 1.01) + 1e-9
        assert stages < 4 or w > 0 or found_s < 0.95 * usual_s
