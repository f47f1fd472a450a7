"""One profile under several schedules of the engine: what a batch takes, how long ranks wait, how much they hold, with nothing
frozen and as planned.

Only the seconds of a profile are used, not its order. A backward that was measured whole is taken apart: I is what is left of it
when all is frozen, W the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlfreeze_ds.errors import ProfileError, RLFreezeError, TargetError
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag, Timeline
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.planning.planned_order import Batch, best_start, search
from rlfreeze_ds.planning.progress import StageProgress
from rlfreeze_ds.planning.schedule import Schedule, Transfer, to_commands
from rlfreeze_ds.planning.solver import Limits, solve
from rlfreeze_ds.planning.transfers import blocking_1f1b, blocking_zb_h1

SCHEDULES = {"stock": "stock (1F1B)", "zb-h1": "zero-bubble (ZB-H1)", "planned": "planned order"}
"""The values of ``planning.schedule``, and how pictures and tables name them."""

# Speed-ups are compared with a target up to rounding.
_TOLERANCE = 1e-9

Ask = Callable[[PipelineDag, Costs], Plan]


@dataclass(frozen=True)
class PlannedBatch:
    """A batch under one schedule.

    Attributes:
        schedule: a key of :data:`SCHEDULES`.
        dag: its order, with the transfers where they block.
        costs: seconds of each of its instructions.
        plan: what is frozen of them, perhaps nothing.
    """

    schedule: str
    dag: PipelineDag
    costs: Costs
    plan: Plan

    @cached_property
    def timeline(self) -> Timeline:
        """The batch as planned."""
        return self.dag.simulate(self.costs.seconds(self.plan.ratios), self.costs.transfer_s, self.costs.tail_s)

    @property
    def held(self) -> tuple[int, ...]:
        """Per rank the most micro-batches that it holds at any time."""
        return most_held(self.dag.schedule)


class ProfiledBatch:
    """The batch of a profile, to be run in other orders than the one it was measured in.

    Args:
        schedule: the order of the profile.
        costs: its seconds.
        most_held: micro-batches that a stage may hold in a searched order; None: as many as 1F1B's first stage.

    Raises:
        ProfileError: several stages on a rank, or no backward of which a part is W's.
        RLFreezeError: ``most_held`` is less than 1F1B needs.
    """

    def __init__(self, schedule: Schedule, costs: Costs, most_held: int | None = None) -> None:
        costs.check(schedule.instructions)
        for rank, instructions in enumerate(schedule.ranks):
            other = next((i for i in instructions if i.stage_id != rank), None)
            if other is not None:
                raise ProfileError(
                    f"{other} is on rank {rank}: the engine's schedules have one stage a rank, stage s on rank s. Plan for the "
                    "profile's own order, without a schedule, or give a profile of such a pipeline."
                )
        self.num_stages, self.num_micro_batches = schedule.num_stages, schedule.num_micro_batches
        of_1f1b = min(self.num_stages, self.num_micro_batches)
        if most_held is not None and most_held < of_1f1b:
            raise RLFreezeError(
                f"most_held = {most_held}: must be at least {of_1f1b} (micro-batches that 1F1B's first stage holds here)."
            )
        self.most_held = of_1f1b if most_held is None else most_held
        self.whole, self.split = _whole(costs), _split(costs)
        if not any(duration.unfrozen_s > 0 for i, duration in self.split.durations.items() if i.kind == "W"):
            raise ProfileError(
                "no B of the profile takes less time frozen than unfrozen, so nothing says what part of it is W: measure "
                "frozen_s with all weights frozen, or give I and W rows in place of B."
            )

    def costs(self, name: str) -> Costs:
        """Seconds of the instructions that a schedule has: whole backwards, or split ones."""
        return self.whole if name == "stock" else self.split

    def planned(self, name: str, ask: Ask, max_freeze_ratio: float) -> PlannedBatch:
        """The batch under a schedule, with the plan that ``ask`` has for it.

        The best searched order depends on what is frozen, and the reverse: so an order for the unfrozen batch, one for the most
        that may be frozen, and one for what the better plan of these two freezes.
        """
        costs = self.costs(name)
        if name != "planned":
            place = blocking_1f1b if name == "stock" else blocking_zb_h1
            dag = PipelineDag(place(self.num_stages, self.num_micro_batches))
            return PlannedBatch(name, dag, costs, ask(dag, costs))

        found: list[PlannedBatch] = []
        failure: TargetError | None = None

        def try_order(schedule: Schedule) -> None:
            nonlocal failure
            dag = PipelineDag(schedule)
            try:
                found.append(PlannedBatch(name, dag, costs, ask(dag, costs)))
            except TargetError as error:  # in reach of another order, perhaps
                failure = error

        try_order(self._searched)
        if max_freeze_ratio > 0:
            try_order(self._search(dict.fromkeys(costs.freezable, max_freeze_ratio)))
        if max_freeze_ratio > 0 and found:
            best = min(found, key=lambda batch: _worth(batch.plan))
            try_order(self._search(best.plan.ratios, best.dag.schedule))
        if failure is not None and not found:
            raise failure
        return min(found, key=lambda batch: _worth(batch.plan))

    @cached_property
    def stock_s(self) -> float:
        """Seconds of the batch under stock's schedule with nothing frozen."""
        dag = PipelineDag(blocking_1f1b(self.num_stages, self.num_micro_batches))
        return dag.simulate(self.whole.seconds({}), self.whole.transfer_s, self.whole.tail_s).makespan

    @cached_property
    def _searched(self) -> Schedule:
        """The best order of the unfrozen batch that was found."""
        return self._search({})

    def _search(self, ratios: Mapping[Instruction, float], *known: Schedule) -> Schedule:
        batch = Batch(self.split.seconds(ratios), self.split.transfer_s, self.most_held)
        return search(best_start(self.num_stages, self.num_micro_batches, batch, *known), batch)


