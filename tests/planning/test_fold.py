"""A folded batch against the full program, which knows nothing of folding."""

import random

import pytest

from rlfreeze_ds.planning.builders import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zbv
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fold import Fold, spaced
from rlfreeze_ds.planning.progress import equal_stages
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules
from rlfreeze_ds.planning.solver import Limits, solve


def stage_costs(dag: PipelineDag, seed: int | None) -> Costs:
    """Durations that differ from stage to stage (``seed``) or not (None), the same for all micro-batches."""
    draw = random.Random(seed)
    rows = [
        (draw.uniform(0.5, 1.5), draw.uniform(0.5, 1.5), draw.uniform(0.5, 1.5)) if seed is not None else (1.0, 1.0, 1.0)
        for _ in range(dag.schedule.num_stages)
    ]
    durations = {}
    for i in dag.schedule.instructions:
        forward, input_gradient, weight_gradient = rows[i.stage_id]
        durations[i] = {
            "F": Duration(forward, forward),
            "B": Duration(input_gradient + weight_gradient, input_gradient),
            "I": Duration(input_gradient, input_gradient),
            "W": Duration(weight_gradient, 0.0),
        }[i.kind]
    return Costs(durations, transfer_s=0.0 if seed is None else 0.05)


def in_two_chunks(num_ranks: int, num_micro_batches: int) -> Schedule:
    return interleaved_1f1b(num_ranks, num_micro_batches, 2)


def with_blocking_transfers(num_stages: int, num_micro_batches: int) -> Schedule:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    return from_pipe_schedules([schedule.TrainSchedule(num_micro_batches, num_stages, s) for s in range(num_stages)])


CASES = [
    (one_f_one_b, 4, 32, None), (one_f_one_b, 4, 32, 1), (one_f_one_b, 8, 64, None), (one_f_one_b, 8, 64, 2),
    (one_f_one_b, 8, 24, 3), (one_f_one_b, 3, 100, 4), (one_f_one_b, 12, 48, 5), (gpipe, 4, 48, 6), (one_f_one_b, 6, 6, 7),
    (in_two_chunks, 4, 32, None), (in_two_chunks, 4, 32, 8),
    (with_blocking_transfers, 4, 32, 11), (with_blocking_transfers, 8, 48, 12),
    (zb_h1, 4, 32, None), (zb_h1, 4, 32, 9), (zbv, 4, 32, None), (zbv, 4, 32, 10),
]  # fmt: skip


@pytest.mark.parametrize(("build", "num_stages", "num_micro_batches", "seed"), CASES)
@pytest.mark.parametrize("cap", [0.5, 0.8])
def test_a_folded_plan_is_within_a_thousandth_of_the_full_optimum(build, num_stages, num_micro_batches, seed, cap) -> None:
    dag = PipelineDag(build(num_stages, num_micro_batches))
    costs = stage_costs(dag, seed)
    full, folded = (solve(dag, costs, Limits(cap, 0.0), full=full, time_limit_s=60) for full in (True, False))
    assert full.planned_makespan_s * (1 - 1e-6) <= folded.planned_makespan_s <= full.planned_makespan_s * 1.001
    full, folded = (solve(dag, costs, Limits(cap, 0.02), full=full, time_limit_s=60) for full in (True, False))
    assert folded.planned_makespan_s <= full.planned_makespan_s * 1.001
    assert folded.mean_freeze_ratio <= full.mean_freeze_ratio + 0.005


@pytest.mark.parametrize(("num_stages", "num_micro_batches", "seed"), [(4, 32, None), (8, 64, 2)])
def test_folded_progress(num_stages: int, num_micro_batches: int, seed: int | None) -> None:
    dag = PipelineDag(one_f_one_b(num_stages, num_micro_batches))
    progress = equal_stages(num_stages, num_micro_batches, 6.0)
    full, folded = (
        solve(dag, stage_costs(dag, seed), Limits(0.8), objective="progress", progress=progress, full=full, time_limit_s=60)
        for full in (True, False)
    )
    assert folded.expected_loss_per_second_gain == pytest.approx(full.expected_loss_per_second_gain, rel=1e-3)


@pytest.mark.parametrize("full", [True, False])
def test_every_instruction_has_a_place_and_every_rule_is_kept(full: bool) -> None:
    dag = PipelineDag(one_f_one_b(3, 24))
    fold = Fold(dag, full=full)
    for instruction in dag.order:
        track, position = fold.place(instruction)
        assert fold.instruction(track, position) == instruction
        weights = fold.weights(track, position)
        assert sum(weight for _, weight in weights) == pytest.approx(1)
        assert sum(weight * knot for knot, weight in weights) == pytest.approx(position)
    # Any lines through the knots that keep the rules where they are asked for keep every edge of the batch.
    draw = random.Random(0)
    for _ in range(3):
        ratios = {key: draw.random() for key in _knots(fold)}
        starts = _earliest(fold, ratios)
        for before, edges in dag.graph.adj.items():
            for after in edges:
                a, b = fold.place(before), fold.place(after)
                end = _value(fold, starts, *a) + 2.0 - _value(fold, ratios, *a) * (before.kind == "B")
                assert end <= _value(fold, starts, *b) + 1e-9


def _knots(fold: Fold):
    return [(track, knot) for track, knots in fold.knots.items() for knot in knots]


def _value(fold: Fold, values, track, position) -> float:
    return sum(weight * values[track, knot] for knot, weight in fold.weights(track, position))


def _earliest(fold: Fold, ratios):
    """Starts at the knots that satisfy the rules at their positions, by raising them until they do."""
    starts = dict.fromkeys(_knots(fold), 0.0)
    for _ in range(10_000):
        changed = False
        for rule in fold.rules:
            for position in rule.positions:
                end = _value(fold, starts, rule.before, position) + 2.0
                end -= _value(fold, ratios, rule.before, position) * (rule.before[1] == "B")
                late = end - _value(fold, starts, rule.after, position + rule.shift)
                if late > 1e-10:
                    changed = True
                    for knot, _weight in fold.weights(rule.after, position + rule.shift):
                        starts[rule.after, knot] += late
        if not changed:
            return starts
    raise AssertionError("no starts satisfy the rules")


def test_knots_are_dense_at_the_ends_and_few_in_the_middle() -> None:
    assert spaced(1) == [0] and spaced(5) == [0, 1, 2, 3, 4]
    knots = spaced(512)
    assert knots[:8] == list(range(8)) and knots[-8:] == list(range(504, 512)) and len(knots) < 40
    assert [511 - knot for knot in reversed(knots)] == knots


def test_a_large_batch_is_folded_by_itself() -> None:
    """Size alone decides: 16 x 128 has 4096 instructions."""
    dag = PipelineDag(one_f_one_b(16, 128))
    plan = solve(dag, stage_costs(dag, None), Limits(0.5, 0.02))
    # The bottleneck bound: every stage works 2.5 s a micro-batch, and the first forwards and last backwards take their time.
    assert 128 * 2.5 < plan.planned_makespan_s < 1.02 * 128 * 2.5 + 15 * 2.5
    assert max(plan.stage_freeze_ratio) <= 0.5 + 1e-9
