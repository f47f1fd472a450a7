from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.builders import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zbv
from rlfreeze_ds.planning.dag import PipelineDag, Timeline
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules
from rlfreeze_ds.planning.schedule_csv import read_schedule_csv

GOLDENS = Path(__file__).parents[1] / "assets" / "schedules"
SIZES = [(p, m) for p in range(1, 6) for m in range(1, 13)] + [(8, 16)]
INTERLEAVED_SIZES = [(p, m, v) for p, m in SIZES for v in (2, 3) if m % max(1, m // p) == 0]


def text(built: Schedule) -> list[str]:
    return [" ".join(map(str, rank)) for rank in built.ranks]


def torch_text(torch_schedule) -> list[str]:
    order = torch_schedule.pipeline_order
    return [" ".join(str(action) for action in order[rank] if action is not None) for rank in sorted(order)]


def simulate(built: Schedule, **seconds: float) -> Timeline:
    return PipelineDag(built).simulate({i: seconds[i.kind] for i in built.instructions})


def bubble(built: Schedule, **seconds: float) -> float:
    """Idle seconds of a rank; the same for all, as each has as much to do."""
    busy = {sum(seconds[i.kind] for i in rank) for rank in built.ranks}
    assert len(busy) == 1
    return simulate(built, **seconds).makespan - busy.pop()


def most_held(built: Schedule) -> list[int]:
    """Per rank, the most (stage, micro-batch) pairs at any time that have run F but not yet B or W."""
    most = []
    for rank in built.ranks:
        held = [0]
        for instruction in rank:
            held.append(held[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[instruction.kind])
        most.append(max(held))
    return most


# -- orders ---------------------------------------------------------------------------------------------------------------


def test_one_f_one_b_is_the_known_order() -> None:
    assert text(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_one_f_one_b_is_deepspeeds_order() -> None:
    deepspeed_schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for num_stages, num_micro_batches in SIZES:
        real = [deepspeed_schedule.TrainSchedule(num_micro_batches, num_stages, s) for s in range(num_stages)]
        assert from_pipe_schedules(real).ranks == one_f_one_b(num_stages, num_micro_batches).ranks


def test_gpipe_is_all_forwards_then_backwards_in_reverse() -> None:
    assert text(gpipe(2, 2)) == ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]


@pytest.mark.parametrize(
    ("golden", "build"),
    [
        ("interleaved_1f1b_p4_m8_v2.csv", partial(interleaved_1f1b, 4, 8, 2)),
        ("interleaved_1f1b_p2_m6_v3.csv", partial(interleaved_1f1b, 2, 6, 3)),
        ("zb_h1_p4_m8.csv", partial(zb_h1, 4, 8)),
        ("zbv_p4_m8.csv", partial(zbv, 4, 8)),
        ("zbv_p3_m2.csv", partial(zbv, 3, 2)),
    ],
)
def test_golden(golden: str, build: Callable[[], Schedule]) -> None:
    assert text(build()) == text(read_schedule_csv(GOLDENS / golden))


def test_interleaved_is_torchs_order(torch_schedule) -> None:
    for p, m, v in INTERLEAVED_SIZES:
        assert text(interleaved_1f1b(p, m, v)) == torch_text(torch_schedule("ScheduleInterleaved1F1B", p, m, v)), (p, m, v)


def test_zb_h1_is_torchs_order_of_one_stage_a_rank(torch_schedule) -> None:
    for p, m, _ in INTERLEAVED_SIZES:  # torch takes no other number of micro-batches
        assert text(zb_h1(p, m)) == torch_text(torch_schedule("ScheduleInterleavedZeroBubble", p, m, 1)), (p, m)


def test_zbv_is_torchs_order(torch_schedule) -> None:
    for p, m in SIZES:
        assert text(zbv(p, m)) == torch_text(torch_schedule("ScheduleZBVZeroBubble", p, m, 2)), (p, m)


# -- whole, and possible to run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "kinds", "stages_of_rank"),
    [
        (gpipe, "FB", lambda rank, p: {rank}),
        (one_f_one_b, "FB", lambda rank, p: {rank}),
        (partial(interleaved_1f1b, num_chunks=2), "FB", lambda rank, p: {rank, p + rank}),
        (partial(interleaved_1f1b, num_chunks=3), "FB", lambda rank, p: {rank, p + rank, 2 * p + rank}),
        (zb_h1, "FIW", lambda rank, p: {rank}),
        (zbv, "FIW", lambda rank, p: {rank, 2 * p - 1 - rank}),
    ],
)
def test_each_instruction_is_there_once_on_its_rank_and_none_waits_for_ever(build, kinds: str, stages_of_rank) -> None:
    for p, m in SIZES:
        if isinstance(build, partial) and (p, m, 2) not in INTERLEAVED_SIZES:
            continue
        built = build(p, m)
        for rank in range(p):
            expected = Counter(f"{s}{k}{i}" for s in stages_of_rank(rank, p) for k in kinds for i in range(m))
            assert Counter(map(str, built.ranks[rank])) == expected
        PipelineDag(built)


# -- closed forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [one_f_one_b, gpipe])
def test_bubble_of_one_stage_a_rank(build: Callable[[int, int], Schedule]) -> None:
    for p, m in SIZES:
        assert simulate(build(p, m), F=1.25, B=2.5).makespan == pytest.approx((m + p - 1) * 3.75)


@pytest.mark.parametrize("seconds", [{"F": 1.0, "B": 1.0}, {"F": 1.0, "B": 2.0}, {"F": 3.0, "B": 1.0}])
def test_bubble_of_interleaved(seconds: dict[str, float]) -> None:
    """v stages a rank fill and drain v times as fast: (P - 1)(tF + tB), of stages 1/v as large.

    Below P micro-batches a rank has run out of work before its next stage gets any, and the V P stages are one row.
    """
    for p, m, v in INTERLEAVED_SIZES:
        makespan = (v * m + p - 1) if m >= p else (v * p + m - 1)
        assert simulate(interleaved_1f1b(p, m, v), **seconds).makespan == pytest.approx(makespan * sum(seconds.values()))


@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (2, 2, 1), (2, 3, 2), (3, 2, 1), (2, 3, 0.5)])
def test_bubble_of_zb_h1_is_the_papers(F: float, I: float, W: float) -> None:  # noqa: E741
    for p, m in SIZES:
        if m >= p:
            assert bubble(zb_h1(p, m), F=F, I=I, W=W) == pytest.approx((p - 1) * (F + I - W)), (p, m)


