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
from rlfreeze_ds.planning.schedule import Schedule, Transfer
from rlfreeze_ds.planning.transfers import blocking_zb_h1, place_transfers

Event = Instruction | Transfer

EFFORT = 3_000_000
"""Moves to try, times events of the batch: some one to two seconds. On 4 stages and 8 micro-batches 20 000 moves."""

_TEMPERATURE = 0.3
"""At first, as a share of a mean instruction: a move that costs as much is taken in one of e cases."""


@dataclass(frozen=True)
class Batch:
    """What an order is for.

    Attributes:
        seconds: of every instruction of a schedule with split backwards, one stage a rank.
        transfer_s: seconds of a transfer.
        most_held: micro-batches that a rank may hold, from the arrival of the input (on the first rank the F) to the W.
    """

    seconds: Mapping[Instruction, float]
    transfer_s: float
    most_held: int


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
        if isinstance(event, Transfer):
            rank, change = (event.sender.stage_id + 1, 1) if event.sender.is_forward else (0, 0)
        else:
            rank, change = event.stage_id, (event.kind == "F" and event.stage_id == 0) - (event.kind == "W")
        now[rank] += change
        most[rank] = max(most[rank], now[rank])
    return most


def best_start(num_stages: int, num_micro_batches: int, batch: Batch, *others: Schedule) -> Schedule:
    """What a search for ``batch`` should begin with: the shortest of ``others``, ZB-H1, ZB-H1 with its transfers placed for these
    seconds, and 1F1B with each W right behind its I, so placed.

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
    fitting = [schedule for schedule in starts if max(held(orders[schedule], num_stages)) <= batch.most_held]
    return min(fitting, key=lambda schedule: makespan(orders[schedule], batch, num_stages))


def search(start: Schedule, batch: Batch, *, num_moves: int | None = None, seed: int = 0) -> Schedule:
    """A schedule that takes no longer than ``start``, which must keep ``batch.most_held``, as any schedule found does.

    Under a looser limit than ``start`` needs it also searches within that one, and goes on from there: in a larger space it may
    find less.

    Args:
        start: with its transfers in their places.
        num_moves: of each search; None: as many as :data:`EFFORT` allows.
    """
    num_ranks, rng = start.num_ranks, random.Random(seed)
    order = common_order(start)
    num_moves = EFFORT // len(order) if num_moves is None else num_moves
    # The tight search first: with the same random numbers as if it were the only one, so a looser limit never costs anything.
    tight = replace(batch, most_held=min(batch.most_held, max(held(order, num_ranks))))
    found = [_annealed(order, tight, num_ranks, num_moves, rng)]
    if tight != batch:
        found += [_annealed(first, batch, num_ranks, num_moves, rng) for first in (found[0], order)]
    best = min(found, key=lambda order: makespan(order, batch, num_ranks))
    blocking = tuple(tuple(event for event in best if rank in ranks_of(event)) for rank in range(num_ranks))
    instructions = tuple(tuple(event for event in rank if isinstance(event, Instruction)) for rank in blocking)
    return Schedule(instructions, blocking)


def _annealed(start: list[Event], batch: Batch, num_ranks: int, num_moves: int, rng: random.Random) -> list[Event]:
    """The best order that was met."""
    before = {event: needs(event, num_ranks) for event in start}
    after: dict[Event, list[Event]] = {event: [] for event in start}
    for event, needed in before.items():
        for other in needed:
            after[other].append(event)
    present, present_s = start, makespan(start, batch, num_ranks)
    best, best_s = present, present_s
    hot_s = _TEMPERATURE * sum(batch.seconds.values()) / len(batch.seconds)
    for move in range(num_moves):
        temperature = hot_s * (1 - move / num_moves) ** 2 + 1e-12
        moved = _moved(present, before, after, rng)
        if moved is None or max(held(moved, num_ranks)) > batch.most_held:
            continue
        moved_s = makespan(moved, batch, num_ranks)
        if moved_s <= present_s or rng.random() < math.exp((present_s - moved_s) / temperature):
            present, present_s = moved, moved_s
            if present_s < best_s:
                best, best_s = present, present_s
    return best


def _moved(
    order: list[Event], before: Mapping[Event, list[Event]], after: Mapping[Event, list[Event]], rng: random.Random
) -> list[Event] | None:
    """``order`` with an event in another place among those of its ranks; None where it has no other."""
    index = rng.randrange(len(order))
    event = order[index]
    ends = ranks_of(event)
    # The stretch around it that holds nothing that it needs, or that needs it.
    needed, needing = before[event], after[event]
    first = last = index
    while first > 0 and order[first - 1] not in needed:
        first -= 1
    while last + 1 < len(order) and order[last + 1] not in needing:
        last += 1
    places = [
        place for place in range(first, last + 1) if place != index and not set(ends).isdisjoint(ranks_of(order[place]))
    ]
    if not places:
        return None
    rest = order[:index] + order[index + 1 :]
    rest.insert(rng.choice(places), event)
    return rest
