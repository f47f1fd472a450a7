"""Seconds of every forward and backward instruction: host clock on a CPU, device events on an accelerator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class StepTiming:
    """What one step took on this rank. ``seconds`` maps (kind, micro_batch_id) to seconds; ``makespan_s`` runs from
    the start of the first instruction to the end of the step, ``tail_s`` of that from the end of the last one: gradient reduction
    and optimizer step."""

    step: int
    seconds: dict[tuple[str, int], float]
    makespan_s: float
    tail_s: float = 0.0

    def with_whole_backwards(self) -> StepTiming:
        """With the I and the W of a micro-batch, where its backward was split, as one B."""
        seconds: dict[tuple[str, int], float] = {}
        for (kind, micro_batch_id), taken in self.seconds.items():
            key = ("F" if kind == "F" else "B", micro_batch_id)
            seconds[key] = seconds.get(key, 0.0) + taken
        return replace(self, seconds=seconds)


class InstructionProfiler:
    """Records around instructions; hands a step out once its events are complete, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._records: list[tuple[str, int, Any, Any]] = []
        self._end: Any = None
        self._pending: deque[tuple[int, list[tuple[str, int, Any, Any]], Any]] = deque()

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        # Events tell milliseconds; seconds everywhere else.
        return start.elapsed_time(stop) / 1000.0 if self._events else stop - start

    @contextmanager
    def record(self, kind: str, micro_batch_id: int) -> Iterator[None]:
        """Time the block as instruction ``kind`` of ``micro_batch_id``."""
        start = self._now()
        yield
        self._records.append((kind, micro_batch_id, start, self._now()))

    def end_schedule(self) -> None:
        """The last command of the step's schedule has run."""
        self._end = self._now()

    def start_step(self) -> None:
        """What a step left that ended with an error is of no use."""
        self._records = []

    def finish_step(self, step: int) -> list[StepTiming]:
        """Close the step and return every step whose times are known by now, oldest first."""
        if self._records:
            self._pending.append((step, self._records, self._end))
            self._records = []
        done = []
        while self._pending and (not self._events or self._pending[0][2].query()):
            number, records, end = self._pending.popleft()
            seconds = {(kind, m): self._between(start, stop) for kind, m, start, stop in records}
            done.append(
                StepTiming(number, seconds, self._between(records[0][2], end), self._between(records[-1][3], end))
            )
        return done