def compare(
    batch: ProfiledBatch,
    names: Sequence[str],
    limits: Limits,
    *,
    objective: str = "makespan",
    progress: Mapping[int, StageProgress] | None = None,
    solver: str = "auto",
    time_limit_s: float = 10.0,
) -> dict[str, PlannedBatch]:
    """By name such as "stock (1F1B), freezing": each schedule with nothing frozen, then with a plan of its own.

    Args:
        batch: what is compared.
        names: keys of :data:`SCHEDULES`.
        limits: for the plans; with a ``max_freeze_ratio`` of 0 there are none. ``target_speedup`` is over the first schedule
            with nothing frozen, so that every plan is for the same seconds.
        objective, progress, solver, time_limit_s: as in :func:`rlfreeze_ds.planning.solver.solve`.

    Raises:
        TargetError: a schedule cannot reach the target.
        SolverError: no solver gave an answer.
    """
    how = {"progress": progress, "solver": solver, "time_limit_s": time_limit_s}
    found: dict[str, PlannedBatch] = {}
    first_s = 0.0
    for name in names:
        title = SCHEDULES[name]
        found[title] = batch.planned(name, lambda dag, costs: solve(dag, costs, Limits(0.0), **how), 0.0)
        first_s = first_s or found[title].timeline.makespan
        if limits.max_freeze_ratio > 0:
            ask = _question(SCHEDULES[names[0]], first_s, title, limits, objective, how)
            found[f"{title}, freezing"] = batch.planned(name, ask, limits.max_freeze_ratio)
    return found


def _question(first: str, first_s: float, title: str, limits: Limits, objective: str, how: dict[str, Any]) -> Ask:
    """A plan within ``limits``, its target over the first schedule's seconds."""

    def ask(dag: PipelineDag, costs: Costs) -> Plan:
        own = limits
        if limits.target_speedup is not None:
            unfrozen_s = dag.simulate(costs.seconds({}), costs.transfer_s, costs.tail_s).makespan
            needed = limits.target_speedup * unfrozen_s / first_s if first_s > 0 else 1.0
            if needed > 1 + _TOLERANCE:
                own = replace(limits, target_speedup=needed)
            else:  # the schedule alone is fast enough
                own = replace(limits, target_speedup=None, max_freeze_ratio=0.0)
        try:
            return solve(dag, costs, own, objective=objective, **how)
        except TargetError as error:
            raise TargetError(
                f"{title} cannot be {limits.target_speedup:g} times as fast as {first} ({first_s:.4g} s). Over its own unfrozen "
                f"batch: {error}"
            ) from None

    return ask


