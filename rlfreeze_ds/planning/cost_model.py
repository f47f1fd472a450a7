"""Seconds of an instruction as a function of its freeze ratio."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlfreeze_ds.errors import ProfileError
from rlfreeze_ds.planning.instruction import Instruction


@dataclass(frozen=True)
class Duration:
    """Seconds of one instruction with nothing frozen and with everything frozen, linear in between."""

    unfrozen_s: float
    frozen_s: float

    @property
    def saving_s(self) -> float:
        """Seconds that freezing all of it saves; 0 where frozen is not shorter ("cannot be shortened")."""
        return max(0.0, self.unfrozen_s - self.frozen_s)

    def seconds(self, ratio: float) -> float:
        """Seconds at a freeze ratio in [0, 1], the share of the weight-gradient time that is skipped."""
        return self.unfrozen_s - ratio * self.saving_s


@dataclass(frozen=True)
class Costs:
    """Seconds of every instruction of a batch, of a transfer between two ranks, and per rank of what follows its last instruction
    (gradient reduction, optimizer step)."""

    durations: Mapping[Instruction, Duration]
    transfer_s: float = 0.0
    tail_s: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def freezable(self) -> tuple[Instruction, ...]:
        """B and W instructions that freezing shortens, sorted."""
        return tuple(sorted(i for i, d in self.durations.items() if i.computes_weight_gradient and d.saving_s > 0))

    def seconds(self, ratios: Mapping[Instruction, float]) -> dict[Instruction, float]:
        """Seconds of every instruction; unfrozen where ``ratios`` lacks it or it cannot be frozen (F, I)."""
        return {
            i: d.seconds(ratios.get(i, 0.0)) if i.computes_weight_gradient else d.unfrozen_s
            for i, d in self.durations.items()
        }

    def check(self, instructions: Iterable[Instruction]) -> None:
        """Make sure that the costs are usable for a batch of these instructions.

        Raises:
            ProfileError: an instruction without a duration, one that is not in the batch, or a NaN, infinite or
                negative number.
        """
        expected = set(instructions)
        for instruction in sorted(expected - self.durations.keys()):
            raise ProfileError(f"{instruction} has no duration: give one for every instruction of the schedule.")
        for instruction in sorted(self.durations.keys() - expected):
            raise ProfileError(f"{instruction} has a duration but is not in the schedule: remove it or add it there.")
        for instruction, duration in self.durations.items():
            for name, seconds in (("unfrozen_s", duration.unfrozen_s), ("frozen_s", duration.frozen_s)):
                _check_seconds(f"{name} of {instruction}", seconds)
        _check_seconds("transfer_s", self.transfer_s)
        for rank, seconds in self.tail_s.items():
            _check_seconds(f"tail_s of rank {rank}", seconds)
        total = sum(d.unfrozen_s for d in self.durations.values()) + self.transfer_s * len(self.durations)
        if not math.isfinite(total):
            raise ProfileError("the durations add up to more than a float can hold: give them in seconds.")


def _check_seconds(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ProfileError(f"{what} = {seconds}: must be a finite number of seconds >= 0; measure it again.")
