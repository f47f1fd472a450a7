"""The linear program in PuLP, and the solvers that may solve it. Answers are not believed here, only handed on."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import pulp

from rlfreeze_ds.errors import SolverError
from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction

SOLVERS = ("highs", "cbc")
"""In the order in which "auto" tries them."""

GRACE_S = 1.0
"""Seconds beyond its own time limit after which a solver counts as hung."""


class _QuietHiGHS(pulp.HiGHS):
    """PuLP turns HiGHS's output off once it exists; highspy 1.16 prints its banner to stdout before that."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        import highspy

        class Silent(highspy.Highs):
            def enableCallbacks(self) -> None:  # called at the end of highspy's own constructor; prints the banner
                self.setOptionValue("output_flag", False)
                super().enableCallbacks()

        lp.solverModel = Silent()
        for option, value in (("output_flag", False), ("time_limit", float(self.timeLimit)), ("threads", self.threads)):
            lp.solverModel.setOptionValue(option, value)


@dataclass(frozen=True)
class FreezeProgram:
    """The constants of the program.

    Attributes:
        dag: instructions and what each waits for.
        costs: seconds of each instruction.
        ratio_caps: freezable instructions, each with the upper bound on its ratio.
        mean_caps: upper bound on the mean ratio of a stage's freezable instructions.
        equal_in_stage: whether all of a stage's ratios are one variable.
    """

    dag: PipelineDag
    costs: Costs
    ratio_caps: Mapping[Instruction, float]
    mean_caps: Mapping[int, float]
    equal_in_stage: bool = False


@dataclass(frozen=True)
class ProgramValues:
    """What the solver answered, unchecked."""

    ratios: dict[Instruction, float]
    makespan_s: float


def available_solvers() -> list[str]:
    """Names of the solvers that can be used here, best first."""
    return [name for name in SOLVERS if make_solver(name, 1.0) is not None]


def make_solver(name: str, time_limit_s: float, folder: str | None = None) -> pulp.LpSolver | None:
    """A PuLP solver that prints nothing, or None where it is not installed.

    Args:
        name: one of :data:`SOLVERS`.
        time_limit_s: the solver's own limit, in seconds.
        folder: where CBC puts its files.
    """
    if name == "highs":
        # One thread: the program is small, and the ranks of a job share the cores.
        made = _QuietHiGHS(msg=False, timeLimit=time_limit_s, threads=1)
    else:
        # PuLP 3 bundles a CBC; from PuLP 4 on it is on PATH or in an extra package.
        bundled = getattr(getattr(pulp.apis, "coin_api", None), "pulp_cbc_path", "")
        path = shutil.which("cbc") or (bundled if os.access(bundled, os.X_OK) else None)
        made = pulp.COIN_CMD(msg=False, timeLimit=time_limit_s, path=path)
        if folder is not None:
            made.tmpDir = folder
    return made if made.available() else None


def solve_program(
    program: FreezeProgram, solver: str, time_limit_s: float, *, makespan_bound_s: float | None = None
) -> ProgramValues:
    """Least makespan; with ``makespan_bound_s``, least sum of ratios for a makespan within that.

    Raises:
        SolverError: the solver failed, ran out of time, or did not call its answer optimal.
    """
    if time_limit_s <= 0:
        raise SolverError("no time is left")
    # In units of the unfrozen makespan, so that a solver's absolute tolerances are relative ones.
    unit_s = program.dag.simulate(program.costs.seconds({}), program.costs.transfer_s).makespan
    bound = None if makespan_bound_s is None else makespan_bound_s / unit_s
    problem, ratios, makespan = _build(program, unit_s, bound)
    # CBC talks through files; PuLP leaves them behind when it fails, so they get a folder of their own.
    with tempfile.TemporaryDirectory(prefix="rlfreeze_lp_", ignore_cleanup_errors=True) as folder:
        made = make_solver(solver, time_limit_s, folder)
        if made is None:
            raise SolverError("it is not installed")
        _run(problem, made, time_limit_s)
    if problem.status != pulp.LpStatusOptimal or problem.sol_status != pulp.LpSolutionOptimal:
        status = pulp.LpStatus.get(problem.status, problem.status)
        raise SolverError(f"status {status} ({pulp.LpSolution.get(problem.sol_status, problem.sol_status)})")
    values = {i: _value(variable) for i, variable in ratios.items()}
    return ProgramValues(values, _value(makespan) * unit_s)


def _build(
    program: FreezeProgram, unit_s: float, bound: float | None
) -> tuple[pulp.LpProblem, dict[Instruction, pulp.LpVariable], pulp.LpVariable]:
    """Variables: a start per instruction, a ratio per freezable instruction, the makespan; seconds in ``unit_s``."""
    graph, durations = program.dag.graph, program.costs.durations
    problem = pulp.LpProblem("freeze", pulp.LpMinimize)
    start = {i: problem.add_variable(f"start_{i}", 0) for i in program.dag.order}
    ratio = _ratio_variables(problem, program)
    makespan = problem.add_variable("makespan", 0, bound)
    problem += makespan if bound is None else pulp.lpSum(ratio.values())
    for i in program.dag.order:
        # later >= start_i + unfrozen_i - ratio_i * saving_i + transfer, for everything that waits for i
        end = [(start[i], -1.0)]
        if i in ratio:
            end.append((ratio[i], durations[i].saving_s / unit_s))
        seconds = durations[i].unfrozen_s
        for successor, edge in graph.adj[i].items():
            wait = (seconds + program.costs.transfer_s * edge["num_transfers"]) / unit_s
            problem += pulp.LpAffineExpression([(start[successor], 1.0), *end]) >= wait
        if not graph.adj[i]:
            problem += pulp.LpAffineExpression([(makespan, 1.0), *end]) >= seconds / unit_s
    for stage_id, cap in program.mean_caps.items():
        stage = [variable for i, variable in ratio.items() if i.stage_id == stage_id]
        if stage:
            problem += pulp.lpSum(stage) <= cap * len(stage)
    return problem, ratio, makespan


def _ratio_variables(problem: pulp.LpProblem, program: FreezeProgram) -> dict[Instruction, pulp.LpVariable]:
    caps = program.ratio_caps
    if not program.equal_in_stage:
        return {i: problem.add_variable(f"ratio_{i}", 0, cap) for i, cap in caps.items()}
    lowest: dict[int, float] = {}
    for i, cap in caps.items():
        lowest[i.stage_id] = min(cap, lowest.get(i.stage_id, cap))
    stage = {stage_id: problem.add_variable(f"ratio_of_stage_{stage_id}", 0, cap) for stage_id, cap in lowest.items()}
    return {i: stage[i.stage_id] for i in caps}


def _run(problem: pulp.LpProblem, solver: pulp.LpSolver, time_limit_s: float) -> None:
    """Solve in a thread that is left behind when the solver does not keep its own time limit."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            problem.solve(solver)
        except Exception as error:  # noqa: BLE001  whatever a solver does, the caller has a fall-back
            errors.append(error)

    thread = threading.Thread(target=work, name="rlfreeze-lp", daemon=True)
    thread.start()
    thread.join(time_limit_s + GRACE_S)
    if thread.is_alive():
        raise SolverError(f"it did not stop after {time_limit_s:.3g} s")
    if errors:
        raise SolverError(f"it failed: {type(errors[0]).__name__}: {errors[0]}")


def _value(variable: pulp.LpVariable) -> float:
    value = variable.varValue
    if value is None or not math.isfinite(value):
        raise SolverError(f"its value for {variable.name} is {value}")
    return float(value)