@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 2), (1, 2, 1.5), (2, 1, 3)])
def test_bubble_of_zb_h1_with_a_long_w_is_the_longer_of_f_and_i(F: float, I: float, W: float) -> None:  # noqa: E741
    for p, m in SIZES:
        if m >= p:
            assert bubble(zb_h1(p, m), F=F, I=I, W=W) == pytest.approx((p - 1) * max(F, I)), (p, m)


def test_zbv_never_waits_when_all_take_the_same_time() -> None:
    """Rank r gets its first input after r stages; from there on it has 6 M instructions and no gap."""
    for p, m in SIZES:
        if m >= 2 * p - 1:
            timeline = simulate(zbv(p, m), F=0.5, I=0.5, W=0.5)
            for rank, instructions in enumerate(timeline.dag.schedule.ranks):
                assert timeline.start[instructions[0]] == 0.5 * rank
                assert timeline.end[instructions[-1]] == 0.5 * (rank + 6 * m)


# -- memory -----------------------------------------------------------------------------------------------------------------


def test_gpipe_holds_every_micro_batch() -> None:
    assert all(most_held(gpipe(p, m)) == [m] * p for p, m in SIZES)


def test_one_f_one_b_holds_as_many_as_there_are_stages_to_go() -> None:
    assert all(most_held(one_f_one_b(p, m)) == [min(p - s, m) for s in range(p)] for p, m in SIZES)


def test_interleaved_holds_a_share_more_than_one_f_one_b() -> None:
    """Rank 0: P + (P - 1)/v whole stages (Narayanan et al.; Korthikanti et al., 2022, 1 + (P - 1)/(P v) times 1F1B's P)."""
    for p, m, v in INTERLEAVED_SIZES:
        if m % p == 0:
            assert most_held(interleaved_1f1b(p, m, v)) == [min(v * p + p - 1 - 2 * r, v * m) for r in range(p)], (p, m, v)


def test_zb_h1_holds_no_more_than_one_f_one_b() -> None:
    for p, m in SIZES:
        assert most_held(zb_h1(p, m)) == [max(most_held(one_f_one_b(p, m)))] * p


def test_zbv_holds_as_much_as_one_f_one_b() -> None:
    """2 P of its half stages are 1F1B's P whole ones; fewer for a batch too small to fill the V."""
    for p, m in SIZES:
        most = most_held(zbv(p, m))
        assert most == [2 * p] * p if m >= 2 * p - 1 else max(most) <= min(2 * p, 2 * m), (p, m)


# -- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, partial(interleaved_1f1b, num_chunks=2), zb_h1, zbv])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(0, 4), (4, 0), (-1, 4), (4, -2)])
def test_counts_below_one_are_refused(build, num_ranks: int, num_micro_batches: int) -> None:
    with pytest.raises(ScheduleError, match=f"{num_ranks} ranks and {num_micro_batches} micro.*both must be at least 1"):
        build(num_ranks, num_micro_batches)


@pytest.mark.parametrize("num_chunks", [-1, 0, 1])
def test_interleaving_needs_two_chunks(num_chunks: int) -> None:
    with pytest.raises(ScheduleError, match=f"{num_chunks} chunks a rank: must be at least 2; .* use one_f_one_b"):
        interleaved_1f1b(2, 4, num_chunks)


def test_micro_batches_that_make_no_equal_groups_are_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(ScheduleError) as caught:
        interleaved_1f1b(4, 9, 2)
    assert str(caught.value) == (
        "interleaved 1F1B of 9 micro-batches on 4 ranks: they must split into 9 // 4 = 2 equal groups, as every multiple "
        "of 4 does; the nearest that do are 8 and 10, use one of them."
    )


def test_interleaving_takes_and_refuses_the_micro_batches_that_torch_does(torch_schedule) -> None:
    for p, m in SIZES:
        builds = (partial(interleaved_1f1b, p, m, 2), partial(torch_schedule, "ScheduleInterleaved1F1B", p, m, 2))
        refusals = []
        for build in builds:
            try:
                build()
            except ValueError as error:
                refusals.append(type(error))
        assert len(refusals) in (0, 2), (p, m)