def most_held(schedule: Schedule) -> tuple[int, ...]:
    """Per rank the most micro-batches that it holds at any time, from the arrival of the input (on the first rank the F) to the B
    or W.

    Args:
        schedule: with its transfers in their places.
    """
    most = []
    for rank, events in enumerate(schedule.blocking):
        now, largest = 0, 0
        for event in events:
            if isinstance(event, Transfer):
                now += event.sender.is_forward and event.sender.stage_id == rank - 1
            else:
                now += (event.is_forward and rank == 0) - event.computes_weight_gradient
            largest = max(largest, now)
        most.append(largest)
    return tuple(most)


def table(batches: Mapping[str, PlannedBatch]) -> str:
    """A row a batch; speed-ups are over the first."""
    first_s = next((batch.timeline.makespan for batch in batches.values()), 0.0)
    rows = [["", "batch (s)", "speed-up", "bubble", "mean ratio", "held by stage"]]
    for name, batch in batches.items():
        timeline, plan = batch.timeline, batch.plan
        speedup = first_s / timeline.makespan if timeline.makespan > 0 else 1.0
        cells = [f"{timeline.makespan:.4f}", f"{speedup:.2f}", f"{timeline.bubble_ratio:.1%}", f"{plan.mean_freeze_ratio:.3f}"]
        rows.append([name, *cells, " ".join(map(str, batch.held))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells, held in rows:
        middle = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True))
        lines.append(f"{name.ljust(widths[0])}  {middle}  {held}")
    return "\n".join(lines)


def to_json(batches: Mapping[str, PlannedBatch]) -> list[dict[str, Any]]:
    """The rows of :func:`table` as JSON values, each with its orders (``planning.schedule.from_commands``) and its plan."""
    return [
        {
            "name": name,
            "schedule": batch.schedule,
            "batch_s": batch.timeline.makespan,
            "bubble_ratio": batch.timeline.bubble_ratio,
            "mean_freeze_ratio": batch.plan.mean_freeze_ratio,
            "micro_batches_held": list(batch.held),
            "orders": list(to_commands(batch.dag.schedule)),
            "plan": batch.plan.to_json(),
        }
        for name, batch in batches.items()
    ]


def input_seconds(costs: Costs) -> dict[Instruction, float]:
    """Of every B that freezing shortens, the seconds that are left when all is frozen: its I, the rest is its W."""
    return {i: costs.durations[i].seconds(1.0) for i in costs.freezable if i.kind == "B"}


def _worth(plan: Plan) -> tuple[float, float]:
    """The smaller, the better: what the plan is best at, then how much it freezes."""
    if plan.objective == "progress":
        per_second = plan.expected_kept_progress / plan.planned_makespan_s if plan.planned_makespan_s > 0 else math.inf
        return (-per_second, plan.mean_freeze_ratio)
    # Rounded: plans for one target take the same seconds but for rounding, and then the one that freezes less is the better.
    return (float(f"{plan.planned_makespan_s:.4g}"), plan.mean_freeze_ratio)


def _whole(costs: Costs) -> Costs:
    """With a B for every I and W."""
    durations = {}
    for i, duration in costs.durations.items():
        if i.kind == "W":
            input_s = costs.durations[replace(i, kind="I")].unfrozen_s
            whole_s = input_s + duration.unfrozen_s
            durations[replace(i, kind="B")] = Duration(whole_s, whole_s - duration.saving_s)
        elif i.kind != "I":
            durations[i] = duration
    return replace(costs, durations=durations)


def _split(costs: Costs) -> Costs:
    """With an I and a W for every B."""
    durations = {}
    for i, duration in costs.durations.items():
        if i.kind == "B":
            input_s = duration.seconds(1.0)
            durations[replace(i, kind="I")] = Duration(input_s, input_s)
            durations[replace(i, kind="W")] = Duration(duration.saving_s, 0.0)
        else:
            durations[i] = duration
    return replace(costs, durations=durations)
