import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules


def schedule(*ranks: str) -> Schedule:
    return Schedule(tuple(tuple(Instruction.parse(text) for text in rank.split()) for rank in ranks))


def text(built: Schedule) -> list[str]:
    return [" ".join(map(str, rank)) for rank in built.ranks]


def test_properties() -> None:
    built = schedule("0F0 2F0 2B0 0B0", "1F0 1I0 1W0")
    assert (built.num_ranks, built.num_stages, built.num_micro_batches) == (2, 3, 1)
    assert [built.rank_of(stage_id) for stage_id in range(3)] == [0, 1, 0]
    assert [str(i) for i in built.instructions] == ["0F0", "2F0", "2B0", "0B0", "1F0", "1I0", "1W0"]
    with pytest.raises(ScheduleError, match="stages 0 to 2"):
        built.rank_of(3)


def test_an_empty_schedule_is_a_schedule() -> None:
    assert (Schedule(()).num_stages, Schedule(()).num_micro_batches) == (0, 0)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0F0 0F0 0B0",), "0F0 is there twice"),
        (("0F0",), "its backward is missing"),
        (("0B0",), "its forward F is missing"),
        (("0F0 0B0 0I0 0W0",), "exclude each other"),
        (("0F0 0I0",), "I without W"),
        (("0F0 0W0",), "W without I"),
        (("0F0", "0B0"), "stage 0 is on rank 0 and on rank 1"),
        (("0F0 0B0", "2F0 2B0"), "stage 1 has no instruction"),
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "stage 1 has no instruction for micro-batch 1"),
        (("0F1 0B1",), "no instruction for micro-batch 0"),
    ],
)
def test_a_broken_schedule_is_refused(ranks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule(*ranks)


class ForwardPass: ...


class BackwardPass: ...


class MaskedForwardPass: ...


class Renamed(BackwardPass): ...


class SendGrad: ...


def test_commands_count_by_class_name_and_base_class_name() -> None:
    steps = [[SendGrad(), ForwardPass()], [], [MaskedForwardPass()], [Renamed(), SendGrad()], [BackwardPass()]]
    assert text(from_pipe_schedules([steps])) == ["0F0 0F1 0B0 0B1"]


def test_an_inference_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 0 runs 1 forwards and 0 backwards"):
        from_pipe_schedules([[[ForwardPass()]]])
