import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.builders import gpipe, one_f_one_b
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules


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
            assert from_pipe_schedules(real) == one_f_one_b(num_stages, num_micro_batches)


def test_gpipe_is_all_forwards_then_backwards_in_reverse() -> None:
    assert text(gpipe(2, 2)) == ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]


def test_builders_refuse_no_stages() -> None:
    with pytest.raises(ScheduleError, match="both must be at least 1"):
        one_f_one_b(0, 4)
    with pytest.raises(ScheduleError, match="both must be at least 1"):
        gpipe(4, 0)
