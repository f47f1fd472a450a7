"""Known pipeline schedules, for any number of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe (Huang et al., 2019) with one stage a rank: every forward, then every backward from the last to the first.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_stages, num_micro_batches)
    forward, backward = range(num_micro_batches), range(num_micro_batches)[::-1]
    return Schedule(tuple(tuple(_run(s, "F", forward) + _run(s, "B", backward)) for s in range(num_stages)))


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with one stage a rank, in the order of ``deepspeed.runtime.pipe.schedule.TrainSchedule``.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_stages, num_micro_batches)
    every = range(num_micro_batches)
    return Schedule(
        tuple(
            tuple(_alternate(_run(s, "F", every), _run(s, "B", every), num_stages - 1 - s)) for s in range(num_stages)
        )
    )


def _run(stage_id: int, kind: str, micro_batch_ids: Sequence[int]) -> list[Instruction]:
    return [Instruction(stage_id, micro_batch_id, kind) for micro_batch_id in micro_batch_ids]


def _alternate(forwards: list[Instruction], backwards: list[Instruction], num_ahead: int) -> list[Instruction]:
    """``num_ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    order = forwards[:num_ahead]
    for index, backward in enumerate(backwards, start=num_ahead):
        order += [*forwards[index : index + 1], backward]
    return order


def _check_counts(num_ranks: int, num_micro_batches: int) -> None:
    if num_ranks < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"a pipeline of {num_ranks} ranks and {num_micro_batches} micro-batches: both must be at least 1."
        )
