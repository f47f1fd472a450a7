import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules, gpipe, one_f_one_b


def schedule(*ranks: str) -> Schedule:
    return Schedule(tuple(tuple(Instruction.parse(text) for text in rank.split()) for rank in ranks))


def text(built: Schedule) -> list[str]:
    return [" ".join(map(str, rank)) for rank in built.ranks]


def test_one_f_one_b_is_the_known_order() -> None:
    assert text(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_one_f_one_b_is_deepspeeds_order() -> None:
    deepspeed_schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for num_stages in range(1, 7):
        for num_micro_batches in range(1, 10):
            real = [
                deepspeed_schedule.TrainSchedule(num_micro_batches, num_stages, stage_id)
                for stage_id in range(num_stages)
            ]
            assert from_pipe_schedules(real).ranks == one_f_one_b(num_stages, num_micro_batches).ranks


def test_gpipe_is_all_forwards_then_backwards_in_reverse() -> None:
    assert text(gpipe(2, 2)) == ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]


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


def test_builders_refuse_no_stages() -> None:
    with pytest.raises(ScheduleError, match="both must be at least 1"):
        one_f_one_b(0, 4)
    with pytest.raises(ScheduleError, match="both must be at least 1"):
        gpipe(4, 0)


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
