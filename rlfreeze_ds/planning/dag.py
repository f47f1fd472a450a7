"""The dependency graph of one batch, and when each instruction runs for given durations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction, required_predecessors
from rlfreeze_ds.planning.schedule import Schedule, Transfer


def build_graph(schedule: Schedule) -> nx.DiGraph:
    """Instructions as nodes, "has to end before" as edges; may contain a cycle.

    Edge attribute ``num_transfers``: how many transfers between ranks lie on the way, one after the other. That is 0 or 1,
    unless transfers block: then an instruction also waits for what keeps a transfer before it from starting.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(schedule.instructions)
    for rank in schedule.ranks:
        graph.add_edges_from(pairwise(rank), num_transfers=0)
    for instruction in schedule.instructions:
        for alternatives in required_predecessors(instruction, schedule.num_stages):
            predecessor = next(i for i in alternatives if i in graph)
            crosses = schedule.rank_of(predecessor.stage_id) != schedule.rank_of(instruction.stage_id)
            graph.add_edge(predecessor, instruction, num_transfers=int(crosses))
    return _with_blocking_transfers(graph, schedule) if schedule.blocking else graph


def _with_blocking_transfers(graph: nx.DiGraph, schedule: Schedule) -> nx.DiGraph:
    """A transfer that blocks is a node in the order of both its ranks; a path through such nodes becomes an edge."""
    order = nx.DiGraph()
    for rank in schedule.blocking:
        order.add_edges_from(pairwise(rank))
    if not nx.is_directed_acyclic_graph(order):
        return order  # the ranks block each other; the cycle shows where
    # Per transfer: the instructions it waits for, each with the transfers from there up to this one.
    waits: dict[Transfer, dict[Instruction, int]] = {}
    for node in nx.topological_sort(order):
        found: dict[Instruction, int] = {}
        for before in order.pred[node]:
            for instruction, count in ({before: 0} if isinstance(before, Instruction) else waits[before]).items():
                found[instruction] = max(count, found.get(instruction, 0))
        if isinstance(node, Transfer):
            waits[node] = {instruction: count + 1 for instruction, count in found.items()}
            continue
        for instruction, count in found.items():
            present = graph.get_edge_data(instruction, node, {"num_transfers": 0})
            graph.add_edge(instruction, node, num_transfers=max(count, present["num_transfers"]))
    return graph


def find_cycle(graph: nx.DiGraph) -> tuple[Instruction, ...]:
    """Instructions that wait for each other in a ring, in that order; empty when the graph has no cycle."""
    if nx.is_directed_acyclic_graph(graph):
        return ()
    return tuple(edge[0] for edge in nx.find_cycle(graph))


def cycle_message(cycle: tuple[Instruction, ...]) -> str:
    """The cycle in words, such as ``1F0 -> 1B0 -> 1F0``."""
    ring = " -> ".join(str(instruction) for instruction in (*cycle, cycle[0]))
    return f"the instructions wait for each other: {ring}. No rank could start; change the order of one of these ranks."


@dataclass(frozen=True)
class Timeline:
    """When each instruction of a batch runs, every one as early as it can.

    Attributes:
        start: seconds from the start of the batch.
        end: seconds from the start of the batch.
        tail_s: per rank, seconds of what follows its last instruction.
    """

    start: Mapping[Instruction, float]
    end: Mapping[Instruction, float]
    dag: PipelineDag = field(repr=False, compare=False)
    transfer_s: float = 0.0
    tail_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the end of the last rank, its tail included; 0 for an empty batch."""
        return max((self.end[i] + self._tail(i) for i in self.dag.last_of_rank), default=0.0)

    def _tail(self, instruction: Instruction) -> float:
        """Seconds that follow an instruction before its rank is done with the batch."""
        rank = self.dag.last_of_rank.get(instruction)
        return self.tail_s.get(rank, 0.0) if rank is not None else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Share of rank-seconds spent waiting, in [0, 1]: 1 - busy / (num_ranks * makespan); 0 for makespan 0."""
        makespan = self.makespan
        if makespan <= 0.0:
            return 0.0
        busy = sum(self.end[i] - self.start[i] for i in self.start) + sum(map(self._tail, self.dag.last_of_rank))
        return max(0.0, 1.0 - busy / (self.dag.schedule.num_ranks * makespan))

    def slack(self) -> dict[Instruction, float]:
        """Seconds by which each instruction could be later without a longer makespan; about 0 if critical."""
        makespan = self.makespan
        slack: dict[Instruction, float] = {}
        for instruction in reversed(self.dag.order):
            latest_end = makespan - self._tail(instruction)
            for successor, edge in self.dag.graph.adj[instruction].items():
                latest_start = self.start[successor] + slack[successor]
                latest_end = min(latest_end, latest_start - self.transfer_s * edge["num_transfers"])
            slack[instruction] = latest_end - self.end[instruction]
        return slack

    def critical_path(self) -> tuple[Instruction, ...]:
        """One longest chain of instructions, from the start of the batch to its end."""
        if not self.end:
            return ()
        path = [max(self.dag.last_of_rank, key=lambda i: self.end[i] + self._tail(i))]
        while True:
            predecessors = self.dag.graph.pred[path[-1]]
            if not predecessors:
                return tuple(reversed(path))
            path.append(max(predecessors, key=lambda i: self.end[i] + self.transfer_s * predecessors[i]["num_transfers"]))


class PipelineDag:
    """A schedule's dependency graph with its topological order, for many simulations of one schedule.

    Attributes:
        schedule: the schedule it was built from.
        graph: see :func:`build_graph`; not to be changed.
        order: the instructions, each after everything it waits for.
        last_of_rank: the last instruction of every rank that has one, with its rank.

    Raises:
        ScheduleError: the schedule contains a cycle, which the message names.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.graph = build_graph(schedule)
        self.last_of_rank = {rank[-1]: number for number, rank in enumerate(schedule.ranks) if rank}
        cycle = find_cycle(self.graph)
        if cycle:
            raise ScheduleError(cycle_message(cycle))
        self.order: tuple[Instruction, ...] = tuple(nx.topological_sort(self.graph))
        position = {instruction: index for index, instruction in enumerate(self.order)}
        predecessors = (self.graph.pred[instruction] for instruction in self.order)
        self._predecessors = tuple(
            tuple((position[p], float(edge["num_transfers"])) for p, edge in edges.items()) for edges in predecessors
        )

    def simulate(
        self,
        seconds: Mapping[Instruction, float],
        transfer_s: float = 0.0,
        tail_s: Mapping[int, float] | None = None,
    ) -> Timeline:
        """Run the batch on paper.

        Args:
            seconds: duration of every instruction.
            transfer_s: seconds of a transfer from one rank to another.
            tail_s: per rank, seconds of what follows its last instruction; 0 where absent.

        Raises:
            ScheduleError: an instruction has no duration.
        """
        starts: list[float] = []
        ends: list[float] = []
        try:
            for instruction, predecessors in zip(self.order, self._predecessors, strict=True):
                start = 0.0
                for index, num_transfers in predecessors:
                    start = max(start, ends[index] + transfer_s * num_transfers)
                starts.append(start)
                ends.append(start + seconds[instruction])
        except KeyError as error:
            raise ScheduleError(
                f"instruction {error.args[0]} has no duration: give one for every instruction."
            ) from None
        start_of, end_of = (dict(zip(self.order, times, strict=True)) for times in (starts, ends))
        return Timeline(start_of, end_of, self, transfer_s, tail_s or {})
