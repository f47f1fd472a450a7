"""DAG + costs + limits -> linear program -> plan.

Objective "makespan" is TimelyFreeze's program (arXiv 2602.05754), solved twice: first for the least makespan, then for the
least freezing that keeps the makespan within ``time_slack`` of it. The first alone freezes time that buys nothing.

Objective "progress" asks for the most progress per second instead, in one program: progress is a concave function of the
stages' mean ratios (:mod:`rlfreeze_ds.planning.progress`), seconds are linear.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rlfreeze_ds.errors import ConfigError, SolverError, TargetError
from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fold import Fold
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import WORTHWHILE_GAIN, Plan, mean_ratios
from rlfreeze_ds.planning.progress import StageProgress, equal_stages, kept_by

if TYPE_CHECKING:
    from rlfreeze_ds.planning.linear_program import FreezeProgram

TOLERANCE = 1e-6
"""Relative error up to which a solver's answer is believed."""

FULL_SIZE = 1024
"""Instructions up to which a batch is solved as it is; larger ones are folded."""

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
        target_speedup: unfrozen over planned makespan to reach with the least freezing, > 1; then ``time_slack`` is not used.

    Raises:
        ConfigError: a number out of range.
    """

    max_freeze_ratio: float = 0.5
    time_slack: float = 0.02
    stage_ratio_cap: Mapping[int, float] = field(default_factory=dict)
    stage_mean_cap: Mapping[int, float] = field(default_factory=dict)
    equal_in_stage: bool = False
    target_speedup: float | None = None

    def __post_init__(self) -> None:
        meaning = "share of a stage's weight-gradient time that may be skipped"
        _check_range("max_freeze_ratio", self.max_freeze_ratio, 1.0, meaning)
        _check_range("time_slack", self.time_slack, math.inf, "share of the least makespan given up for less freezing")
        for stage_id, cap in self.stage_ratio_cap.items():
            _check_range(f"stage_ratio_cap[{stage_id}]", cap, 1.0, "upper bound on each ratio of the stage")
        for stage_id, cap in self.stage_mean_cap.items():
            _check_range(f"stage_mean_cap[{stage_id}]", cap, 1.0, meaning)
        if self.target_speedup is not None and not 1 < self.target_speedup < math.inf:
            raise ConfigError(
                f"target_speedup = {self.target_speedup}: must be a finite number > 1 (unfrozen over planned makespan)."
            )

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


def solve(
    dag: PipelineDag,
    costs: Costs,
    limits: Limits,
    *,
    objective: str = "makespan",
    progress: Mapping[int, StageProgress] | None = None,
    solver: str = "auto",
    time_limit_s: float = 10.0,
    full: bool | None = None,
) -> Plan:
    """The plan with the least freezing among those within ``limits.time_slack`` of the least makespan; with the objective
    "progress" the one with the most progress per second, which freezes nothing where the gain is below 2 %.

    Args:
        dag: the batch.
        costs: seconds of each of its instructions.
        limits: what may be frozen.
        objective: "makespan" or "progress".
        progress: what each stage contributes to it; None: all alike, at the worst case of the noise.
        solver: "highs", "cbc", or "auto": HiGHS, then CBC.
        time_limit_s: seconds for everything together. When the second solve does not end in time, the ratios of the
            first are taken: as fast, but with more freezing than needed.
        full: give every micro-batch variables of its own; None: up to :data:`FULL_SIZE` instructions.

    Raises:
        ProfileError: the costs do not fit the schedule, or hold a NaN, infinite or negative number.
        TargetError: ``limits.target_speedup`` cannot be reached.
        SolverError: no solver is installed, or none gave an answer that satisfies the limits.
        ConfigError: an unknown solver or objective, or a time limit that is not > 0.
    """
    if objective not in ("makespan", "progress"):
        raise ConfigError(f'objective = {objective!r}: must be "makespan" or "progress".')
    if solver not in ("auto", "highs", "cbc"):
        raise ConfigError(f'solver = {solver!r}: must be "auto", "highs" or "cbc".')
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise ConfigError(f"time_limit_s = {time_limit_s}: must be a finite number of seconds > 0.")
    costs.check(dag.schedule.instructions)
    if progress is None:
        progress = equal_stages(dag.schedule.num_stages, dag.schedule.num_micro_batches)
    question = _Question(dag, costs, limits, objective, progress)
    if not any(limits.ratio_cap(i.stage_id) > 0 and limits.mean_cap(i.stage_id) > 0 for i in costs.freezable):
        return question.plan(dict.fromkeys(costs.freezable, 0.0), "none")

    installed = available_solvers()
    candidates = installed if solver == "auto" else [name for name in installed if name == solver]
    if not candidates:
        wanted = "HiGHS or CBC" if solver == "auto" else repr(solver)
        raise SolverError(
            f"no linear-program solver: {wanted} is not installed (found: {', '.join(installed) or 'none'}). "
            'Run `pip install pulp highspy`, or put a `cbc` executable on PATH; "auto" takes what there is.'
        )
    deadline = time.monotonic() + time_limit_s
    fold = Fold(dag, full=len(dag.order) <= FULL_SIZE if full is None else full)
    failures = []
    for index, name in enumerate(candidates):
        # A solver that hangs may not use up the time of the one that stands in for it.
        share_s = (deadline - time.monotonic()) * (1.0 if index + 1 == len(candidates) else 0.75)
        try:
            return question.plan(question.ratios(fold, name, share_s), name)
        except SolverError as error:
            failures.append(f"{name}: {error}")
            if index + 1 < len(candidates):
                _log.warning("%s; trying %s", failures[-1], candidates[index + 1])
    raise SolverError(
        f"no plan within {time_limit_s:g} s ({'; '.join(failures)}): "
        "raise the time limit, try the other solver, or check the durations."
    )


@dataclass(frozen=True)
class _Question:
    dag: PipelineDag
    costs: Costs
    limits: Limits
    objective: str
    progress: Mapping[int, StageProgress]

    @cached_property
    def mean_caps(self) -> dict[int, float]:
        return {stage_id: self.limits.mean_cap(stage_id) for stage_id in range(self.dag.schedule.num_stages)}

    @cached_property
    def ratio_caps(self) -> dict[int, float]:
        return {stage_id: self.limits.ratio_cap(stage_id) for stage_id in range(self.dag.schedule.num_stages)}

    @cached_property
    def unfrozen_s(self) -> float:
        return self.makespan({})

    def makespan(self, ratios: Mapping[Instruction, float]) -> float:
        """Simulated."""
        return self.dag.simulate(self.costs.seconds(ratios), self.costs.transfer_s, self.costs.tail_s).makespan

    def kept(self, ratios: Mapping[Instruction, float]) -> float:
        """Share of the progress that is kept."""
        _, means = mean_ratios(ratios, self.dag.schedule.num_stages)
        return kept_by(self.progress, dict(enumerate(means)))

    def ratios(self, fold: Fold, name: str, time_limit_s: float) -> dict[Instruction, float]:
        """The answer of one solver, re-checked on the simulator."""
        from rlfreeze_ds.planning.linear_program import FreezeProgram

        deadline = time.monotonic() + time_limit_s
        program = FreezeProgram(fold, self.costs, self.ratio_caps, self.mean_caps, self.limits.equal_in_stage)
        if self.objective == "progress":
            return self._most_progress(program, name, deadline)
        return self._least_freezing(program, name, deadline)

    def _least_freezing(self, program: FreezeProgram, name: str, deadline: float) -> dict[Instruction, float]:
        """The two solves with one solver."""
        from rlfreeze_ds.planning.linear_program import solve_program

        fastest, least_s = self._fastest(program, name, (deadline - time.monotonic()) / 2)
        bound_s = (1 + self.limits.time_slack) * least_s
        if self.limits.target_speedup is not None:
            bound_s = self.unfrozen_s / self.limits.target_speedup
            if least_s > bound_s * (1 + TOLERANCE):
                raise TargetError(
                    f"target_speedup = {self.limits.target_speedup:g}: at most {self.unfrozen_s / least_s:.3f} can be reached "
                    f"here ({self.unfrozen_s:.4g} s -> {least_s:.4g} s at max_freeze_ratio {self.limits.max_freeze_ratio:g}). "
                    "Ask for less, or raise max_freeze_ratio."
                )
        try:
            values = solve_program(program, name, deadline - time.monotonic(), makespan_bound_s=bound_s)
            ratios = self._checked(values.ratios)
            planned_s = self.makespan(ratios)
            if not planned_s <= bound_s * (1 + TOLERANCE):
                raise SolverError(f"the makespan may be {bound_s:g} s, its ratios give {planned_s:g} s")
            return ratios
        except SolverError as error:
            _log.warning("%s found the least makespan, but not the least freezing for it: %s", name, error)
            return fastest

    def _fastest(self, program: FreezeProgram, name: str, time_limit_s: float) -> tuple[dict[Instruction, float], float]:
        """Ratios with the least makespan, and that."""
        from rlfreeze_ds.planning.linear_program import solve_program

        values = solve_program(program, name, time_limit_s)
        ratios = self._checked(values.ratios)
        least_s = self.makespan(ratios)
        if not least_s <= values.makespan_s * (1 + TOLERANCE):
            raise SolverError(f"it promised a makespan of {values.makespan_s:g} s, its ratios give {least_s:g} s")
        uniform = {i: min(self.ratio_caps[i.stage_id], self.mean_caps[i.stage_id]) for i in self.costs.freezable}
        uniform_s = self.makespan(uniform)
        if not least_s <= uniform_s * (1 + TOLERANCE):
            raise SolverError(f"its makespan is {least_s:g} s, the same ratio everywhere already gives {uniform_s:g} s")
        return ratios, least_s

    def _most_progress(self, program: FreezeProgram, name: str, deadline: float) -> dict[Instruction, float]:
        from rlfreeze_ds.planning.linear_program import solve_program

        curves = {stage_id: stage.curve() for stage_id, stage in self.progress.items()}
        values = solve_program(program, name, deadline - time.monotonic(), progress=curves)
        ratios = self._checked(values.ratios)
        planned_s = self.makespan(ratios)
        if not planned_s <= values.makespan_s * (1 + TOLERANCE):
            raise SolverError(f"it promised a makespan of {values.makespan_s:g} s, its ratios give {planned_s:g} s")
        nothing = dict.fromkeys(ratios, 0.0)
        gain = self.kept(ratios) / planned_s * self.unfrozen_s / self.kept(nothing)
        return ratios if gain >= 1 + WORTHWHILE_GAIN else nothing

    def _checked(self, ratios: Mapping[Instruction, float]) -> dict[Instruction, float]:
        """Ratios clamped to their bounds and fitted to the mean caps where only rounding was off.

        Raises:
            SolverError: a ratio is not a number, or a bound is missed by more than rounding.
        """
        clamped: dict[Instruction, float] = {}
        for instruction in self.costs.freezable:
            ratio, cap = ratios[instruction], self.ratio_caps[instruction.stage_id]
            if not -TOLERANCE <= ratio <= cap + TOLERANCE:
                raise SolverError(f"ratio {ratio} of {instruction} is not between 0 and {cap:g}")
            clamped[instruction] = min(max(ratio, 0.0), cap) + 0.0  # + 0.0 turns -0.0 into 0.0
        _, means = mean_ratios(clamped, len(self.mean_caps))
        for stage_id, mean in enumerate(means):
            cap = self.mean_caps[stage_id]
            if mean > cap + TOLERANCE:
                raise SolverError(f"mean ratio {mean} of stage {stage_id} is above {cap:g}")
        shrink = [min(1.0, self.mean_caps[s] / mean) if mean > 0 else 1.0 for s, mean in enumerate(means)]
        return {i: ratio * shrink[i.stage_id] for i, ratio in clamped.items()}

    def plan(self, ratios: Mapping[Instruction, float], solver: str) -> Plan:
        """The ratios with what they mean."""
        num_stages, transfer_s = self.dag.schedule.num_stages, self.costs.transfer_s
        unfrozen = self.dag.simulate(self.costs.seconds({}), transfer_s, self.costs.tail_s)
        planned = self.dag.simulate(self.costs.seconds(ratios), transfer_s, self.costs.tail_s)
        critical_s = TOLERANCE * planned.makespan
        critical = {i.stage_id for i, slack_s in planned.slack().items() if i in ratios and slack_s <= critical_s}
        mean, stage_means = mean_ratios(ratios, num_stages)
        kept = self.kept(ratios) / (self.kept({}) or 1.0)
        return Plan(
            ratios=dict(ratios),
            num_stages=num_stages,
            num_micro_batches=self.dag.schedule.num_micro_batches,
            unfrozen_makespan_s=unfrozen.makespan,
            planned_makespan_s=planned.makespan,
            all_frozen_makespan_s=self.makespan(dict.fromkeys(self.costs.freezable, 1.0)),
            mean_freeze_ratio=mean,
            stage_freeze_ratio=stage_means,
            bubble_ratio=planned.bubble_ratio,
            unfrozen_bubble_ratio=unfrozen.bubble_ratio,
            solver=solver,
            objective=self.objective,
            max_freeze_ratio=float(self.limits.max_freeze_ratio),
            time_slack=float(self.limits.time_slack),
            expected_kept_progress=kept,
            expected_loss_per_second_gain=kept * unfrozen.makespan / planned.makespan if planned.makespan > 0 else 1.0,
            critical_stages=tuple(sorted(critical)),
        )


def _check_range(name: str, value: float, largest: float, meaning: str) -> None:
    if not (math.isfinite(value) and 0 <= value <= largest):
        allowed = "a finite number >= 0" if largest == math.inf else f"between 0 and {largest:g}"
        raise ConfigError(f"{name} = {value}: must be {allowed} ({meaning}).")
