"""What solvers answer, and what becomes of wrong answers."""

import math
import shutil
import time

import pulp
import pytest

from rlfreeze_ds.errors import SolverError
from rlfreeze_ds.planning import linear_program
from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule
from rlfreeze_ds.planning.solver import Limits, available_solvers, solve


def uniform(schedule: Schedule, unfrozen_s: float, frozen_s: float, transfer_s: float = 0.0) -> Costs:
    forward, backward = Duration(1.0, 1.0), Duration(unfrozen_s, frozen_s)
    return Costs({i: forward if i.kind == "F" else backward for i in schedule.instructions}, transfer_s)


class Liar(pulp.LpSolver):
    """A solver that answers what it is told to, and keeps count."""

    def __init__(self, answer, status=pulp.LpStatusOptimal, sol_status=None, pause_s: float = 0.0) -> None:
        super().__init__(msg=False)
        self.answer, self.claim, self.pause_s, self.calls = answer, (status, sol_status), pause_s, 0

    def available(self) -> bool:
        return True

    def actualSolve(self, lp: pulp.LpProblem, **_: object) -> int:
        self.calls += 1
        time.sleep(self.pause_s)
        for variable in lp.variables():
            variable.varValue = self.answer(variable.name)
        lp.assignStatus(*self.claim)
        return self.claim[0]


def use(monkeypatch: pytest.MonkeyPatch, **solvers: pulp.LpSolver | None) -> None:
    real = linear_program.make_solver
    monkeypatch.setattr(
        linear_program, "make_solver", lambda name, *rest: solvers[name] if name in solvers else real(name, *rest)
    )


LIARS = {
    "above 1": (Liar(lambda name: 7.0), "is not between 0 and 1"),
    "below 0": (Liar(lambda name: -0.5), "is not between 0 and 1"),
    "above the mean": (Liar(lambda name: 1.0), "mean ratio 1.0 of stage 0 is above 0.5"),
    "makespan too good": (Liar(lambda name: 0.0), "it promised a makespan of 0 s"),
    "worse than uniform": (Liar(lambda name: 99.0 * (name == "makespan")), "the same ratio everywhere already gives"),
    "no value": (Liar(lambda name: None), "is None"),
    "nan": (Liar(lambda name: math.nan), "is nan"),
    "infeasible": (Liar(lambda name: 0.5, pulp.LpStatusInfeasible), "status Infeasible"),
    "not solved": (Liar(lambda name: 0.5, pulp.LpStatusNotSolved), "status Not Solved"),
    "out of time": (Liar(lambda name: 0.5, pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible), "Solution Found"),
    "crash": (Liar(lambda name: 1 / 0), "ZeroDivisionError"),
}


@pytest.mark.parametrize("kind", LIARS)
def test_a_wrong_answer_is_not_believed(monkeypatch: pytest.MonkeyPatch, published, kind: str) -> None:
    liar, message = LIARS[kind]
    use(monkeypatch, highs=liar, cbc=None)
    with pytest.raises(SolverError, match=message):
        solve(*published, Limits())
    assert liar.calls


@pytest.mark.skipif("cbc" not in available_solvers(), reason="cbc is not installed")
def test_cbc_stands_in_for_a_highs_that_fails(monkeypatch: pytest.MonkeyPatch, published) -> None:
    use(monkeypatch, highs=Liar(lambda name: 7.0))
    plan = solve(*published, Limits(0.5, 0.02))
    assert plan.solver == "cbc"
    assert plan.mean_freeze_ratio == pytest.approx(0.324, abs=6e-4)


def test_a_solver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, published) -> None:
    use(monkeypatch, highs=Liar(lambda name: 0.0, pause_s=8.0), cbc=None)
    started = time.monotonic()
    with pytest.raises(SolverError, match="it did not stop after"):
        solve(*published, Limits(), time_limit_s=0.2)
    assert time.monotonic() - started < 5


def test_rounding_is_clamped_and_fitted_to_the_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = one_f_one_b(1, 2)
    costs = uniform(schedule, 2.0, 1.0)
    # Unfrozen 6 s; at a mean of 0.5 the batch takes 5 s.
    values = {"ratio_0B0": -1e-9, "ratio_0B1": 1.0 + 1e-9, "makespan": 5.0 / 6.0}
    use(monkeypatch, highs=Liar(lambda name: values.get(name, 0.0)), cbc=None)
    plan = solve(PipelineDag(schedule), costs, Limits(0.5, 0.0))
    assert plan.ratios == {Instruction.parse("0B0"): 0.0, Instruction.parse("0B1"): 1.0}
    values["ratio_0B0"] = -0.0
    assert math.copysign(1, solve(PipelineDag(schedule), costs, Limits(0.5, 0.0)).ratio(0, 0)) == 1


def test_the_first_solve_is_used_when_the_second_fails(monkeypatch: pytest.MonkeyPatch, published, caplog) -> None:
    real = linear_program.solve_program

    def only_the_first(*args: object, makespan_bound_s: float | None = None) -> linear_program.ProgramValues:
        if makespan_bound_s is not None:
            raise SolverError("no time is left")
        return real(*args)

    monkeypatch.setattr(linear_program, "solve_program", only_the_first)
    plan = solve(*published, Limits(0.5, 0.02))
    assert plan.planned_makespan_s == pytest.approx(0.483, abs=1e-6)
    assert "not the least freezing for it: no time is left" in caplog.text


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_solvers_are_quiet_and_leave_nothing_behind(published, solver, capfd, tmp_path, monkeypatch) -> None:
    if solver not in available_solvers():
        pytest.skip(f"{solver} is not installed")
    monkeypatch.chdir(tmp_path)
    for name in ("TMPDIR", "TMP", "TEMP"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    solve(*published, Limits(), solver=solver)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_no_deprecated_part_of_pulp_is_used(published) -> None:
    for solver in available_solvers():
        solve(*published, Limits(), solver=solver)


@pytest.mark.skipif(shutil.which("false") is None, reason="needs a program that fails")
def test_a_cbc_that_fails_leaves_nothing_behind(published, tmp_path, monkeypatch) -> None:
    for name in ("TMPDIR", "TMP", "TEMP"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which("false" if name == "cbc" else name))
    with pytest.raises(SolverError, match="cbc: it failed: PulpSolverError"):
        solve(*published, Limits(), solver="cbc")
    assert list(tmp_path.iterdir()) == []
