"""The linear program in PuLP, and the solvers that may solve it. Answers are not believed here, only handed on."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import pulp

from rlfreeze_ds.errors import SolverError
from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.fold import Fold, Track
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.progress import Curve

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
        fold: instructions and what each waits for.
        costs: seconds of each instruction.
        ratio_caps: upper bound on each ratio of a stage.
        mean_caps: upper bound on the mean ratio of a stage's freezable instructions.
        equal_in_stage: whether all of a stage's ratios are one variable.
    """

    fold: Fold
    costs: Costs
    ratio_caps: Mapping[int, float]
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
    program: FreezeProgram,
    solver: str,
    time_limit_s: float,
    *,
    makespan_bound_s: float | None = None,
    progress: Mapping[int, Curve] | None = None,
) -> ProgramValues:
    """Least makespan; with ``makespan_bound_s``, least sum of ratios for a makespan within that; with ``progress``, most
    progress per second.

    Args:
        progress: per stage, its part of the progress of a batch as a function of its mean ratio.

    Raises:
        SolverError: the solver failed, ran out of time, or did not call its answer optimal.
    """
    if time_limit_s <= 0:
        raise SolverError("no time is left")
    # In units of the unfrozen makespan, so that a solver's absolute tolerances are relative ones.
    unit_s = program.fold.dag.simulate(program.costs.seconds({}), program.costs.transfer_s, program.costs.tail_s).makespan
    model = _Model(program, unit_s, scaled=progress is not None)
    if progress is not None:
        model.maximise_progress_per_second(progress)
    elif makespan_bound_s is not None:
        model.minimise_freezing(makespan_bound_s / unit_s)
    else:
        model.problem += model.makespan
    # CBC talks through files; PuLP leaves them behind when it fails, so they get a folder of their own.
    with tempfile.TemporaryDirectory(prefix="rlfreeze_lp_", ignore_cleanup_errors=True) as folder:
        made = make_solver(solver, time_limit_s, folder)
        if made is None:
            raise SolverError("it is not installed")
        _run(model.problem, made, time_limit_s)
    problem = model.problem
    if problem.status != pulp.LpStatusOptimal or problem.sol_status != pulp.LpSolutionOptimal:
        status = pulp.LpStatus.get(problem.status, problem.status)
        raise SolverError(f"status {status} ({pulp.LpSolution.get(problem.sol_status, problem.sol_status)})")
    return model.values()


