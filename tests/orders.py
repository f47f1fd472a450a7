"""Orders of F, I, W and transfers that tests run, beside those that a job would run; no torch."""

from __future__ import annotations

import random
from collections import Counter

from rlfreeze_ds.planning.planned_order import Batch, Event, common_order, needs, ranks_of, search
from rlfreeze_ds.planning.schedule import Schedule, to_commands
from rlfreeze_ds.planning.transfers import blocking_zb_h1


def batch_of(schedule: Schedule, seed: int, most_held: int, transfer_s: float = 0.05) -> Batch:
    """Seconds by stage and kind, with some noise."""
    rng = random.Random(seed)
    mean = {(s, kind): rng.uniform(0.5, 2.0) for s in range(schedule.num_stages) for kind in "FIW"}
    return Batch({i: mean[i.stage_id, i.kind] * rng.uniform(0.9, 1.1) for i in schedule.instructions}, transfer_s, most_held)


def searched(num_stages: int, num_micro_batches: int, seed: int = 0, extra: int = 1, num_moves: int = 400) -> tuple[str, ...]:
    """As a plan would be for random seconds, where a rank may hold ``extra`` micro-batches more than 1F1B's first one does."""
    start = blocking_zb_h1(num_stages, num_micro_batches)
    batch = batch_of(start, seed, min(num_stages, num_micro_batches) + extra)
    return to_commands(search(start, batch, num_moves=num_moves, seed=seed))


def drawn(num_stages: int, num_micro_batches: int, seed: int) -> tuple[str, ...]:
    """Any order that can run: at each turn an event that has what it needs, whatever that costs in time and memory."""
    left = common_order(blocking_zb_h1(num_stages, num_micro_batches))
    missing = {event: len(needs(event, num_stages)) for event in left}
    after: dict[Event, list[Event]] = {event: [] for event in left}
    for event in left:
        for other in needs(event, num_stages):
            after[other].append(event)
    rng, order = random.Random(seed), list[Event]()
    # Some kinds and ranks are quick, others late, else all drawn orders would look alike.
    haste = Counter({(kind, rank): rng.choice((0.05, 1.0, 20.0)) for kind in "FIW" for rank in range(num_stages)})
    ready = [event for event in left if not missing[event]]
    while ready:
        weights = [haste[getattr(event, "kind", "I"), ranks_of(event)[0]] for event in ready]
        event = ready.pop(rng.choices(range(len(ready)), weights)[0])
        order.append(event)
        for other in after[event]:
            missing[other] -= 1
            ready += [other] * (missing[other] == 0)
    assert len(order) == len(left)
    blocking = tuple(tuple(event for event in order if rank in ranks_of(event)) for rank in range(num_stages))
    instructions = tuple(tuple(event for event in rank if not hasattr(event, "sender")) for rank in blocking)
    return to_commands(Schedule(instructions, blocking))
