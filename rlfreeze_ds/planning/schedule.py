"""The order in which each rank runs its instructions: what makes one valid, and the one that DeepSpeed will run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction


@dataclass(frozen=True)
class Problem:
    """What makes a schedule invalid, and the instructions to look at (for a reader that knows their lines)."""

    message: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Schedule:
    """Every instruction of one batch, rank by rank, in execution order.

    A rank may hold several stages, a stage is on one rank. A (stage, micro-batch) has one F and either one B, or one I
    and one W. Stages and micro-batches count from 0 without gaps.

    Raises:
        ScheduleError: the order is incomplete or contradictory.
    """

    ranks: tuple[tuple[Instruction, ...], ...]

    def __post_init__(self) -> None:
        problem = find_problem(self.ranks)
        if problem is not None:
            raise ScheduleError(problem.message)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, rank after rank."""
        return tuple(instruction for rank in self.ranks for instruction in rank)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((i.stage_id for i in self.instructions), default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        return 1 + max((i.micro_batch_id for i in self.instructions), default=-1)

    @cached_property
    def _rank_of_stage(self) -> dict[int, int]:
        return {i.stage_id: rank for rank, instructions in enumerate(self.ranks) for i in instructions}

    def rank_of(self, stage_id: int) -> int:
        """The rank that runs ``stage_id``.

        Raises:
            ScheduleError: there is no such stage.
        """
        if stage_id not in self._rank_of_stage:
            raise ScheduleError(f"stage {stage_id}: the schedule has stages 0 to {self.num_stages - 1}.")
        return self._rank_of_stage[stage_id]


def find_problem(ranks: Sequence[Sequence[Instruction]]) -> Problem | None:
    """The first thing that keeps ``ranks`` from being a schedule, or None. A cycle is looked for in ``dag``."""
    rank_of_stage: dict[int, tuple[int, Instruction]] = {}
    kinds: dict[tuple[int, int], set[str]] = {}
    for rank, instructions in enumerate(ranks):
        for instruction in instructions:
            first_rank, first = rank_of_stage.setdefault(instruction.stage_id, (rank, instruction))
            if first_rank != rank:
                return Problem(
                    f"stage {instruction.stage_id} is on rank {first_rank} and on rank {rank}: "
                    "a stage is on one rank, move all its instructions there.",
                    (first, instruction),
                )
            present = kinds.setdefault((instruction.stage_id, instruction.micro_batch_id), set())
            if instruction.kind in present:
                return Problem(f"{instruction} is there twice: remove one of the two.", (instruction,))
            present.add(instruction.kind)
    return _find_gap(kinds) or _find_kind_problem(kinds)


def _find_gap(kinds: dict[tuple[int, int], set[str]]) -> Problem | None:
    """A stage or a micro-batch of a stage that is not there at all."""
    stages = {stage_id for stage_id, _ in kinds}
    micro_batches = {micro_batch_id for _, micro_batch_id in kinds}
    for expected, stage_id in enumerate(sorted(stages)):
        if stage_id != expected:
            first = min(m for s, m in kinds if s == stage_id)
            return Problem(
                f"stage {expected} has no instruction, but stage {stage_id} has: "
                "stages count from 0 without gaps, add the missing stage or renumber.",
                (Instruction(stage_id, first, min(kinds[stage_id, first])),),
            )
    for stage_id in sorted(stages):
        for expected, micro_batch_id in enumerate(sorted(micro_batches)):
            if (stage_id, expected) in kinds:
                continue
            witness = min(pair for pair in kinds if pair[1] == micro_batch_id)
            return Problem(
                f"stage {stage_id} has no instruction for micro-batch {expected}: every stage runs micro-batches 0 to "
                f"{max(micro_batches)} (stage {witness[0]} has micro-batch {micro_batch_id}), add the missing ones.",
                (Instruction(*witness, min(kinds[witness])),),
            )
    return None


def _find_kind_problem(kinds: dict[tuple[int, int], set[str]]) -> Problem | None:
    """A (stage, micro-batch) whose kinds are neither F + B nor F + I + W."""
    for (stage_id, micro_batch_id), present in sorted(kinds.items()):
        if present in ({"F", "B"}, {"F", "I", "W"}):
            continue
        found = ", ".join(str(Instruction(stage_id, micro_batch_id, kind)) for kind in sorted(present))
        if "F" not in present:
            what = "its forward F is missing"
        elif present == {"F"}:
            what = "its backward is missing"
        elif "B" in present:
            what = "a full backward B and a split one (I, W) exclude each other"
        else:
            what = "I without W" if "I" in present else "W without I"
        return Problem(
            f"stage {stage_id}, micro-batch {micro_batch_id} has {found}: {what}. "
            "Give each (stage, micro-batch) one F and either one B, or one I and one W.",
            tuple(Instruction(stage_id, micro_batch_id, kind) for kind in sorted(present)),
        )
    return None


def from_pipe_schedules(pipe_schedules: Sequence[Iterable[Iterable[Any]]]) -> Schedule:
    """The order that DeepSpeed will really run.

    ``TrainSchedule`` has one stage a rank. The commands of ``DualPipeVSchedule`` (from DeepSpeed 0.19 on) carry a
    ``phase``, and a rank has two stages, laid out as a V: rank r runs stage r in phase 0 and stage 2 * num_ranks - 1 - r
    in phase 1. A forward and a backward that DualPipeV pairs for their communication are two commands, one after the
    other, and its backwards are whole (B).

    Args:
        pipe_schedules: a ``deepspeed.runtime.pipe.schedule.PipeSchedule`` per rank, rank 0 first. A command counts as
            a forward or backward when its class or a base class is named ``...ForwardPass`` or ``...BackwardPass``; the
            i-th of a stage is micro-batch i. Every other command is skipped.

    Raises:
        ScheduleError: a stage runs no forward, or not as many backwards as forwards; a phase is neither 0 nor 1.
    """
    ranks = []
    for rank, pipe_schedule in enumerate(pipe_schedules):
        stage_of_phase = {0: rank, 1: 2 * len(pipe_schedules) - 1 - rank}
        order: list[Instruction] = []
        counts: dict[int, dict[str, int]] = {rank: {"F": 0, "B": 0}}
        for commands in pipe_schedule:
            for command in commands:
                kind = _kind_of(command)
                if kind is None:
                    continue
                phase = getattr(command, "phase", 0)
                if phase not in stage_of_phase:
                    raise ScheduleError(
                        f"the pipe schedule of rank {rank} has {command!r}: its phase must be 0 or 1, the two stages of "
                        "a rank under DualPipeV; pass DeepSpeed's TrainSchedule or DualPipeVSchedule."
                    )
                stage_counts = counts.setdefault(stage_of_phase[phase], {"F": 0, "B": 0})
                order.append(Instruction(stage_of_phase[phase], stage_counts[kind], kind))
                stage_counts[kind] += 1
        for stage_id, stage_counts in counts.items():
            if stage_counts["F"] == 0 or stage_counts["F"] != stage_counts["B"]:
                raise ScheduleError(
                    f"the pipe schedule of rank {rank}: stage {stage_id} runs {stage_counts['F']} forwards and "
                    f"{stage_counts['B']} backwards; a training schedule runs as many of each, at least 1. "
                    "Pass one training PipeSchedule per rank."
                )
        ranks.append(tuple(order))
    return Schedule(tuple(ranks))


def from_kinds(orders: Sequence[str]) -> Schedule:
    """One stage a rank, each stage's execution order spelt in kinds: in "FFBFBB" the i-th F and the i-th B are micro-batch i.

    Raises:
        ScheduleError: an unknown kind, or not the same micro-batches everywhere.
    """
    ranks = []
    for stage_id, order in enumerate(orders):
        counts: Counter[str] = Counter()
        rank = []
        for kind in order:
            rank.append(Instruction(stage_id, counts[kind], kind))
            counts[kind] += 1
        ranks.append(tuple(rank))
    return Schedule(tuple(ranks))


def _kind_of(command: Any) -> str | None:
    names = [base.__name__ for base in type(command).__mro__]
    if any(name.endswith("ForwardPass") for name in names):
        return "F"
    return "B" if any(name.endswith("BackwardPass") for name in names) else None
