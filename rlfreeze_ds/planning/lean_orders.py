"""Orders that hold less: DeepSpeed's own, and 1F1B with fewer micro-batches under way; and which of them keeps a limit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.memory import StageMemory, peak_bytes
from rlfreeze_ds.planning.schedule import Schedule
from rlfreeze_ds.planning.transfers import blocking_1f1b, blocking_zb_h1, place_transfers

# Relative seconds, for choices that are made before anything was measured.
_NOMINAL = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_NOMINAL_TRANSFER = 0.02


@cache
def lean_order(num_stages: int, num_micro_batches: int, most_under_way: int, *, split: bool) -> Schedule:
    """1F1B with at most ``most_under_way`` >= 1 micro-batches under way at a time, its transfers placed.

    Args:
        split: each backward an I followed by its W, in place of a B.
    """
    backward = ("I", "W") if split else ("B",)
    ranks = []
    for stage_id in range(num_stages):
        ahead = min(num_stages - stage_id, most_under_way, num_micro_batches) - 1
        rank = [Instruction(stage_id, m, "F") for m in range(ahead)]
        for m in range(num_micro_batches):
            rank += [Instruction(stage_id, m + ahead, "F")] if m + ahead < num_micro_batches else []
            rank += [Instruction(stage_id, m, kind) for kind in backward]
        ranks.append(tuple(rank))
    schedule = Schedule(tuple(ranks))
    return place_transfers(schedule, {i: _NOMINAL[i.kind] for i in schedule.instructions}, _NOMINAL_TRANSFER)


def first_orders(
    name: str, num_stages: int, num_micro_batches: int, stages: Sequence[StageMemory], limit_bytes: int | None
) -> tuple[Schedule, ...]:
    """What ``planning.schedule`` = ``name`` runs, or begins a search with, under a limit of bytes a rank: at least one order.

    Where the usual one keeps the limit, or there is none, that. Else of "zb-h1" stock's order. Of "planned" the orders with the
    most micro-batches under way that keep it, at most one with split and one with whole backwards, the shorter first; where none
    keeps it, the one that holds least. The order of "stock" is stock's, whatever it holds.

    Args:
        stages: what was measured; not looked at without a limit.
    """
    usual = blocking_1f1b if name == "stock" else blocking_zb_h1

    def holds(schedule: Schedule) -> int:
        return max(peak_bytes(schedule, stages))

    first = usual(num_stages, num_micro_batches)
    if name == "stock" or limit_bytes is None or holds(first) <= limit_bytes:
        return (first,)
    if name == "zb-h1":
        return (blocking_1f1b(num_stages, num_micro_batches),)

    def lean(split: bool) -> Callable[[int], Schedule]:
        return lambda most: lean_order(num_stages, num_micro_batches, most, split=split)

    found = [lean_found for split in (True, False) if (lean_found := _fullest(lean(split), num_stages, holds, limit_bytes))]
    if found:
        return tuple(sorted(found, key=_nominal_makespan))
    least = [first, blocking_1f1b(num_stages, num_micro_batches), lean(True)(1), lean(False)(1)]
    return (min(least, key=holds),)


def _fullest(
    order: Callable[[int], Schedule], num_stages: int, holds: Callable[[Schedule], int], limit_bytes: int
) -> Schedule | None:
    """With the most micro-batches under way that keep the limit: the more there are, the more is held."""
    most = bisect_left(range(1, num_stages + 1), True, key=lambda number: holds(order(number)) > limit_bytes)
    return order(most) if most > 0 else None


def _nominal_makespan(schedule: Schedule) -> float:
    seconds = {i: _NOMINAL[i.kind] for i in schedule.instructions}
    return PipelineDag(schedule).simulate(seconds, _NOMINAL_TRANSFER).makespan
