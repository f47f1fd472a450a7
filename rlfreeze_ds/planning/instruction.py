"""One instruction of a pipeline schedule, and which other instructions it has to wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlfreeze_ds.errors import ScheduleError

KINDS = ("F", "B", "I", "W")
"""torch.distributed.pipelining's letters: forward, full backward, backward for the input, backward for the weights."""

_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


@dataclass(frozen=True, order=True)
class Instruction:
    """What one stage does with one micro-batch.

    Attributes:
        stage_id: pipeline stage, counted from 0.
        micro_batch_id: micro-batch within the batch, counted from 0.
        kind: one of :data:`KINDS`; B = I + W.

    Raises:
        ScheduleError: a negative id or an unknown kind.
    """

    stage_id: int
    micro_batch_id: int
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"instruction kind {self.kind!r}: must be one of {', '.join(KINDS)}.")
        if self.stage_id < 0 or self.micro_batch_id < 0:
            raise ScheduleError(
                f"instruction with stage_id {self.stage_id} and micro_batch_id {self.micro_batch_id}: "
                "both count from 0, use ids >= 0."
            )

    def __str__(self) -> str:
        return f"{self.stage_id}{self.kind}{self.micro_batch_id}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """The inverse of ``str()``: ``"2F0"`` is the forward of micro-batch 0 on stage 2.

        Raises:
            ScheduleError: ``text`` is not <stage><kind><micro-batch>.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"instruction {text!r}: must be <stage><kind><micro-batch> with kind one of {', '.join(KINDS)}, "
                'such as "2F0".'
            )
        return cls(int(match[1]), int(match[3]), match[2])

    @property
    def is_forward(self) -> bool:
        return self.kind == "F"

    @property
    def gives_input_gradient(self) -> bool:
        """B and I produce the gradient that the stage before waits for."""
        return self.kind in ("B", "I")

    @property
    def computes_weight_gradient(self) -> bool:
        """B and W are the instructions that freezing can shorten."""
        return self.kind in ("B", "W")


def required_predecessors(instruction: Instruction, num_stages: int) -> Iterator[tuple[Instruction, ...]]:
    """The data that ``instruction`` waits for, on its own and on neighbouring stages.

    Each item is a tuple of alternatives, of which a schedule holds exactly one (a backward is either B or I + W):
    F(s-1,m) -> F(s,m); F(s,m) -> B or I(s,m); B or I(s+1,m) -> B or I(s,m); I(s,m) -> W(s,m).
    """
    stage_id, micro_batch_id = instruction.stage_id, instruction.micro_batch_id
    if instruction.is_forward:
        if stage_id > 0:
            yield (Instruction(stage_id - 1, micro_batch_id, "F"),)
    elif instruction.gives_input_gradient:
        yield (Instruction(stage_id, micro_batch_id, "F"),)
        if stage_id + 1 < num_stages:
            yield (Instruction(stage_id + 1, micro_batch_id, "B"), Instruction(stage_id + 1, micro_batch_id, "I"))
    else:
        yield (Instruction(stage_id, micro_batch_id, "I"),)
