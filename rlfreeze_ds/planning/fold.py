"""Folding a batch: the steady phase repeats, so few of its micro-batches need variables of their own.

The instructions of one stage and kind are a *track*. Along a track start times and freeze ratios are restricted to straight
lines between *knots*: every micro-batch near the ends of the batch, ever fewer towards its middle. Durations being alike, a
rule between two tracks ("2F7 ends before 3F7 starts", for every micro-batch) then holds for all micro-batches if it holds at
the knots of both. That is a restriction of the program, so what it finds can be run as it stands; that it costs next to
nothing is tested against the full program, in which every micro-batch is a knot.

A schedule that takes micro-batches in rounds (interleaved 1F1B) repeats every so many of them: its tracks are split by the
micro-batch's place in the round (``period``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction

Track = tuple[int, str, int]
"""(stage_id, kind, micro_batch_id modulo the period)."""

Weights = tuple[tuple[int, float], ...]
"""Knots with their shares in a value on the line between them."""

# Every micro-batch this near to an end of the batch is a knot, and then ever wider gaps, each so many times the last.
NEAR_END = 8
GROWTH = 1.5


@dataclass(frozen=True)
class Rule:
    """The end of ``before`` at position j, and ``num_transfers`` transfers, come before the start of ``after`` at j + shift.

    ``positions``: where it has to be asked for, so that it holds everywhere.
    """

    before: Track
    after: Track
    shift: int
    num_transfers: int
    positions: tuple[int, ...]


class Fold:
    """The tracks of a batch, their knots, and the rules between them.

    Args:
        dag: the batch.
        full: make every micro-batch a knot, which leaves the program as it is.
    """

    def __init__(self, dag: PipelineDag, *, full: bool) -> None:
        self.dag = dag
        candidates = [1] if full else sorted({1, dag.schedule.num_ranks})
        families = {period: _families(dag, period) for period in candidates}
        # With the right period most rules repeat; with a wrong one they fall apart.
        self.period = min(candidates, key=lambda period: (sum(map(_num_runs, families[period].values())), period))
        self._lengths: dict[Track, int] = {}
        for instruction in dag.order:
            track, position = self.place(instruction)
            self._lengths[track] = max(self._lengths.get(track, 0), position + 1)
        found = families[self.period]
        self.knots = {track: tuple(range(length)) for track, length in self._lengths.items()}
        if not full:
            self.knots = self._sparse_knots(found)
        self._is_knot = {track: frozenset(knots) for track, knots in self.knots.items()}
        self.rules = [
            Rule(before, after, shift, num_transfers, tuple(self._positions(before, after, shift, positions)))
            for (before, after, shift, num_transfers), positions in found.items()
        ]

    def place(self, instruction: Instruction) -> tuple[Track, int]:
        """The track of an instruction and its position there."""
        position, place = divmod(instruction.micro_batch_id, self.period)
        return (instruction.stage_id, instruction.kind, place), position

    def instruction(self, track: Track, position: int) -> Instruction:
        """The reverse of :meth:`place`."""
        return Instruction(track[0], position * self.period + track[2], track[1])

    def weights(self, track: Track, position: int) -> Weights:
        """How the value at ``position`` is made of those at the knots."""
        knots = self.knots[track]
        index = bisect.bisect_right(knots, position) - 1
        if knots[index] == position:
            return ((position, 1.0),)
        left, right = knots[index], knots[index + 1]
        share = (position - left) / (right - left)
        return ((left, 1.0 - share), (right, share))

    def averages(self, values: Mapping[Instruction, float]) -> dict[Track, dict[int, float]]:
        """Per knot the mean of ``values`` around it, each counted by its share."""
        sums: dict[Track, dict[int, list[float]]] = {track: {k: [0.0, 0.0] for k in knots} for track, knots in self.knots.items()}
        for instruction, value in values.items():
            track, position = self.place(instruction)
            for knot, weight in self.weights(track, position):
                entry = sums[track][knot]
                entry[0] += weight * value
                entry[1] += weight
        return {track: {k: total / max(count, 1e-300) for k, (total, count) in row.items()} for track, row in sums.items()}

    @cached_property
    def ends(self) -> list[tuple[Track, int, int]]:
        """The last instruction of every rank, and the rank."""
        return [(*self.place(instruction), rank) for instruction, rank in self.dag.last_of_rank.items()]

    def _sparse_knots(self, families: Mapping[_Family, Sequence[int]]) -> dict[Track, tuple[int, ...]]:
        knots = {track: set(spaced(length)) for track, length in self._lengths.items()}
        for (before, after, shift, _), positions in families.items():
            # Where a rule sets in or ends the lines may bend.
            for first, last in _runs(positions):
                knots[before] |= {first, last}
                knots[after] |= {first + shift, last + shift}
        for track in list(knots):  # a ratio lies on the line of its own instruction
            if len(knots[track]) > 4 * len(spaced(self._lengths[track])) + 8:
                knots[track] = set(range(self._lengths[track]))
        return {track: tuple(sorted(row)) for track, row in knots.items()}

    def _positions(self, before: Track, after: Track, shift: int, positions: Sequence[int]) -> Iterator[int]:
        here, there = self._is_knot[before], self._is_knot[after]
        for first, last in _runs(positions):
            yield from (j for j in range(first, last + 1) if j in (first, last) or j in here or j + shift in there)


_Family = tuple[Track, Track, int, int]
"""(before, after, shift, number of transfers between them)."""


def spaced(length: int) -> list[int]:
    """Knots of ``range(length)``: all near both ends, ever fewer towards the middle."""
    from_end, gap = list(range(min(NEAR_END, length))), 1.0
    while from_end and from_end[-1] < (length - 1) / 2:
        gap *= GROWTH
        from_end.append(from_end[-1] + int(gap))
    half = [offset for offset in from_end if offset <= (length - 1) / 2]
    return sorted({*half, *(length - 1 - offset for offset in half)})


def _families(dag: PipelineDag, period: int) -> dict[_Family, list[int]]:
    """Positions of ``before`` for each kind of edge, ascending."""
    families: dict[_Family, list[int]] = {}
    rank_of = dag.schedule.rank_of
    place_in_rank = {i: place for rank in dag.schedule.ranks for place, i in enumerate(rank)}
    for before, edges in dag.graph.adj.items():
        for after, edge in edges.items():
            same_rank = rank_of(before.stage_id) == rank_of(after.stage_id)
            if same_rank and not edge["num_transfers"] and place_in_rank[after] != place_in_rank[before] + 1:
                continue  # follows from the order of the rank
            j, residue = divmod(before.micro_batch_id, period)
            k, other = divmod(after.micro_batch_id, period)
            tracks = (before.stage_id, before.kind, residue), (after.stage_id, after.kind, other)
            families.setdefault((*tracks, k - j, edge["num_transfers"]), []).append(j)
    return {key: sorted(positions) for key, positions in families.items()}


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each unbroken stretch."""
    first = last = positions[0]
    for position in positions[1:]:
        if position != last + 1:
            yield first, last
            first = position
        last = position
    yield first, last


def _num_runs(positions: Sequence[int]) -> int:
    return sum(1 for _ in _runs(positions))
