import random

import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.builders import gpipe, one_f_one_b
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule, Transfer, from_pipe_schedules


def schedule(*ranks: str) -> Schedule:
    return Schedule(tuple(tuple(Instruction.parse(text) for text in rank.split()) for rank in ranks))


def by_kind(built: Schedule, **seconds: float) -> dict[Instruction, float]:
    return {i: seconds[i.kind] for i in built.instructions}


@pytest.mark.parametrize("build", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (1, 5), (2, 2), (3, 2), (4, 8), (6, 9)])
def test_uniform_stages_have_the_closed_form(build, num_stages: int, num_micro_batches: int) -> None:
    built = build(num_stages, num_micro_batches)
    timeline = PipelineDag(built).simulate(by_kind(built, F=1.25, B=2.5))
    assert timeline.makespan == pytest.approx((num_micro_batches + num_stages - 1) * 3.75)
    assert timeline.bubble_ratio == pytest.approx((num_stages - 1) / (num_micro_batches + num_stages - 1))


def test_edges_and_which_of_them_cross_ranks() -> None:
    graph = PipelineDag(schedule("0F0 2F0 2B0 0B0", "1F0 1I0 1W0")).graph
    crossing = {f"{a}-{b}" for a, b, crosses in graph.edges(data="num_transfers") if crosses}
    staying = {f"{a}-{b}" for a, b, crosses in graph.edges(data="num_transfers") if not crosses}
    assert crossing == {"0F0-1F0", "1F0-2F0", "2B0-1I0", "1I0-0B0"}
    assert staying == {"0F0-2F0", "2F0-2B0", "2B0-0B0", "1F0-1I0", "1I0-1W0", "0F0-0B0"}


def test_the_number_of_edges_grows_linearly() -> None:
    built = one_f_one_b(8, 64)
    assert PipelineDag(built).graph.number_of_edges() <= 3 * len(built.instructions)


def test_the_stage_before_waits_for_i_but_not_for_w() -> None:
    built = schedule("0F0 0B0", "1F0 1I0 1W0")
    timeline = PipelineDag(built).simulate(by_kind(built, F=1, B=3, I=2, W=10))
    assert timeline.start[Instruction.parse("0B0")] == 4
    assert timeline.makespan == 14


def test_transfers_count_between_ranks_only() -> None:
    split, together = schedule("0F0 0B0", "1F0 1B0"), schedule("0F0 1F0 1B0 0B0")
    assert PipelineDag(split).simulate(by_kind(split, F=1, B=2), transfer_s=0.5).makespan == 7
    assert PipelineDag(together).simulate(by_kind(together, F=1, B=2), transfer_s=0.5).makespan == 6


def test_start_and_end_of_a_batch_by_hand() -> None:
    built = one_f_one_b(2, 2)
    timeline = PipelineDag(built).simulate(by_kind(built, F=1, B=2), transfer_s=0.5)
    starts = {str(i): start for i, start in timeline.start.items()}
    assert starts == {"0F0": 0, "0F1": 1, "1F0": 1.5, "1B0": 2.5, "1F1": 4.5, "0B0": 5, "1B1": 5.5, "0B1": 8}
    assert all(timeline.end[i] - start == {"F": 1, "B": 2}[i.kind] for i, start in timeline.start.items())
    assert [str(i) for i in timeline.critical_path()] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    slack = {str(i): seconds for i, seconds in timeline.slack().items()}
    assert {text for text, seconds in slack.items() if seconds == 0} == {"0F0", "1F0", "1B0", "1F1", "1B1", "0B1"}
    assert (slack["0B0"], slack["0F1"]) == (1, 2)


def test_slack_is_what_an_instruction_can_grow_without_a_longer_batch() -> None:
    built = one_f_one_b(3, 4)
    dag = PipelineDag(built)
    seconds = {i: 1 + ((7 * i.stage_id + 3 * i.micro_batch_id + len(str(i))) % 5) / 4 for i in built.instructions}
    timeline = dag.simulate(seconds, transfer_s=0.25)
    for instruction, slack in timeline.slack().items():
        assert slack >= -1e-9
        grown = dag.simulate({**seconds, instruction: seconds[instruction] + slack}, transfer_s=0.25)
        assert grown.makespan == pytest.approx(timeline.makespan)
        grown = dag.simulate({**seconds, instruction: seconds[instruction] + slack + 0.5}, transfer_s=0.25)
        assert grown.makespan == pytest.approx(timeline.makespan + 0.5)


