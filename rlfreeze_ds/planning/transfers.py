"""Where the transfers of an order go, when a transfer keeps both its ranks until it is done, as in DeepSpeed's engine.

Every place is taken from one order of all instructions and transfers of the batch, in which each comes after what it needs; a
rank's part of it is what concerns that rank. Such parts cannot deadlock: of all that has not run yet, what is first in the
common order is the next thing on each of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.builders import one_f_one_b, zb_h1
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule, Transfer

# In units of an F. Nearly nothing, yet it lets a rank that got its input later do its other things later as well.
_NOMINAL_TRANSFER = 0.02
# Of things that could start at the same time. A transfer is short, and another rank waits for it or for what comes of an I.
_FIRST = {"transfer": 0, "I": 1, "B": 1, "F": 2, "W": 3}


def place_transfers(schedule: Schedule, seconds: Mapping[Instruction, float], transfer_s: float = 0.0) -> Schedule:
    """``schedule`` with its transfers where a batch of ``seconds`` has them if nothing waits for a better moment: whenever both
    ranks are free, before anything else that could start then.

    An activation is received only into a buffer that is free, of which a rank has as many as 1F1B gives it; a gradient only
    when the last one is used up, since DeepSpeed has one place for it.

    Raises:
        ScheduleError: a rank without exactly its own stage, or an order that cannot run.
    """
    if any(i.stage_id != rank for rank, instructions in enumerate(schedule.ranks) for i in instructions):
        raise ScheduleError("transfers are placed for one stage a rank, stage s on rank s.")
    placing = _Placing(schedule, seconds, transfer_s)
    while placing.step():
        pass
    return Schedule(schedule.ranks, tuple(map(tuple, placing.placed)))


def blocking_1f1b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with its transfers where ``deepspeed.runtime.pipe.schedule.TrainSchedule`` has them.

    There stage s runs the forward of micro-batch m in step s + 2 m and its backward in step 2 (num_stages + m) - 1 - s. What a
    step made is sent away in the next one.

    Raises:
        ScheduleError: a count below 1.
    """
    ranks = []
    for s, instructions in enumerate(one_f_one_b(num_stages, num_micro_batches).ranks):
        events: list[tuple[int, int, Instruction | Transfer]] = []
        for i in instructions:
            m = i.micro_batch_id
            step = s + 2 * m if i.is_forward else 2 * (num_stages + m) - 1 - s
            # In the step of a forward a gradient is sent first, in that of a backward one is received first.
            came_from, goes_to, place = (s - 1, s + 1, 1) if i.is_forward else (s + 1, s - 1, 0)
            if 0 <= came_from < num_stages:
                events.append((step, place, Transfer(Instruction(came_from, m, i.kind))))
            events.append((step, 2, i))
            if 0 <= goes_to < num_stages:
                events.append((step + 1, place, Transfer(i)))
        ranks.append(tuple(event for *_, event in sorted(events, key=lambda event: event[:2])))
    return Schedule(tuple(tuple(e for e in rank if isinstance(e, Instruction)) for rank in ranks), tuple(ranks))


def blocking_zb_h1(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1 with its transfers placed as if F, I and W took the same time: an order that needs no measurement."""
    schedule = zb_h1(num_stages, num_micro_batches)
    return place_transfers(schedule, dict.fromkeys(schedule.instructions, 1.0), _NOMINAL_TRANSFER)


class _Placing:
    """A batch that is played, event by event, in the order of their starts."""

    def __init__(self, schedule: Schedule, seconds: Mapping[Instruction, float], transfer_s: float) -> None:
        self._schedule, self._seconds, self._transfer_s = schedule, seconds, transfer_s
        num_ranks = schedule.num_ranks
        self.placed: list[list[Instruction | Transfer]] = [[] for _ in range(num_ranks)]
        self._clock = [0.0] * num_ranks
        self._num_run = [0] * num_ranks
        # Per rank what was made for the next rank and for the one before, sent or not.
        self._made: list[dict[int, list[Instruction]]] = [{1: [], -1: []} for _ in range(num_ranks)]
        self._num_sent = [{1: 0, -1: 0} for _ in range(num_ranks)]
        self._num_returned = [0] * num_ranks
        self._num_buffers = [max(2, min(num_ranks - rank, schedule.num_micro_batches)) for rank in range(num_ranks)]

    def step(self) -> bool:
        """Place what can start first; False once everything is placed."""
        candidates = []
        for rank in range(len(self.placed)):
            instruction = self._next(rank)
            if instruction is not None and self._has_inputs(rank, instruction):
                candidates.append((self._clock[rank], _FIRST[instruction.kind], rank, 0))
            for away in (1, -1):
                if self._can_send(rank, away):
                    candidates.append((max(self._clock[rank], self._clock[rank + away]), _FIRST["transfer"], rank, away))
        if not candidates:
            left = [instruction for rank in range(len(self.placed)) if (instruction := self._next(rank)) is not None]
            if left:
                raise ScheduleError(f"{', '.join(map(str, left))} wait for each other: no rank can go on.")
            return False
        start, _, rank, away = min(candidates)
        if away:
            self._send(rank, away, start + self._transfer_s)
        else:
            self._run(rank)
        return True

    def _next(self, rank: int) -> Instruction | None:
        order = self._schedule.ranks[rank]
        return order[self._num_run[rank]] if self._num_run[rank] < len(order) else None

    def _has_inputs(self, rank: int, instruction: Instruction) -> bool:
        """What the own rank makes has its place in the order of the rank already."""
        if instruction.is_forward and rank > 0:
            return self._num_sent[rank - 1][1] > instruction.micro_batch_id
        if instruction.gives_input_gradient and rank + 1 < len(self.placed):
            return self._num_sent[rank + 1][-1] > instruction.micro_batch_id
        return True

    def _can_send(self, rank: int, away: int) -> bool:
        num_sent = self._num_sent[rank][away]
        if rank + away < 0 or len(self._made[rank][away]) <= num_sent:
            return False
        if away == 1:
            return num_sent - self._num_returned[rank + 1] < self._num_buffers[rank + 1]
        return num_sent == len(self._made[rank - 1][-1])

    def _send(self, rank: int, away: int, end: float) -> None:
        transfer = Transfer(self._made[rank][away][self._num_sent[rank][away]])
        for end_rank in (rank, rank + away):
            self.placed[end_rank].append(transfer)
            self._clock[end_rank] = end
        self._num_sent[rank][away] += 1
        if away == -1:
            self._num_returned[rank] += 1

    def _run(self, rank: int) -> None:
        instruction = self._next(rank)
        assert instruction is not None
        self.placed[rank].append(instruction)
        self._clock[rank] += self._seconds[instruction]
        self._num_run[rank] += 1
        if instruction.is_forward and rank + 1 < len(self.placed):
            self._made[rank][1].append(instruction)
        elif instruction.gives_input_gradient:
            self._made[rank][-1].append(instruction)