class _Model:
    """The program in PuLP. Variables: a start per instruction, a ratio per freezable one, the makespan; seconds in ``unit_s``.

    Of a folded batch, only instructions at knots have variables; a value elsewhere is a mixture of these.

    ``scaled``: every variable is divided by the makespan, and the variable ``one`` takes the place of the number 1 (Charnes and
    Cooper, 1962). What is then largest is a sum over the makespan.
    """

    def __init__(self, program: FreezeProgram, unit_s: float, *, scaled: bool) -> None:
        self._program, self._unit_s = program, unit_s
        self._fold, costs = program.fold, program.costs
        self.problem = pulp.LpProblem("freeze", pulp.LpMinimize)
        self._start = {
            (track, knot): self.problem.add_variable(f"start_{self._fold.instruction(track, knot)}", 0)
            for track, knots in self._fold.knots.items()
            for knot in knots
        }
        self._one = self.problem.add_variable("one", 0) if scaled else None
        self._count = self._fold_counts()
        self._ratio = self._ratio_variables()
        self.makespan = self.problem.add_variable("makespan", 1 if scaled else 0, 1 if scaled else None)
        self._unfrozen = self._fold.averages({i: d.unfrozen_s / unit_s for i, d in costs.durations.items()})
        self._saving = self._fold.averages({i: costs.durations[i].saving_s / unit_s for i in costs.freezable})
        self._add_rules()
        self._add_caps()

    # -- objectives ---------------------------------------------------------------------------------------------------

    def minimise_freezing(self, bound: float) -> None:
        """Least sum of ratios with a makespan of at most ``bound``."""
        self.makespan.upBound = bound
        self.problem += pulp.LpAffineExpression([term for terms in self._sums().values() for term in terms])

    def maximise_progress_per_second(self, progress: Mapping[int, Curve]) -> None:
        """Each curve as the least of the lines through its neighbouring points, which it is where it is concave."""
        assert self._one is not None
        sums, kept = self._sums(), []
        for stage_id, curve in progress.items():
            variable = self.problem.add_variable(f"progress_of_stage_{stage_id}", 0)
            kept.append(variable)
            if stage_id not in sums:
                self.problem += variable <= curve[0][1] * self._one
                continue
            count = sum(weight for _, weight in sums[stage_id])
            for (x, y), (next_x, next_y) in pairwise(curve):
                slope = (next_y - y) / (next_x - x)
                mean = [(ratio, -slope * weight / count) for ratio, weight in sums[stage_id]]
                self.problem += pulp.LpAffineExpression([(variable, 1.0), *mean, (self._one, slope * x - y)]) <= 0
        self.problem += -pulp.lpSum(kept)

    # -- constraints --------------------------------------------------------------------------------------------------

    def _at_least(self, terms: list[tuple[pulp.LpVariable, float]], bound: float) -> None:
        if self._one is not None:
            terms, bound = [*terms, (self._one, -bound)], 0.0
        self.problem += pulp.LpAffineExpression(terms) >= bound

    def _end(self, track: Track, position: int) -> tuple[list[tuple[pulp.LpVariable, float]], float]:
        """The negative of when an instruction ends: terms, and the constant on the other side."""
        terms, seconds = [], 0.0
        for knot, weight in self._fold.weights(track, position):
            terms.append((self._start[track, knot], -weight))
            seconds += weight * self._unfrozen[track][knot]
            ratio = self._ratio.get((track, knot))
            if ratio is not None:
                terms.append((ratio, weight * self._saving[track][knot]))
        return terms, seconds

    def _add_rules(self) -> None:
        for rule in self._fold.rules:
            transfer = rule.num_transfers * self._program.costs.transfer_s / self._unit_s
            for position in rule.positions:
                terms, seconds = self._end(rule.before, position)
                later = self._fold.weights(rule.after, position + rule.shift)
                terms += [(self._start[rule.after, knot], weight) for knot, weight in later]
                self._at_least(_summed(terms), seconds + transfer)
        for track, position, rank in self._fold.ends:
            terms, seconds = self._end(track, position)
            tail = self._program.costs.tail_s.get(rank, 0.0) / self._unit_s
            self._at_least(_summed([(self.makespan, 1.0), *terms]), seconds + tail)

    def _add_caps(self) -> None:
        sums = self._sums()
        for stage_id, cap in self._program.mean_caps.items():
            if stage_id in sums:
                count = sum(weight for _, weight in sums[stage_id])
                self._at_least([(ratio, -weight) for ratio, weight in sums[stage_id]], -cap * count)
        if self._one is not None:  # else the bounds of the variables say it
            for name, ratio in {variable.name: variable for variable in self._ratio.values()}.items():
                self._at_least([(ratio, -1.0)], -self._caps[name])

    # -- ratios -------------------------------------------------------------------------------------------------------

    def _fold_counts(self) -> dict[tuple[Track, int], float]:
        """How many freezable instructions each knot stands for."""
        counts: dict[tuple[Track, int], float] = {}
        for instruction in self._program.costs.freezable:
            track, position = self._fold.place(instruction)
            for knot, weight in self._fold.weights(track, position):
                counts[track, knot] = counts.get((track, knot), 0.0) + weight
        return counts

    def _ratio_variables(self) -> dict[tuple[Track, int], pulp.LpVariable]:
        variables: dict[tuple[Track, int], pulp.LpVariable] = {}
        self._caps: dict[str, float] = {}
        of_stage: dict[int, pulp.LpVariable] = {}
        for track, knot in self._count:
            stage_id = track[0]
            cap = self._program.ratio_caps[stage_id]
            name = f"of_stage_{stage_id}" if self._program.equal_in_stage else str(self._fold.instruction(track, knot))
            if not self._program.equal_in_stage or stage_id not in of_stage:
                of_stage[stage_id] = self.problem.add_variable(f"ratio_{name}", 0, cap if self._one is None else None)
                self._caps[of_stage[stage_id].name] = cap
            variables[track, knot] = of_stage[stage_id]
        return variables

    def _sums(self) -> dict[int, list[tuple[pulp.LpVariable, float]]]:
        """Per stage the sum of its ratios, as terms."""
        sums: dict[int, list[tuple[pulp.LpVariable, float]]] = {}
        for (track, knot), count in self._count.items():
            sums.setdefault(track[0], []).append((self._ratio[track, knot], count))
        return {stage_id: _summed(terms) for stage_id, terms in sums.items()}

    def values(self) -> ProgramValues:
        """The solver's answer, for every instruction."""
        one = 1.0 if self._one is None else _value(self._one)
        if one <= 0:
            raise SolverError(f"its makespan is 1 / {one}")
        knots = {key: _value(variable) / one for key, variable in self._ratio.items()}
        ratios = {}
        for instruction in self._program.costs.freezable:
            track, position = self._fold.place(instruction)
            ratios[instruction] = sum(weight * knots[track, knot] for knot, weight in self._fold.weights(track, position))
        return ProgramValues(ratios, _value(self.makespan) / one * self._unit_s)


def _summed(terms: list[tuple[pulp.LpVariable, float]]) -> list[tuple[pulp.LpVariable, float]]:
    """Each variable once: PuLP keeps the last of equal ones."""
    names = {variable.name: variable for variable, _ in terms}
    if len(names) == len(terms):
        return terms
    total = dict.fromkeys(names, 0.0)
    for variable, coefficient in terms:
        total[variable.name] += coefficient
    return [(variable, total[name]) for name, variable in names.items()]


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
