"""DAG + costs + limits -> linear program -> plan.

The program is TimelyFreeze's (arXiv 2602.05754), solved twice: first for the least makespan, then for the least
freezing that keeps the makespan within ``time_slack`` of it. The first alone freezes time that buys nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlfreeze_ds.errors import ConfigError, SolverError
from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import Plan, mean_ratios

TOLERANCE = 1e-6
"""Relative error up to which a solver's answer is believed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What the plan may do.

    Attributes:
        max_freeze_ratio: upper bound on the mean ratio of a stage's freezable instructions, in [0, 1].
        time_slack: share of the least makespan to give up for lower ratios, >= 0.
        stage_ratio_cap: per stage, upper bound on each single ratio; absent means 1.
        stage_mean_cap: per stage, upper bound on the stage's mean ratio; it can only lower ``max_freeze_ratio``.
        equal_in_stage: one ratio for all instructions of a stage, for masks that hold for a whole step.

    Raises:
        ConfigError: a number out of range.
    """

    max_freeze_ratio: float = 0.5
    time_slack: float = 0.02
    stage_ratio_cap: Mapping[int, float] = field(default_factory=dict)
    stage_mean_cap: Mapping[int, float] = field(default_factory=dict)
    equal_in_stage: bool = False

    def __post_init__(self) -> None:
        meaning = "share of a stage's weight-gradient time that may be skipped"
        _check_range("max_freeze_ratio", self.max_freeze_ratio, 1.0, meaning)
        _check_range("time_slack", self.time_slack, math.inf, "share of the least makespan given up for less freezing")
        for stage_id, cap in self.stage_ratio_cap.items():
            _check_range(f"stage_ratio_cap[{stage_id}]", cap, 1.0, "upper bound on each ratio of the stage")
        for stage_id, cap in self.stage_mean_cap.items():
            _check_range(f"stage_mean_cap[{stage_id}]", cap, 1.0, meaning)

    def ratio_cap(self, stage_id: int) -> float:
        """Upper bound on each single ratio of the stage."""
        return self.stage_ratio_cap.get(stage_id, 1.0)

    def mean_cap(self, stage_id: int) -> float:
        """Upper bound on the mean ratio of the stage."""
        return min(self.max_freeze_ratio, self.stage_mean_cap.get(stage_id, 1.0))


def available_solvers() -> list[str]:
    """Names of the linear-program solvers that can be used here, best first; empty without PuLP."""
    try:
        from rlfreeze_ds.planning import linear_program
    except ImportError:
        return []
    return linear_program.available_solvers()


def solve(dag: PipelineDag, costs: Costs, limits: Limits, *, solver: str = "auto", time_limit_s: float = 10.0) -> Plan:
    """The plan with the least freezing among those within ``limits.time_slack`` of the least makespan.

    Args:
        dag: the batch.
        costs: seconds of each of its instructions.
        limits: what may be frozen.
        solver: "highs", "cbc", or "auto": HiGHS, then CBC.
        time_limit_s: seconds for everything together. When the second solve does not end in time, the ratios of the
            first are taken: as fast, but with more freezing than needed.

    Raises:
        ProfileError: the costs do not fit the schedule, or hold a NaN, infinite or negative number.
        SolverError: no solver is installed, or none gave an answer that satisfies the limits.
        ConfigError: an unknown solver or a time limit that is not > 0.
    """
    if solver not in ("auto", "highs", "cbc"):
        raise ConfigError(f'solver = {solver!r}: must be "auto", "highs" or "cbc".')
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise ConfigError(f"time_limit_s = {time_limit_s}: must be a finite number of seconds > 0.")
    costs.check(dag.schedule.instructions)
    caps = {i: min(limits.ratio_cap(i.stage_id), 1.0) for i in costs.freezable}
    if not any(cap > 0 and limits.mean_cap(i.stage_id) > 0 for i, cap in caps.items()):
        return _plan(dag, costs, limits, dict.fromkeys(costs.freezable, 0.0), "none")

    installed = available_solvers()
    candidates = installed if solver == "auto" else [name for name in installed if name == solver]
    if not candidates:
        wanted = "HiGHS or CBC" if solver == "auto" else repr(solver)
        raise SolverError(
            f"no linear-program solver: {wanted} is not installed (found: {', '.join(installed) or 'none'}). "
            'Run `pip install pulp highspy`, or put a `cbc` executable on PATH; "auto" takes what there is.'
        )
    deadline = time.monotonic() + time_limit_s
    failures = []
    for index, name in enumerate(candidates):
        # A solver that hangs may not use up the time of the one that stands in for it.
        share_s = (deadline - time.monotonic()) * (1.0 if index + 1 == len(candidates) else 0.75)
        try:
            return _plan(dag, costs, limits, _least_freezing(dag, costs, limits, caps, name, share_s), name)
        except SolverError as error:
            failures.append(f"{name}: {error}")
            if index + 1 < len(candidates):
                _log.warning("%s; trying %s", failures[-1], candidates[index + 1])
    raise SolverError(
        f"no plan within {time_limit_s:g} s ({'; '.join(failures)}): "
        "raise the time limit, try the other solver, or check the durations."
    )


def _least_freezing(
    dag: PipelineDag, costs: Costs, limits: Limits, caps: Mapping[Instruction, float], name: str, time_limit_s: float
) -> dict[Instruction, float]:
    """The two solves with one solver; every answer is re-checked on the simulator."""
    from rlfreeze_ds.planning.linear_program import FreezeProgram, solve_program

    deadline = time.monotonic() + time_limit_s
    mean_caps = {stage_id: limits.mean_cap(stage_id) for stage_id in range(dag.schedule.num_stages)}
    program = FreezeProgram(dag, costs, caps, mean_caps, limits.equal_in_stage)
    values = solve_program(program, name, time_limit_s / 2)
    fastest = _checked(values.ratios, caps, mean_caps)
    least_s = _makespan(dag, costs, fastest)
    if not least_s <= values.makespan_s * (1 + TOLERANCE):
        raise SolverError(f"it promised a makespan of {values.makespan_s:g} s, its ratios give {least_s:g} s")
    uniform_s = _makespan(dag, costs, {i: min(cap, mean_caps[i.stage_id]) for i, cap in caps.items()})
    if not least_s <= uniform_s * (1 + TOLERANCE):
        raise SolverError(f"its makespan is {least_s:g} s, the same ratio everywhere already gives {uniform_s:g} s")
    bound_s = (1 + limits.time_slack) * least_s
    try:
        values = solve_program(program, name, deadline - time.monotonic(), makespan_bound_s=bound_s)
        ratios = _checked(values.ratios, caps, mean_caps)
        planned_s = _makespan(dag, costs, ratios)
        if not planned_s <= bound_s * (1 + TOLERANCE):
            raise SolverError(f"the makespan may be {bound_s:g} s, its ratios give {planned_s:g} s")
        return ratios
    except SolverError as error:
        _log.warning("%s found the least makespan, but not the least freezing for it: %s", name, error)
        return fastest


def _checked(
    ratios: Mapping[Instruction, float], caps: Mapping[Instruction, float], mean_caps: Mapping[int, float]
) -> dict[Instruction, float]:
    """Ratios clamped to their bounds and fitted to the mean caps where only rounding was off.

    Raises:
        SolverError: a ratio is not a number, or a bound is missed by more than rounding.
    """
    clamped: dict[Instruction, float] = {}
    for instruction, cap in caps.items():
        ratio = ratios[instruction]
        if not -TOLERANCE <= ratio <= cap + TOLERANCE:
            raise SolverError(f"ratio {ratio} of {instruction} is not between 0 and {cap:g}")
        clamped[instruction] = min(max(ratio, 0.0), cap) + 0.0  # + 0.0 turns -0.0 into 0.0
    _, means = mean_ratios(clamped, len(mean_caps))
    for stage_id, mean in enumerate(means):
        cap = mean_caps[stage_id]
        if mean > cap + TOLERANCE:
            raise SolverError(f"mean ratio {mean} of stage {stage_id} is above {cap:g}")
    shrink = [min(1.0, mean_caps[s] / mean) if mean > 0 else 1.0 for s, mean in enumerate(means)]
    return {i: ratio * shrink[i.stage_id] for i, ratio in clamped.items()}


def _makespan(dag: PipelineDag, costs: Costs, ratios: Mapping[Instruction, float]) -> float:
    return dag.simulate(costs.seconds(ratios), costs.transfer_s).makespan


def _plan(dag: PipelineDag, costs: Costs, limits: Limits, ratios: Mapping[Instruction, float], solver: str) -> Plan:
    num_stages = dag.schedule.num_stages
    unfrozen = dag.simulate(costs.seconds({}), costs.transfer_s)
    planned = dag.simulate(costs.seconds(ratios), costs.transfer_s)
    critical_s = TOLERANCE * planned.makespan
    critical = {i.stage_id for i, slack_s in planned.slack().items() if i in ratios and slack_s <= critical_s}
    mean, stage_means = mean_ratios(ratios, num_stages)
    return Plan(
        ratios=dict(ratios),
        num_stages=num_stages,
        num_micro_batches=dag.schedule.num_micro_batches,
        unfrozen_makespan_s=unfrozen.makespan,
        planned_makespan_s=planned.makespan,
        all_frozen_makespan_s=_makespan(dag, costs, dict.fromkeys(costs.freezable, 1.0)),
        mean_freeze_ratio=mean,
        stage_freeze_ratio=stage_means,
        bubble_ratio=planned.bubble_ratio,
        unfrozen_bubble_ratio=unfrozen.bubble_ratio,
        solver=solver,
        max_freeze_ratio=float(limits.max_freeze_ratio),
        time_slack=float(limits.time_slack),
        critical_stages=tuple(sorted(critical)),
    )


def _check_range(name: str, value: float, largest: float, meaning: str) -> None:
    if not (math.isfinite(value) and 0 <= value <= largest):
        allowed = "a finite number >= 0" if largest == math.inf else f"between 0 and {largest:g}"
        raise ConfigError(f"{name} = {value}: must be {allowed} ({meaning}).")
