"""The order in which each rank runs its instructions: built, read from DeepSpeed, or given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction


@dataclass(frozen=True)
class Transfer:
    """What ``sender`` made, on its way to the neighbouring rank that needs it."""

    sender: Instruction

    def __str__(self) -> str:
        return f"transfer of {self.sender}"


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

    Attributes:
        ranks: per rank, its instructions in order.
        blocking: ``ranks`` with the transfers in their places, where a rank does nothing else until the other rank has come
            to the same transfer and it is done, as in DeepSpeed's engine; empty where a transfer keeps no rank.

    Raises:
        ScheduleError: the order is incomplete or contradictory.
    """

    ranks: tuple[tuple[Instruction, ...], ...]
    blocking: tuple[tuple[Instruction | Transfer, ...], ...] = ()

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


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with one stage a rank, in the order of ``deepspeed.runtime.pipe.schedule.TrainSchedule``.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_stages, num_micro_batches)
    ranks = []
    for stage_id in range(num_stages):
        num_warmup = min(num_stages - stage_id, num_micro_batches)
        order = [Instruction(stage_id, m, "F") for m in range(num_warmup)]
        for micro_batch_id in range(num_micro_batches):
            order.append(Instruction(stage_id, micro_batch_id, "B"))
            if micro_batch_id + num_warmup < num_micro_batches:
                order.append(Instruction(stage_id, micro_batch_id + num_warmup, "F"))
        ranks.append(tuple(order))
    return Schedule(tuple(ranks))


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe (Huang et al., 2019) with one stage a rank: every forward, then every backward from the last to the first.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_stages, num_micro_batches)
    return Schedule(
        tuple(
            tuple(Instruction(stage_id, m, "F") for m in range(num_micro_batches))
            + tuple(Instruction(stage_id, m, "B") for m in reversed(range(num_micro_batches)))
            for stage_id in range(num_stages)
        )
    )


def from_pipe_schedules(pipe_schedules: Sequence[Iterable[Iterable[Any]]]) -> Schedule:
    """The order that DeepSpeed will really run, one stage a rank.

    Args:
        pipe_schedules: a ``deepspeed.runtime.pipe.schedule.PipeSchedule`` per stage, stage 0 first. A command counts as
            a forward or backward when its class or a base class is named ``...ForwardPass`` or ``...BackwardPass``, as a
            transfer when named ``...SendActivation``, ``...RecvActivation``, ``...SendGrad`` or ``...RecvGrad``; the i-th
            of each kind of a stage is micro-batch i. Every other command is skipped.

    Raises:
        ScheduleError: a stage runs no forward, or not as many backwards as forwards.
    """
    ranks = []
    for stage_id, pipe_schedule in enumerate(pipe_schedules):
        order: list[Instruction | Transfer] = []
        counts = dict.fromkeys(_COMMANDS, 0)
        for command in (command for commands in pipe_schedule for command in commands):
            name = next((n for base in type(command).__mro__ for n in _COMMANDS if base.__name__.endswith(n)), None)
            if name is None:
                continue
            kind, stages_away = _COMMANDS[name]
            instruction = Instruction(stage_id + (stages_away or 0), counts[name], kind)
            order.append(instruction if stages_away is None else Transfer(instruction))
            counts[name] += 1
        if counts["ForwardPass"] == 0 or counts["ForwardPass"] != counts["BackwardPass"]:
            raise ScheduleError(
                f"the pipe schedule of stage {stage_id} runs {counts['ForwardPass']} forwards and {counts['BackwardPass']} "
                "backwards: a training schedule runs as many of each, at least 1; pass one training PipeSchedule per stage."
            )
        ranks.append(tuple(order))
    return Schedule(tuple(tuple(i for i in rank if isinstance(i, Instruction)) for rank in ranks), tuple(ranks))


_COMMANDS = {
    "ForwardPass": ("F", None), "BackwardPass": ("B", None),
    "SendActivation": ("F", 0), "RecvActivation": ("F", -1), "SendGrad": ("B", 0), "RecvGrad": ("B", 1),
}  # fmt: skip
"""Command to the kind of its instruction; of a transfer, how many stages away that instruction is."""


def _check_counts(num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"a pipeline of {num_stages} stages and {num_micro_batches} micro-batches: both must be at least 1."
        )
