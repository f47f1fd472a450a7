import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules

DUALPIPEV_SIZES = [(p, m) for p in range(1, 6) for m in range(2 * p, 2 * p + 5)] + [(8, 16), (8, 33)]


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


class Command:
    def __init__(self, **kwargs: object) -> None:
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in vars(self).items())})"


class ForwardPass(Command): ...


class BackwardPass(Command): ...


class MaskedForwardPass(Command): ...


class Renamed(BackwardPass): ...


class SendGrad(Command): ...


def test_commands_count_by_class_name_and_base_class_name() -> None:
    steps = [[SendGrad(), ForwardPass()], [], [MaskedForwardPass()], [Renamed(), SendGrad()], [BackwardPass()]]
    assert text(from_pipe_schedules([steps])) == ["0F0 0F1 0B0 0B1"]


def test_a_phase_is_a_stage_of_the_v() -> None:
    out, back = {"phase": 0}, {"phase": 1}
    first = [[ForwardPass(**out)], [ForwardPass(**back), SendGrad(**back), BackwardPass(**back)], [Renamed(**out)]]
    last = [[ForwardPass(**out), ForwardPass(**back)], [BackwardPass(**back), BackwardPass(**out)]]
    assert text(from_pipe_schedules([first, last])) == ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]


@pytest.mark.parametrize("phase", [2, -1, None])
def test_another_phase_is_refused(phase: int | None) -> None:
    with pytest.raises(ScheduleError, match=rf"rank 0 has ForwardPass\(phase={phase}\): its phase must be 0 or 1"):
        from_pipe_schedules([[[ForwardPass(phase=phase), BackwardPass(phase=phase)]]])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[ForwardPass()]], "rank 0: stage 0 runs 1 forwards and 0 backwards"),
        ([], "rank 0: stage 0 runs 0 forwards and 0 backwards"),
        ([[ForwardPass(phase=0), BackwardPass(phase=0), BackwardPass(phase=1)]], "stage 1 runs 0 forwards and 1 backwards"),
    ],
)
def test_what_does_not_train_is_refused(steps: list[list[Command]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_pipe_schedules([steps])


@pytest.fixture
def dualpipev():
    """DeepSpeed's own class; ``dualpipev(num_micro_batches, num_ranks, rank)``."""
    deepspeed_schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    if not hasattr(deepspeed_schedule, "DualPipeVSchedule"):
        pytest.skip("this DeepSpeed has no DualPipeV")
    return deepspeed_schedule.DualPipeVSchedule


def test_dualpipev_on_one_rank_by_hand(dualpipev) -> None:
    built = from_pipe_schedules([dualpipev(2, 1, 0)])
    assert text(built) == ["0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1"]


def test_dualpipev_has_the_micro_batches_of_deepspeeds_buffers(dualpipev) -> None:
    """A buffer is phase * micro_batches + micro_batch; we count instead, which also works for cyclic buffers."""
    for p, m in DUALPIPEV_SIZES:
        expected = []
        for rank in range(p):
            commands = [command for commands in dualpipev(m, p, rank) for command in commands]
            passes = [command for command in commands if command.name in ("ForwardPass", "BackwardPass")]
            stages = (rank, 2 * p - 1 - rank)
            expected.append(" ".join(f"{stages[c.phase]}{c.name[0]}{c.buffer_id - c.phase * m}" for c in passes))
        assert text(from_pipe_schedules([dualpipev(m, p, rank) for rank in range(p)])) == expected, (p, m)


def test_dualpipev_is_torchs_with_whole_backwards(dualpipev, torch_schedule) -> None:
    """torch pairs F with B in one action and defers some W's; without W and with I as B, the order is the same."""
    for p, m in DUALPIPEV_SIZES:
        order = torch_schedule("ScheduleDualPipeV", p, m, 2).pipeline_order
        expected = []
        for rank in range(p):
            actions = [part for action in order[rank] for part in (action.sub_actions or (action,))]
            expected.append(" ".join(str(action).replace("I", "B") for action in actions if "W" not in str(action)))
        built = from_pipe_schedules([dualpipev(m, p, rank) for rank in range(p)])
        assert text(built) == expected, (p, m)
        PipelineDag(built)  # no rank waits for ever


def test_a_dualpipev_that_only_evaluates_is_refused(dualpipev) -> None:
    with pytest.raises(ScheduleError, match="rank 0: stage 0 runs 4 forwards and 0 backwards"):
        from_pipe_schedules([dualpipev(4, 2, rank, forward_only=True) for rank in range(2)])