def test_the_critical_path_adds_up_to_the_makespan() -> None:
    built = gpipe(3, 3)
    seconds = {i: 1 + (i.stage_id * 5 + i.micro_batch_id * 3) % 4 for i in built.instructions}
    timeline = PipelineDag(built).simulate(seconds)
    assert sum(seconds[i] for i in timeline.critical_path()) == timeline.makespan


def test_a_cycle_is_named() -> None:
    with pytest.raises(ScheduleError, match="wait for each other: ") as caught:
        PipelineDag(schedule("0B0 0F0", "1F0 1B0"))
    ring = str(caught.value).split(": ")[1].split(".")[0].split(" -> ")
    assert ring[0] == ring[-1]
    assert set(ring) in ({"0F0", "0B0"}, {"0F0", "1F0", "1B0", "0B0"})


def test_empty_and_zero_batches_have_no_bubble() -> None:
    empty = PipelineDag(Schedule(())).simulate({})
    assert (empty.makespan, empty.bubble_ratio, empty.critical_path(), empty.slack()) == (0, 0, (), {})
    built = one_f_one_b(2, 2)
    assert PipelineDag(built).simulate(by_kind(built, F=0, B=0)).bubble_ratio == 0


def test_a_missing_duration_is_named() -> None:
    with pytest.raises(ScheduleError, match="0F0 has no duration"):
        PipelineDag(one_f_one_b(1, 1)).simulate({})


def rendezvous(blocking: tuple, seconds: dict[Instruction, float], transfer_s: float) -> float:
    """A batch played rank by rank: a rank at a transfer stands until the other one is there too, then both go on together."""
    at, clock = [0] * len(blocking), [0.0] * len(blocking)
    waiting: dict[Transfer, int] = {}
    ready = list(range(len(blocking)))
    while ready:
        rank = ready.pop()
        while at[rank] < len(blocking[rank]):
            node = blocking[rank][at[rank]]
            if isinstance(node, Instruction):
                clock[rank] += seconds[node]
            elif node in waiting:
                other = waiting.pop(node)
                clock[rank] = clock[other] = max(clock[rank], clock[other]) + transfer_s
                at[other] += 1
                ready.append(other)
            else:
                waiting[node] = rank
                break
            at[rank] += 1
    assert not waiting
    return max(clock)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 1), (2, 5), (3, 4), (4, 8), (5, 3), (8, 12)])
def test_blocking_transfers_are_those_of_deepspeeds_engine(num_stages: int, num_micro_batches: int) -> None:
    deepspeed_schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    built = from_pipe_schedules(
        [deepspeed_schedule.TrainSchedule(num_micro_batches, num_stages, stage_id) for stage_id in range(num_stages)]
    )
    dag, free = PipelineDag(built), PipelineDag(one_f_one_b(num_stages, num_micro_batches))
    rng = random.Random(num_stages)
    for _ in range(20):
        seconds = {i: rng.choice([0.0, 0.1, 1.0]) + rng.random() for i in built.instructions}
        for transfer_s in (0.0, 0.01, 0.5):
            makespan = dag.simulate(seconds, transfer_s).makespan
            assert makespan == pytest.approx(rendezvous(built.blocking, seconds, transfer_s))
            assert makespan >= free.simulate(seconds, transfer_s).makespan - 1e-9


def test_ranks_that_block_each_other_are_named() -> None:
    (first, second), away = one_f_one_b(2, 1).ranks, Transfer(Instruction(0, 0, "F"))
    back = Transfer(Instruction(1, 0, "B"))
    blocking = ((first[0], back, away, first[1]), (away, second[0], second[1], back))
    with pytest.raises(ScheduleError, match="transfer of 0F0"):
        PipelineDag(Schedule((first, second), blocking))


def test_tails_follow_the_last_instruction_of_each_rank() -> None:
    """Two stages, one micro-batch, 1 s forwards and 2 s backwards: 0F 1F 1B 0B ends at 6 s, rank 1 at 4 s."""
    dag = PipelineDag(one_f_one_b(2, 1))
    seconds = {i: 1.0 if i.is_forward else 2.0 for i in dag.order}
    assert dag.simulate(seconds, tail_s={0: 0.5, 1: 1.0}).makespan == 6.5
    timeline = dag.simulate(seconds, tail_s={1: 3.0})
    assert timeline.makespan == 7.0 and [str(i) for i in timeline.critical_path()] == ["0F0", "1F0", "1B0"]
    assert timeline.slack()[Instruction.parse("0B0")] == pytest.approx(1.0)
    assert timeline.slack()[Instruction.parse("1B0")] == pytest.approx(0.0)
    assert timeline.bubble_ratio == pytest.approx(1 - (6 + 3) / 14)
