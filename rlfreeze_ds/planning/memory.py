"""Bytes of activations and kept pairs that each rank of an order holds, as :class:`StageMemory` measures a micro-batch.

Counted between instructions and transfers, with nothing frozen. What an instruction allocates and frees again, weights, gradients
of weights and optimizer state are not in it: no order changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule, Transfer

Event = Instruction | Transfer


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one micro-batch keeps alive on a stage, each piece of memory counted once.

    Attributes:
        input_bytes: a received input, from its arrival until its gradient is sent; 0 on the first stage.
        forward_bytes: beyond that, from F to B or I: what autograd saved, the output, on the first stage the input, on the last
            the labels. Weights are no part of it.
        gradient_bytes: the input's gradient, from B or I until it is sent; 0 on the first stage.
        pair_bytes: from I to W: the inputs and output gradients that W needs.
        shared_bytes: what several micro-batches saved alike, such as a mask of attention: once for the whole batch.
    """

    input_bytes: int = 0
    forward_bytes: int = 0
    gradient_bytes: int = 0
    pair_bytes: int = 0
    shared_bytes: int = 0

    def largest(self, other: StageMemory) -> StageMemory:
        """The larger of each: of replicas, or of several measurements."""
        return StageMemory(*(max(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)))

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> StageMemory:
        """Of JSON values.

        Raises:
            TypeError: another field; or a value that is no integer >= 0.
        """
        if any(type(value) is not int or value < 0 for value in values.values()):
            raise TypeError(f"bytes of a stage must be integers >= 0, not {dict(values)}")
        return cls(**values)


@dataclass(frozen=True)
class MemoryLimit:
    """``limit_bytes`` that no rank may exceed, and what the micro-batches of each stage take (stage s on rank s)."""

    stages: tuple[StageMemory, ...]
    limit_bytes: int

    def changes(self, events: Iterable[Event]) -> list[tuple[tuple[int, int], ...]]:
        """Per event, the (rank, bytes) that it adds or frees."""
        return [tuple(_changes(event, self.stages)) for event in events]

    def allows(self, order: Sequence[int], changes: Sequence[Sequence[tuple[int, int]]]) -> bool:
        """Whether a common order keeps within the limit. ``changes``: of all events, from :meth:`changes`; ``order``: their
        indices there."""
        held = [stage.shared_bytes for stage in self.stages]
        limit = self.limit_bytes
        if max(held) > limit:
            return False
        for event in order:
            for rank, change in changes[event]:
                held[rank] += change
                if held[rank] > limit:
                    return False
        return True


def peak_bytes(schedule: Schedule, stages: Sequence[StageMemory]) -> tuple[int, ...]:
    """Per rank the most bytes that it holds between two instructions or transfers of a batch.

    Args:
        schedule: one stage a rank, with its transfers in their places; its backwards may be whole.
    """
    peaks = []
    for rank, events in enumerate(schedule.blocking):
        held = peak = stages[rank].shared_bytes
        for event in events:
            held += sum(change for other, change in _changes(event, stages) if other == rank)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _changes(event: Event, stages: Sequence[StageMemory]) -> Iterable[tuple[int, int]]:
    if isinstance(event, Transfer):
        stage_id = event.sender.stage_id
        if event.sender.is_forward:
            yield stage_id + 1, stages[stage_id + 1].input_bytes
        else:
            yield stage_id, -stages[stage_id].input_bytes - stages[stage_id].gradient_bytes
        return
    stage = stages[event.stage_id]
    if event.is_forward:
        yield event.stage_id, stage.forward_bytes
    elif event.kind == "W":
        yield event.stage_id, -stage.pair_bytes
    else:
        kept = stage.pair_bytes if event.kind == "I" else 0
        yield event.stage_id, stage.gradient_bytes + kept - stage.forward_bytes
