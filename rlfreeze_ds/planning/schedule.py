"""The order in which each rank runs its instructions: what makes one valid, and the one that DeepSpeed will run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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


def from_pipe_schedules(pipe_schedules: Sequence[Iterable[Iterable[Any]]]) -> Schedule:
    """The order that DeepSpeed will really run.

    ``TrainSchedule`` has one stage a rank, and transfers that block. The commands of ``DualPipeVSchedule`` (from DeepSpeed
    0.19 on) carry a ``phase``, and a rank has two stages, laid out as a V: rank r runs stage r in phase 0 and stage
    2 * num_ranks - 1 - r in phase 1. A forward and a backward that DualPipeV pairs for their communication are two commands,
    one after the other, its backwards are whole (B), and its transfers are put together and keep no rank.

    Args:
        pipe_schedules: a ``deepspeed.runtime.pipe.schedule.PipeSchedule`` per rank, rank 0 first. The i-th command of a kind
            and stage is that of micro-batch i.

    Raises:
        ScheduleError: a stage runs no forward, or not as many backwards as forwards; a phase is neither 0 nor 1.
    """
    ranks = [[command for commands in schedule for command in commands] for schedule in pipe_schedules]
    if any(hasattr(command, "phase") for rank in ranks for command in rank):
        return Schedule(tuple(_dual_pipe_v(rank, len(ranks), commands) for rank, commands in enumerate(ranks)))
    return from_commands([" ".join(filter(None, map(command_name, commands))) for commands in ranks])


# A forward, a backward whole or in two, and the two ends of the transfers of what they make.
_NAMES = {
    "ForwardPass": "F", "BackwardInputPass": "I", "BackwardWeightPass": "W", "BackwardPass": "B",  # an I is also a BackwardPass
    "SendActivation": "SA", "RecvActivation": "RA", "SendGrad": "SG", "RecvGrad": "RG",
}  # fmt: skip
_TRANSFERS = {"SA": ("F", 0), "RA": ("F", -1), "SG": ("B", 0), "RG": ("B", 1)}
"""Of a transfer: what made it (B stands for an I as well), how many stages away."""


def command_name(command: Any) -> str | None:
    """The name in :func:`from_commands` of a DeepSpeed command; None for one that a plan need not know."""
    return _name_of(type(command))


@cache  # the engine asks for every command of every step
def _name_of(kind: type) -> str | None:
    bases = [base.__name__ for base in kind.__mro__]
    return next((name for suffix, name in _NAMES.items() for base in bases if base.endswith(suffix)), None)


def from_commands(orders: Sequence[str]) -> Schedule:
    """One stage a rank, each rank's execution order in words, such as "RA F SA RG B SG": the i-th of each kind is of
    micro-batch i. F, B, I and W are instructions; SA, RA, SG and RG send and receive an activation or a gradient, and block.

    Raises:
        ScheduleError: an unknown word, a stage without a forward, or not the same micro-batches everywhere.
    """
    ranks: list[tuple[Instruction | Transfer, ...]] = []
    words = [order.split() for order in orders]
    split = {stage_id for stage_id, names in enumerate(words) if "I" in names}
    for stage_id, names in enumerate(words):
        counts: Counter[str] = Counter()
        rank: list[Instruction | Transfer] = []
        for name in names:
            kind, stages_away = _TRANSFERS.get(name, (name, 0))
            if name in _TRANSFERS and kind == "B" and stage_id + stages_away in split:
                kind = "I"
            instruction = Instruction(stage_id + stages_away, counts[name], kind)
            rank.append(Transfer(instruction) if name in _TRANSFERS else instruction)
            counts[name] += 1
        _check_backwards(stage_id, stage_id, counts)
        ranks.append(tuple(rank))
    instructions = tuple(tuple(i for i in rank if isinstance(i, Instruction)) for rank in ranks)
    return Schedule(instructions, tuple(ranks))


def to_commands(schedule: Schedule) -> tuple[str, ...]:
    """The reverse of :func:`from_commands`, for a schedule of one stage a rank whose transfers have their places."""
    ends = {end: name for name, end in _TRANSFERS.items()}
    return tuple(
        " ".join(
            ends[node.sender.kind.replace("I", "B"), node.sender.stage_id - stage_id] if isinstance(node, Transfer) else node.kind
            for node in rank
        )
        for stage_id, rank in enumerate(schedule.blocking)
    )


def _dual_pipe_v(rank: int, num_ranks: int, commands: Sequence[Any]) -> tuple[Instruction, ...]:
    stage_of_phase = {0: rank, 1: 2 * num_ranks - 1 - rank}
    order = []
    counts: dict[int, Counter[str]] = {rank: Counter()}
    for command in commands:
        kind = command_name(command)
        if kind not in ("F", "B"):
            continue
        phase = getattr(command, "phase", 0)
        if phase not in stage_of_phase:
            raise ScheduleError(
                f"the pipe schedule of rank {rank} has {command!r}: its phase must be 0 or 1, the two stages of "
                "a rank under DualPipeV; pass DeepSpeed's TrainSchedule or DualPipeVSchedule."
            )
        stage_counts = counts.setdefault(stage_of_phase[phase], Counter())
        order.append(Instruction(stage_of_phase[phase], stage_counts[kind], kind))
        stage_counts[kind] += 1
    for stage_id, stage_counts in counts.items():
        _check_backwards(rank, stage_id, stage_counts)
    return tuple(order)


def _check_backwards(rank: int, stage_id: int, counts: Counter[str]) -> None:
    num_backwards = counts["B"] + counts["I"]
    if counts["F"] == 0 or counts["F"] != num_backwards:
        raise ScheduleError(
            f"the pipe schedule of rank {rank}: stage {stage_id} runs {counts['F']} forwards and {num_backwards} backwards; "
            "a training schedule runs as many of each, at least 1. Pass one training PipeSchedule per rank."
        )
