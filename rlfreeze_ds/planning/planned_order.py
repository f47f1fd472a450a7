"""An order of F, I, W and transfers for a batch whose seconds are known: where each W goes, and when ranks meet for a transfer.

A batch is one sequence of all its events. A rank does its own in turn, a transfer starts when both its ranks have come to it, so
the seconds of a sequence take one pass over it, and no sequence can deadlock (:mod:`rlfreeze_ds.planning.transfers`). The search
begins with :func:`best_start` and takes single events to other places, as long as nothing it needs comes later: simulated
annealing, the same for the same seconds. An exact program for this is hopeless beyond a few micro-batches; where it can be solved
a test compares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.builders import one_f_one_b, zb_h1
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.memory import MemoryLimit, peak_bytes
from rlfreeze_ds.planning.schedule import Schedule, Transfer
from rlfreeze_ds.planning.transfers import blocking_zb_h1, place_transfers

Event = Instruction | Transfer

EFFORT = 9_000_000
"""Moves to try, times events of the batch: about a second. On 4 stages and 8 micro-batches 60 000 moves."""

MOVES_AN_EVENT = 500
"""At most: a small batch needs no more."""

_TEMPERATURE = 0.15
"""At first, as a share of a mean instruction: a move that costs as much is taken in one of e cases."""


@dataclass(frozen=True)
class Batch:
    """What an order is for.

    Attributes:
        seconds: of every instruction of a schedule with split backwards, one stage a rank.
        transfer_s: seconds of a transfer.
        most_held: micro-batches that a rank may hold, from the arrival of the input (on the first rank the F) to the W.
        memory: the bytes that a rank may hold, where there is a limit.
    """

    seconds: Mapping[Instruction, float]
    transfer_s: float
    most_held: int
    memory: MemoryLimit | None = None


def common_order(schedule: Schedule) -> list[Event]:
    """The events of all ranks in one sequence, from a schedule whose transfers have their places.

    Raises:
        ScheduleError: the ranks wait for each other, or an event comes before what it needs.
    """
    if any(i.stage_id != rank for rank, instructions in enumerate(schedule.ranks) for i in instructions):
        raise ScheduleError("orders are for one stage a rank, stage s on rank s.")
    at, order, done = [0] * schedule.num_ranks, list[Event](), set[Event]()
    total = sum(map(len, schedule.blocking))
    while sum(at) < total:
        before = sum(at)
        for rank, events in enumerate(schedule.blocking):
            while at[rank] < len(events):
                event = events[at[rank]]
                ends = ranks_of(event)
                if not set(ends) <= set(range(schedule.num_ranks)):
                    raise ScheduleError(f"{event}: there is no such rank.")
                if any(at[end] == len(schedule.blocking[end]) or schedule.blocking[end][at[end]] != event for end in ends):
                    break
                missing = [other for other in needs(event, schedule.num_ranks) if other not in done]
                if missing:
                    raise ScheduleError(f"{event} comes before {missing[0]}, which it needs.")
                for end in ends:
                    at[end] += 1
                order.append(event)
                done.add(event)
        if sum(at) == before:
            stuck = [str(events[at[rank]]) for rank, events in enumerate(schedule.blocking) if at[rank] < len(events)]
            raise ScheduleError(f"the ranks wait for each other, at {', '.join(stuck)}.")
    return order


def makespan(order: Sequence[Event], batch: Batch, num_ranks: int) -> float:
    """Seconds of a batch whose events have this common order."""
    clock = [0.0] * num_ranks
    for event in order:
        if isinstance(event, Transfer):
            first, second = ranks_of(event)
            clock[first] = clock[second] = max(clock[first], clock[second]) + batch.transfer_s
        else:
            clock[event.stage_id] += batch.seconds[event]
    return max(clock)


def ranks_of(event: Event) -> tuple[int, ...]:
    """The rank of an instruction; both ranks of a transfer."""
    if isinstance(event, Instruction):
        return (event.stage_id,)
    stage_id = event.sender.stage_id
    return (stage_id, stage_id + 1) if event.sender.is_forward else (stage_id - 1, stage_id)


def needs(event: Event, num_ranks: int) -> list[Event]:
    """What has to come before an event in DeepSpeed's engine.

    Each kind goes from micro-batch to micro-batch. The engine keeps one received gradient, and one loss on the last stage.
    """
    instruction = event.sender if isinstance(event, Transfer) else event
    stage_id, m = instruction.stage_id, instruction.micro_batch_id

    def of(kind: str, stage: int = stage_id, micro_batch_id: int = m) -> Instruction:
        return Instruction(stage, micro_batch_id, kind)

    found: list[Event] = []
    if m > 0:
        earlier = of(instruction.kind, micro_batch_id=m - 1)
        found.append(Transfer(earlier) if isinstance(event, Transfer) else earlier)
    if isinstance(event, Transfer):
        found.append(instruction)
        if instruction.kind == "I" and m > 0:
            found.append(of("I", stage_id - 1, m - 1))
    elif instruction.is_forward:
        if stage_id > 0:
            found.append(Transfer(of("F", stage_id - 1)))
        if stage_id + 1 == num_ranks and m > 0:
            found.append(of("I", micro_batch_id=m - 1))
    elif instruction.kind == "I":
        found.append(of("F"))
        if stage_id + 1 < num_ranks:
            found += [Transfer(of("I", stage_id + 1)), Transfer(of("F"))]
    else:
        found.append(of("I"))
    return found


def held(order: Sequence[Event], num_ranks: int) -> list[int]:
    """Per rank the most micro-batches that it holds at any time."""
    now, most = [0] * num_ranks, [0] * num_ranks
    for event in order:
        rank, change = _change(event)
        now[rank] += change
        most[rank] = max(most[rank], now[rank])
    return most


def _change(event: Event) -> tuple[int, int]:
    """A rank, and by how many micro-batches the event changes what it holds."""
    if isinstance(event, Transfer):
        return (event.sender.stage_id + 1, 1) if event.sender.is_forward else (event.sender.stage_id, 0)
    return event.stage_id, (event.kind == "F" and event.stage_id == 0) - (event.kind == "W")


def best_start(num_stages: int, num_micro_batches: int, batch: Batch, *others: Schedule) -> Schedule:
    """What a search for ``batch`` should begin with: the shortest of ``others``, ZB-H1, ZB-H1 with its transfers placed for these
    seconds, and 1F1B with each W right behind its I, so placed. The first of all where none keeps the limits of ``batch``.

    ZB-H1's usual places are for an F, I and W that take the same time. The more of W is frozen the worse they are, and the longer
    the pipeline the more it matters: with all frozen, 16 stages and 64 micro-batches take 1.3 times as long as in the others.
    """
    behind = Schedule(
        tuple(
            tuple(part for i in rank for part in ([i] if i.is_forward else [replace(i, kind="I"), replace(i, kind="W")]))
            for rank in one_f_one_b(num_stages, num_micro_batches).ranks
        )
    )
    placed = [place_transfers(s, batch.seconds, batch.transfer_s) for s in (zb_h1(num_stages, num_micro_batches), behind)]
    starts = [*others, blocking_zb_h1(num_stages, num_micro_batches), *placed]
    orders = {schedule: common_order(schedule) for schedule in starts}

    def fits(schedule: Schedule) -> bool:
        memory = batch.memory
        in_bytes = memory is None or max(peak_bytes(schedule, memory.stages)) <= memory.limit_bytes
        return in_bytes and max(held(orders[schedule], num_stages)) <= batch.most_held

    return min(filter(fits, starts), key=lambda schedule: makespan(orders[schedule], batch, num_stages), default=starts[0])


def search(start: Schedule, batch: Batch, *, num_moves: int | None = None, seed: int = 0) -> Schedule:
    """A schedule that takes no longer than ``start``, which must keep the limits of ``batch``, as any schedule found does. Under
    looser ones it may find less, since there is more to search.

    Args:
        start: with its transfers in their places.
        num_moves: None: as many as :data:`EFFORT` and :data:`MOVES_AN_EVENT` allow.
    """
    num_ranks, rng = start.num_ranks, random.Random(seed)
    order = common_order(start)
    num_moves = min(EFFORT // len(order), MOVES_AN_EVENT * len(order)) if num_moves is None else num_moves
    best = _Annealing(order, batch, num_ranks, rng).best(num_moves)
    blocking = tuple(tuple(event for event in best if rank in ranks_of(event)) for rank in range(num_ranks))
    instructions = tuple(tuple(event for event in rank if isinstance(event, Instruction)) for rank in blocking)
    return Schedule(instructions, blocking)


class _Annealing:
    """Simulated annealing of one batch. Events are numbers here: a plan has a second or two for hundreds of thousands of looks at
    them."""

    def __init__(self, start: Sequence[Event], batch: Batch, num_ranks: int, rng: random.Random) -> None:
        self._events, self._most_held, self._num_ranks, self._rng = start, batch.most_held, num_ranks, rng
        number = {event: i for i, event in enumerate(start)}
        self._ranks = [ranks_of(event) for event in start]
        self._needed: list[set[int]] = [set() for _ in start]  # by an event
        self._needing: list[set[int]] = [set() for _ in start]  # the event
        for event, i in number.items():
            for other in needs(event, num_ranks):
                self._needed[i].add(number[other])
                self._needing[number[other]].add(i)
        seconds = [batch.transfer_s if isinstance(event, Transfer) else batch.seconds[event] for event in start]
        self._mean_s = sum(seconds) / len(seconds)
        self._memory = batch.memory
        self._bytes = [] if batch.memory is None else batch.memory.changes(start)
        self._rows = [
            (ranks[0], ranks[-1], *_change(event), event_s)
            for event, ranks, event_s in zip(start, self._ranks, seconds, strict=True)
        ]

    def best(self, num_moves: int) -> list[Event]:
        """The best order that was met."""
        present = list(range(len(self._events)))
        present_s = self._seconds(present)
        best, best_s = present, present_s
        hot_s = _TEMPERATURE * self._mean_s
        for move in range(num_moves):
            temperature = hot_s * (1 - move / num_moves) ** 2 + 1e-12
            moved = self._moved(present)
            if moved is None or not self._fits(moved):
                continue
            moved_s = self._seconds(moved)
            if moved_s <= present_s or self._rng.random() < math.exp((present_s - moved_s) / temperature):
                present, present_s = moved, moved_s
                if present_s < best_s:
                    best, best_s = present, present_s
        return [self._events[i] for i in best]

    def _fits(self, order: Sequence[int]) -> bool:
        return self._memory is None or self._memory.allows(order, self._bytes)

    def _seconds(self, order: Sequence[int]) -> float:
        """:func:`makespan`; infinite where :func:`held` is above the limit."""
        clock, now = [0.0] * self._num_ranks, [0] * self._num_ranks
        for i in order:
            first, second, rank, change, seconds = self._rows[i]
            if first == second:
                clock[first] += seconds
            else:
                clock[first] = clock[second] = max(clock[first], clock[second]) + seconds
            if change:
                now[rank] += change
                if now[rank] > self._most_held:
                    return math.inf
        return max(clock)

    def _moved(self, order: Sequence[int]) -> list[int] | None:
        """``order`` with an event in another place among those of its ranks; None where it has no other."""
        index = self._rng.randrange(len(order))
        event = order[index]
        # The stretch around it that holds nothing that it needs, or that needs it.
        needed, needing = self._needed[event], self._needing[event]
        first = last = index
        while first > 0 and order[first - 1] not in needed:
            first -= 1
        while last + 1 < len(order) and order[last + 1] not in needing:
            last += 1
        ends = self._ranks[event]
        places = [
            place
            for place in range(first, last + 1)
            if place != index and any(rank in ends for rank in self._ranks[order[place]])
        ]
        if not places:
            return None
        rest = [*order[:index], *order[index + 1 :]]
        rest.insert(self._rng.choice(places), event)
        return rest
