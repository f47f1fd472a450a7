"""The trade-off between freezing and batch time: for each makespan the least freezing that reaches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.planning.progress import StageProgress
from rlfreeze_ds.planning.solver import Limits, solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIELDS = (
    "planned_makespan_s", "speedup", "mean_freeze_ratio", "expected_kept_progress", "expected_loss_per_second_gain",
)  # fmt: skip


@dataclass(frozen=True)
class Frontier:
    """Plans from the unfrozen batch to the shortest one, each with the least mean ratio for its makespan.

    The mean ratio is a convex function of the makespan, for it is the value of a linear program in one of its bounds.
    """

    plans: tuple[Plan, ...]

    @property
    def knee(self) -> int:
        """Index of the plan after which a shorter batch costs most more freezing: the farthest from the line between the ends."""
        first, last = self.plans[0], self.plans[-1]
        time = first.planned_makespan_s - last.planned_makespan_s
        freezing = last.mean_freeze_ratio - first.mean_freeze_ratio
        if time <= 0 or freezing <= 0:
            return 0
        saved = [(first.planned_makespan_s - plan.planned_makespan_s) / time for plan in self.plans]
        frozen = [(plan.mean_freeze_ratio - first.mean_freeze_ratio) / freezing for plan in self.plans]
        return max(range(len(saved)), key=lambda index: saved[index] - frozen[index])

    @property
    def best(self) -> int:
        """Index of the plan with the most expected loss per second."""
        return max(range(len(self.plans)), key=lambda index: self.plans[index].expected_loss_per_second_gain)

    def table(self) -> str:
        """For people; a row a plan."""
        rows = [["makespan_s", "speedup", "mean ratio", "kept progress", "loss per second", ""]]
        for index, plan in enumerate(self.plans):
            notes = [note for note, marked in (("knee", self.knee), ("most loss per second", self.best)) if marked == index]
            rows.append(
                [
                    f"{plan.planned_makespan_s:.4f}", f"{plan.speedup:.3f}", f"{plan.mean_freeze_ratio:.3f}",
                    f"{plan.expected_kept_progress:.3f}", f"{plan.expected_loss_per_second_gain:.3f}", ", ".join(notes),
                ]
            )  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        return "\n".join(
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows
        )

    def to_json(self) -> dict[str, Any]:
        """The table's numbers."""
        return {
            "points": [
                {name: getattr(plan, name) for name in _FIELDS} | {"stage_freeze_ratio": list(plan.stage_freeze_ratio)}
                for plan in self.plans
            ],
            "knee": self.knee,
            "most_loss_per_second": self.best,
        }

    def draw(self, ax: Axes) -> None:
        """Mean ratio and expected loss per second over the makespan, the knee marked."""
        seconds = [plan.planned_makespan_s for plan in self.plans]
        ax.plot(seconds, [plan.mean_freeze_ratio for plan in self.plans], "o-", label="mean freeze ratio")
        gains = [plan.expected_loss_per_second_gain for plan in self.plans]
        ax.plot(seconds, gains, "s--", label="expected loss per second (unfrozen = 1)")
        for index, name in ((self.knee, "knee"), (self.best, "most loss per second")):
            plan = self.plans[index]
            height = plan.mean_freeze_ratio if name == "knee" else plan.expected_loss_per_second_gain
            ax.annotate(name, (plan.planned_makespan_s, height), xytext=(4, 8), textcoords="offset points")
        ax.set_xlabel("batch (s)")
        ax.set_ylim(0, 1.15 * max(gains))
        ax.grid(alpha=0.3)
        ax.legend()


def frontier(
    dag: PipelineDag,
    costs: Costs,
    limits: Limits,
    *,
    num_points: int = 17,
    progress: Mapping[int, StageProgress] | None = None,
    solver: str = "auto",
    time_limit_s: float = 10.0,
) -> Frontier:
    """Plans at evenly spaced makespans, the unfrozen batch and the shortest one among them.

    Args:
        limits: as for :func:`rlfreeze_ds.planning.solver.solve`; ``time_slack`` and ``target_speedup`` are not used.
        num_points: >= 2.
        time_limit_s: seconds for each plan.

    Raises:
        as :func:`rlfreeze_ds.planning.solver.solve`
    """

    def plan(changed: Limits) -> Plan:
        return solve(dag, costs, changed, progress=progress, solver=solver, time_limit_s=time_limit_s)

    unfrozen = plan(replace(limits, max_freeze_ratio=0.0, target_speedup=None))
    fastest = plan(replace(limits, time_slack=0.0, target_speedup=None))
    plans = [unfrozen]
    for makespan_s in _between(unfrozen.planned_makespan_s, fastest.planned_makespan_s, num_points):
        plans.append(plan(replace(limits, target_speedup=unfrozen.planned_makespan_s / makespan_s)))
    if fastest.planned_makespan_s < unfrozen.planned_makespan_s:
        plans.append(fastest)
    return Frontier(tuple(plans))


def _between(longest: float, shortest: float, num_points: int) -> Iterator[float]:
    if longest <= shortest * (1 + 1e-9):
        return
    for index in range(1, num_points - 1):
        yield longest + (shortest - longest) * index / (num_points - 1)
