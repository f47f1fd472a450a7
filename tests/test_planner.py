"""Planning beside training: the process that solves, and jobs that go on while it does, whatever becomes of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlfreeze_ds import plan_process
from rlfreeze_ds.config import FreezeConfig, PlanningConfig
from rlfreeze_ds.decision import PREDICTED_STEPS, batch_seconds, decide
from rlfreeze_ds.errors import SolverError
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.plan_process import PlanProcess, worker_environment
from rlfreeze_ds.plan_request import PlanAnswer, PlanRequest, answer, check_answer
from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fit import StageFit
from rlfreeze_ds.planning.planned_order import common_order, held
from rlfreeze_ds.planning.progress import StageGradients
from rlfreeze_ds.planning.schedule import from_commands, to_commands
from rlfreeze_ds.planning.transfers import blocking_zb_h1
from tests import jobs
from tests.harness import run_ranks
from tests.planning.test_main import python
from tests.test_engine import QUICK, build, dp_rank, slow_weight_gradients

ROOT = Path(__file__).parents[1]
MICRO_BATCHES = 4
UNITS = 4
ORDERS = ("F F B F B F B B", "F B F B F B F B")
REQUEST = PlanRequest(
    step=7,
    config=FreezeConfig(enabled=True),
    orders=ORDERS,
    shapes=tuple(StageShape(s, ("a", "b", "c", "d"), (0.1, 0.2, 0.3, 0.4), tuple(range(UNITS)), UNITS) for s in range(2)),
    fits=(StageFit(1.0, 2.0, 0.9, 0.8), StageFit(1.0, 2.1, 1.1)),
    eligible=((True, False, True, True), (True,) * UNITS),
    gradients=(StageGradients((1.0,) * 4, (0.2,) * 4, (2.0,) * 4, (1, 2, 3, 4)),) * 2,
    num_replicas=1,
    normalised=True,
    plan_ratios=None,
    present=None,
    steady=(),
    unfrozen_makespan_s=16.0,
    transfer_s=0.0,
)


def worker(code: str) -> Callable[[], list[str]]:
    """A command for another worker: ``code`` runs before the real one serves, with its module as ``worker``."""
    text = f"import os, sys, time\nfrom rlfreeze_ds import plan_worker as worker\nsolve = worker.answered\n{code}\n"
    return lambda: [sys.executable, "-P", "-c", text + "worker.main(sys.argv[1:])"]


def gate(path: Path | str) -> str:
    """Code that waits until somebody makes the file ``path``: a slow solver that no busy machine makes too fast or too slow."""
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.02)"


def gated(path: Path | str) -> str:
    """A worker that solves once ``path`` is there."""
    return f"def answered(text):\n    {gate(path)}\n    return solve(text)\nworker.answered = answered"


HANGS = "worker.answered = lambda text: time.sleep(1000)"
SECOND = """
asked = []
def answered(text):
    asked.append(text)
    return {} if len(asked) == 2 else solve(text)
worker.answered = answered
"""
"""A worker whose second answer is another."""
NO_SOLVER = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pulp", "highspy"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanProcess]:
    monkeypatch.setattr(plan_process, "GRACE_S", 30.0)
    process = PlanProcess()
    yield process
    process.stop()


# -- requests and answers ------------------------------------------------------------------------------------------------


def test_a_request_and_its_answer_survive_json() -> None:
    assert PlanRequest.from_json(REQUEST.to_json()) == REQUEST
    answered = answer(REQUEST)
    assert PlanAnswer.from_json(answered.to_json()) == answered
    assert answered.decision.mean_freeze_ratio > 0
    check_answer(REQUEST, answered)


def test_an_answer_is_the_decision_for_the_transfer_that_meets_the_measured_batch() -> None:
    answered = answer(REQUEST)
    dag = PipelineDag(one_f_one_b(2, MICRO_BATCHES))
    assert from_commands(ORDERS).ranks == dag.schedule.ranks
    assert answered.decision == decide(7, REQUEST.config, dag, REQUEST.stages(), answered.transfer_s)
    assert answered.transfer_s > 0 and answered.decision.unfrozen_makespan_s == pytest.approx(16.0)
    assert answer(replace(REQUEST, unfrozen_makespan_s=None, transfer_s=0.5)).transfer_s == 0.5


def test_a_plan_for_zb_h1_freezes_w_and_predicts_the_batch_of_i_and_w() -> None:
    orders = to_commands(blocking_zb_h1(2, MICRO_BATCHES))
    first = StageFit(1.0, 2.0, 0.9, weight_s=1.0, weight_saving_s=0.7)
    fits = (first, StageFit(1.0, 2.1, 1.1, weight_s=1.3, weight_saving_s=1.1))
    config = FreezeConfig(enabled=True, selection="spread")
    request = replace(REQUEST, orders=orders, fits=fits, unfrozen_makespan_s=None, config=config)
    assert PlanRequest.from_json(request.to_json()) == request
    decision = answer(request).decision
    check_answer(request, answer(request))
    schedule = from_commands(orders)
    dag = PipelineDag(schedule)

    def seconds(stage: int, kind: str, share: float) -> float:
        fit = fits[stage]
        return {
            "F": 1.0,
            "I": fit.backward_s - fit.weight_s - share * (fit.weight_gradient_s - fit.weight_saving_s),
            "W": fit.weight_s - share * fit.weight_saving_s,
        }[kind]

    unfrozen = dag.simulate({i: seconds(i.stage_id, i.kind, 0.0) for i in schedule.instructions}).makespan
    assert decision.unfrozen_makespan_s == pytest.approx(unfrozen)
    assert unfrozen < answer(replace(request, orders=ORDERS)).decision.unfrozen_makespan_s
    assert 0 < decision.mean_freeze_ratio <= 0.5 + 1e-9
    predicted = []
    for step in range(request.step, request.step + PREDICTED_STEPS):
        masks = [decision.masks(request.config, shape, step) for shape in request.shapes]
        shares = [[sum(0.1 * (unit + 1) for unit in mask) for mask in row] for row in masks]
        durations = {i: seconds(i.stage_id, i.kind, shares[i.stage_id][i.micro_batch_id]) for i in schedule.instructions}
        predicted.append(dag.simulate(durations).makespan)
    assert decision.predicted_makespan_s == pytest.approx(sum(predicted) / len(predicted))
    assert decision.predicted_makespan_s < 0.95 * unfrozen


def planned_request() -> PlanRequest:
    config = FreezeConfig.model_validate({"enabled": True, "selection": "spread", "planning": {"schedule": "planned"}})
    fits = tuple(StageFit(1.0, 3.1, 1.4, weight_s=1.5, weight_saving_s=1.4) for _ in range(2))
    orders = to_commands(blocking_zb_h1(2, MICRO_BATCHES))
    return replace(REQUEST, orders=orders, fits=fits, unfrozen_makespan_s=None, config=config, transfer_s=0.02)


def test_a_planned_order_holds_no_more_and_takes_no_longer_than_zb_h1() -> None:
    request = planned_request()
    answered = answer(request)
    check_answer(request, answered)
    assert PlanAnswer.from_json(answered.to_json()) == answered
    fixed = replace(request, config=request.config.model_copy(update={"planning": PlanningConfig(schedule="zb-h1")}))
    assert answer(fixed).decision.orders == ()
    assert answered.decision.predicted_makespan_s <= answer(fixed).decision.predicted_makespan_s * 1.001
    order = common_order(from_commands(answered.decision.orders))
    assert max(held(order, 2)) <= 2


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ((), "an order that cannot run|stages and micro-batches"),
        (("F SA RG I W", "RA F I SG W"), "micro-batches of the order"),
        (("F SA " * 4 + "RG I " * 4 + "W " * 4, "RA F I SG " * 4 + "W " * 4), "wait for each other"),
        (("F SA RG I " * 4 + "W " * 4, "RA F I SG " * 4 + "W " * 4), "micro-batches held = 4, must be at most 2"),
    ],
)
def test_an_order_that_could_not_run_or_holds_too_much_is_refused(orders: tuple[str, ...], message: str) -> None:
    request = planned_request()
    answered = answer(request)
    with pytest.raises(SolverError, match=message):
        check_answer(request, replace(answered, decision=replace(answered.decision, orders=orders)))


def test_the_next_plan_keeps_an_order_that_is_as_good() -> None:
    request = planned_request()
    first = answer(request).decision
    again = answer(replace(request, step=request.step + 20, present=first, transfer_s=0.02)).decision
    assert again.predicted_makespan_s <= 1.006 * first.predicted_makespan_s
    unknown = replace(first, orders=("F I W", "F I W"))  # of a checkpoint, say, under another limit
    check_answer(request, answer(replace(request, present=unknown)))


def planned_job(max_freeze_ratio: float) -> dict[str, Any]:
    planning = {"background": False, "schedule": "planned", "most_held": 3, "max_freeze_ratio": max_freeze_ratio}
    block = {**QUICK, "planning": planning}
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=block))
    ran, losses = [], []
    for step in range(20):
        wanted = engine.freeze_controller.orders(MICRO_BATCHES)
        losses.append(float(engine.train_batch(jobs.batches(step, MICRO_BATCHES))))
        ran.append((wanted[engine.stage_id] if wanted else None, engine._order))
    decision = engine.freeze_controller.decision
    return {"ran": ran, "losses": losses, "orders": decision.orders, "ratio": decision.mean_freeze_ratio}


@pytest.mark.parametrize("max_freeze_ratio", [0.5, 0.0])
def test_a_job_runs_the_orders_that_were_planned(max_freeze_ratio: float) -> None:
    results = run_ranks(planned_job, 2, max_freeze_ratio)
    first = to_commands(blocking_zb_h1(2, MICRO_BATCHES))
    for stage, found in enumerate(results):
        assert found["orders"] == results[0]["orders"] != () and found["losses"] == results[0]["losses"]
        assert all(wanted is None for wanted, _ in found["ran"][: 7 if max_freeze_ratio else 3])
        assert found["ratio"] == 0 or max_freeze_ratio > 0
        assert all(order == (first[stage] if wanted is None else wanted) for wanted, order in found["ran"])
        assert any(wanted is not None for wanted, _ in found["ran"])


def test_the_transfer_follows_the_steps_under_the_present_plan() -> None:
    present, stages = answer(REQUEST).decision, REQUEST.stages()
    dag = PipelineDag(from_commands(ORDERS))

    def seconds(step: int, transfer_s: float) -> float:
        return batch_seconds(dag, stages, [present.masks(REQUEST.config, shape, step) for shape in REQUEST.shapes], transfer_s)

    steady = tuple((step, seconds(step, 0.03)) for step in range(20, 28))
    assert answer(replace(REQUEST, present=present, steady=steady)).transfer_s == pytest.approx(0.03, rel=1e-6)
    assert answer(replace(REQUEST, present=present)).transfer_s == answer(REQUEST).transfer_s != pytest.approx(0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 6}, "step = 6"),
        ({"eligible": ((True,) * UNITS,) * 2}, "eligible"),
        ({"ratios": ((0.1,) * MICRO_BATCHES,)}, "number of ratios"),
        ({"ratios": ((0.1,) * 3,) * 2}, "number of ratios"),
        ({"ratios": ((0.9,) * MICRO_BATCHES,) * 2}, "mean ratio of stage 0 = 0.9, must be at most 0.5"),
        ({"ratios": ((-0.1, 0, 0, 0),) * 2}, "micro-batch 0 = -0.1"),
        ({"ratios": ((0, 0, 0, float("nan")),) * 2}, "micro-batch 3 = nan"),
        ({"ratios": ((0, "x", 0, 0),) * 2}, "micro-batch 1 = x"),
        ({"mean_freeze_ratio": 2.0}, "mean ratio"),
        ({"predicted_makespan_s": float("inf")}, "predicted_makespan_s"),
        ({"unfrozen_makespan_s": -1.0}, "unfrozen_makespan_s"),
    ],
)
def test_an_absurd_answer_is_refused(changes: dict[str, Any], message: str) -> None:
    answered = answer(REQUEST)
    with pytest.raises(SolverError, match="absurd plan") as caught:
        check_answer(REQUEST, replace(answered, decision=replace(answered.decision, **changes)))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"decision": 3}', '{"decision": {"step": 1}, "transfer_s": 0}'])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(SolverError, match="no answer but"):
        PlanAnswer.from_json(text)


# -- the process ---------------------------------------------------------------------------------------------------------


def test_the_worker_imports_neither_torch_nor_deepspeed() -> None:
    result = python("import rlfreeze_ds.plan_worker; print('imported')")
    assert result.stdout == "imported\n", result.stderr


def test_the_environment_knows_nothing_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    environment = worker_environment()
    assert not environment.keys() & set(names) and environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_one_process_answers_request_after_request_as_the_pure_function_does(process: PlanProcess) -> None:
    expected = answer(REQUEST)
    pids = set()
    for step in (7, 8):
        process.send(replace(REQUEST, step=step).to_json(), 60.0)
        answered = PlanAnswer.from_json(process.receive(wait=True))
        assert replace(answered.decision, step=7) == replace(expected.decision, verdict=answered.decision.verdict)
        pids.add(process._worker.pid)
    (pid,) = pids
    folder = process._folder
    assert folder.is_dir() and os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    process.stop()
    assert gone(pid) and not folder.exists()


@pytest.mark.parametrize(
    ("code", "time_limit_s", "message"),
    [
        ("os.kill(os.getpid(), 9)", 30.0, r"^solver killed by signal 9$"),
        ("worker.answered = lambda text: os.abort()", 30.0, r"^solver killed by signal 6"),
        ("worker.answered = lambda text: os._exit(3)", 30.0, r"^solver ended with code 3$"),
        ("worker.answered = lambda text: [][0]", 30.0, r"solver ended with code 1: .*IndexError: list index out of range$"),
        ("import no_such_module", 30.0, r"solver ended with code 1: .*No module named 'no_such_module'$"),
        ("os.write(1, b'hello')", 30.0, r"^solver said b'hello'"),
        (HANGS, 0.5, r"^no answer within 1.5 s, solver killed$"),
    ],
    ids=["killed", "aborts", "ends", "raises", "cannot import", "prints", "hangs"],
)
def test_a_worker_that_fails_is_an_error_and_the_next_request_gets_another(
    process: PlanProcess, monkeypatch: pytest.MonkeyPatch, code: str, time_limit_s: float, message: str
) -> None:
    if code == HANGS:
        monkeypatch.setattr(plan_process, "GRACE_S", 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(plan_process, "worker_command", worker(code))
        files = len(os.listdir("/proc/self/fd"))
        process.send(REQUEST.to_json(), time_limit_s)
        pid, folder = process._worker.pid, process._folder
        with pytest.raises(SolverError, match=message):
            process.receive(wait=True)
        assert gone(pid) and not folder.exists() and len(os.listdir("/proc/self/fd")) == files
        with pytest.raises(SolverError, match="not running"):
            process.receive(wait=True)
    monkeypatch.setattr(plan_process, "GRACE_S", 30.0)
    process.send(REQUEST.to_json(), 30.0)
    assert PlanAnswer.from_json(process.receive(wait=True)).decision.step == 7


def test_a_worker_that_dies_between_two_requests_is_no_failure(process: PlanProcess) -> None:
    process.send(REQUEST.to_json(), 30.0)
    process.receive(wait=True)
    pid = process._worker.pid
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    process.send(REQUEST.to_json(), 30.0)
    assert PlanAnswer.from_json(process.receive(wait=True)).decision.step == 7
    assert process._worker.pid != pid


def test_a_worker_that_cannot_start_leaves_nothing_behind(
    process: PlanProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_process, "worker_command", lambda: ["/no/such/python"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No such file"):
        process.send(REQUEST.to_json(), 1.0)
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == files


def test_what_a_solver_prints_is_no_answer(process: PlanProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    printing = "worker.answered = lambda text: (print('answered'), os.system('echo answered'), solve(text))[2]"
    monkeypatch.setattr(plan_process, "worker_command", worker(printing))
    process.send(REQUEST.to_json(), 30.0)
    assert PlanAnswer.from_json(process.receive(wait=True)).decision.step == 7


def test_a_request_larger_than_a_pipe_is_sent_before_anybody_reads_it(
    process: PlanProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_process, "worker_command", worker(gate(tmp_path / "go")))
    process.send(REQUEST.to_json() + " " * 2_000_000, 30.0)
    assert process.receive(wait=False) is None
    (tmp_path / "go").touch()
    assert PlanAnswer.from_json(process.receive(wait=True)).decision.step == 7


def test_what_solver_is_missing_comes_back_as_the_reason(process: PlanProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_process, "worker_command", worker(NO_SOLVER))
    process.send(REQUEST.to_json(), 30.0)
    with pytest.raises(SolverError, match="^no linear-program solver: HiGHS or CBC is not installed"):
        PlanAnswer.from_json(process.receive(wait=True))


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from rlfreeze_ds import plan_process
process = plan_process.PlanProcess()
{before}
process.send({request!r}, 60.0)
{then}
"""


def script(folder: Path, then: str, before: str = "") -> subprocess.Popen[str]:
    """A parent of its own, in a folder with a trap, that finds the package on ``sys.path`` alone."""
    (folder / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"TMPDIR": str(folder)}
    code = SCRIPT.format(root=str(ROOT), request=REQUEST.to_json(), before=before, then=then)
    path = folder / "scripts" / "parent.py"
    path.parent.mkdir()
    path.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(path)], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("pending", [False, True])
def test_a_parent_that_exits_takes_its_worker_along_without_a_word(tmp_path: Path, pending: bool) -> None:
    show = "print(process._worker.pid)"
    parent = script(tmp_path, show if pending else f"assert process.receive(wait=True).startswith('{{')\n{show}")
    output, errors = parent.communicate(timeout=60)
    assert parent.returncode == 0 and errors == ""
    assert gone(int(output)) and not list(tmp_path.glob("rlfreeze*"))


@pytest.mark.parametrize("solving", [False, True])
def test_a_worker_ends_with_a_parent_that_was_killed(tmp_path: Path, solving: bool) -> None:
    show = "print(process._worker.pid, flush=True)\nimport time; time.sleep(100)"
    command = worker(f"open({str(tmp_path / 'started')!r}, 'w')\n" + gated(tmp_path / "go"))()
    before = f"plan_process.worker_command = lambda: {command!r}" if solving else ""
    parent = script(tmp_path, show if solving else f"process.receive(wait=True)\n{show}", before)
    pid = int(parent.stdout.readline())
    while solving and not (tmp_path / "started").exists():
        time.sleep(0.02)
    assert alive(pid)
    parent.kill()
    parent.communicate(timeout=60)
    (tmp_path / "go").touch()
    assert gone(pid) and not list(tmp_path.glob("rlfreeze*"))


# -- jobs ----------------------------------------------------------------------------------------------------------------

BACKGROUND = QUICK | {"planning": {"background": True, "time_limit_s": 60.0, "drift_tolerance": 1e9}, "ramp_steps": 4}


def train_step(engine: Any, step: int) -> dict[str, Any]:
    """One step, and what the controller thought of it."""
    controller = engine.freeze_controller
    slow_weight_gradients(engine, 0.001)
    before = controller.phase, controller.phase_step
    engine.train_batch(jobs.batches(step, MICRO_BATCHES, dp_rank(engine)))
    return {
        "phase": before, "pending": controller.planner.pending, "asked": controller.asked,
        "decided": controller.decision.to_json() if controller.decision else None, "step": step,
        "frozen": sum(map(len, engine._step_masks.masks)),
    }  # fmt: skip


def worker_pid(engine: Any) -> int | None:
    process = engine.freeze_controller.planner._process._worker
    return process.pid if process else None


def slow_solver_job(dp: int, go: str) -> dict[str, Any]:
    """The solver is done when 20 steps have gone by while it solved, or never."""
    plan_process.worker_command = worker(gated(go))
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=BACKGROUND | {"replan_interval": 1000}, dp=dp))
    steps: list[dict[str, Any]] = []
    while len(steps) < 4000 and not (steps and steps[-1]["phase"] == ("steady", 0)):
        steps.append(train_step(engine, len(steps)))
        if sum(step["pending"] for step in steps) == 20 and engine.global_rank == 0:
            Path(go).touch()
    return {"steps": steps, "pid": worker_pid(engine)}


@pytest.mark.parametrize("dp", [1, 2])
def test_steps_go_on_while_a_slow_solver_solves_and_all_ranks_take_its_plan_at_once(tmp_path: Path, dp: int) -> None:
    results = run_ranks(slow_solver_job, 2 * dp, dp, str(tmp_path / "go"))
    for key in ("phase", "pending", "asked", "decided"):
        assert len({json.dumps([step[key] for step in result["steps"]]) for result in results}) == 1, key
    steps = results[0]["steps"]
    asked = 3 + 4
    waiting = [step for step in steps if step["pending"]]
    assert waiting[0]["step"] == asked - 1 and waiting[0]["asked"] == (asked, MICRO_BATCHES)
    assert len(waiting) >= 20
    # Nothing is frozen meanwhile, and the ramp has not begun.
    after = waiting[-1]["step"] + 1
    assert {tuple(step["phase"]) for step in steps[asked : after + 1]} == {("ramp", 0)}
    assert [tuple(step["phase"]) for step in steps[after + 1 :]] == [("ramp", k) for k in range(4)] + [("steady", 0)]
    for result in results:
        assert not any(step["frozen"] for step in result["steps"][asked : after + 2])
    assert any(step["frozen"] for result in results for step in result["steps"][after + 2 :])
    assert results[0]["pid"] and gone(results[0]["pid"]) and not any(result["pid"] for result in results[1:])


def failing_job(what: str) -> dict[str, Any]:
    """A first plan, then a request that fails by ``what``, then another."""
    plan_process.worker_command = worker(SECOND.format("'garbage'" if what == "garbage" else "time.sleep(1000)"))
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=BACKGROUND | {"replan_interval": 12}))
    controller = engine.freeze_controller
    warnings = collected_warnings()
    steps: list[dict[str, Any]] = []
    decisions: list[str] = []
    pids = []
    while len(steps) < 4000 and len(decisions) < 2:
        hopeless = what == "hangs" and len(decisions) == 1 and not warnings
        plan_process.GRACE_S = -58.0 if hopeless else 30.0  # beyond the time limit of 60 s
        steps.append(train_step(engine, len(steps)))
        decided = steps[-1]["decided"]
        if decided is not None and decided not in decisions:
            decisions.append(decided)
        # The step that takes the first plan may ask for the second, which is answered by the next.
        second = len(decisions) == 1 and controller.planner.pending and not warnings
        if second and engine.global_rank == 0 and not pids:
            pids.append(worker_pid(engine))
            if what == "killed":
                os.kill(pids[0], signal.SIGKILL)
    return {"steps": steps, "warnings": warnings, "pids": pids, "decisions": decisions}


def collected_warnings() -> list[str]:
    """Grows with every warning of this rank."""
    import logging

    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    logging.getLogger("rlfreeze_ds").addHandler(Collect())
    return lines


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("killed", "solver killed by signal 9"),
        ("hangs", "no answer within 2 s, solver killed"),
        ("garbage", "no answer but 'garbage'"),
    ],
)
def test_a_plan_that_fails_keeps_the_last_and_the_next_one_works(what: str, reason: str) -> None:
    results = run_ranks(failing_job, 2, what)
    assert len(results[0]["decisions"]) == 2 and results[0]["decisions"] == results[1]["decisions"]
    for key in ("phase", "pending", "asked", "decided"):
        assert [step[key] for step in results[0]["steps"]] == [step[key] for step in results[1]["steps"]], key
    assert results[1]["warnings"] == []
    (warning,) = results[0]["warnings"]
    assert reason in warning and warning.endswith("the last one stays") and "no new plan" in warning
    assert len(results[0]["pids"]) == 1 and gone(*results[0]["pids"])
    # An interval after the request that failed it asked again, not at every step.
    asked = sorted({step["asked"][0] for step in results[0]["steps"] if step["asked"]})
    assert len(asked) >= 3 and all(later - earlier >= 12 for earlier, later in itertools.pairwise(asked))
    assert any(step["frozen"] for result in results for step in result["steps"] if step["asked"] == (asked[1], MICRO_BATCHES))


def saving_job(folder: str) -> dict[str, Any]:
    plan_process.worker_command = worker(gated(f"{folder}/go"))
    config = jobs.ds_config(MICRO_BATCHES, rlfreeze=BACKGROUND | {"replan_interval": 1000})
    engine = build(2, config)
    for step in range(9):
        train_step(engine, step)
    pending = engine.freeze_controller.planner.pending
    Path(folder, "go").touch()
    engine.save_checkpoint(folder)
    settled = engine.freeze_controller.decision is not None and not engine.freeze_controller.planner.pending
    uninterrupted = [train_step(engine, step) for step in range(9, 18)]
    resumed = build(2, config)
    resumed.load_checkpoint(folder)
    again = [train_step(resumed, step) for step in range(9, 18)]
    keys = ("phase", "pending", "asked", "decided", "frozen")
    return {
        "pending": pending, "settled": settled,
        "steps": [[[step[key] for key in keys] for step in run] for run in (uninterrupted, again)],
        "weights": [jobs.weights(run) for run in (engine, resumed)],
        "froze": sum(step["frozen"] for step in uninterrupted),
    }  # fmt: skip


def test_a_save_with_a_request_pending_waits_for_it_and_both_runs_go_on_alike(tmp_path: Path) -> None:
    results = run_ranks(saving_job, 2, str(tmp_path))
    for result in results:
        assert result["pending"] and result["settled"]
        assert result["steps"][0] == result["steps"][1]
        before, after = result["weights"]
        assert all(before[name].equal(after[name]) for name in before)
    assert sum(result["froze"] for result in results) > 0


def guard_job() -> list[dict[str, Any]]:
    """The loss jumps while the second request, that nobody answers, is pending."""
    plan_process.worker_command = worker(SECOND.format("time.sleep(1000)"))
    plan_process.GRACE_S = 1000.0
    guard = {"tolerance": 0.5, "patience": 2, "cooldown_steps": 4}
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=BACKGROUND | {"replan_interval": 25, "guard": guard}))
    steps: list[dict[str, Any]] = []
    jump = None
    while len(steps) < 4000 and (jump is None or len(steps) < jump + 12):
        if jump is None and steps and steps[-1]["pending"] and steps[-1]["phase"][0] == "steady":
            jump = len(steps)
        if jump is not None and len(steps) < jump + 4:
            slow_weight_gradients(engine, 0.001)
            given = [(x, 50 * y) for x, y in jobs.batches(len(steps), MICRO_BATCHES)]
            jobs_batches, jobs.batches = jobs.batches, lambda *_, given=given: iter(given)
            steps.append(train_step(engine, len(steps)))
            jobs.batches = jobs_batches
        else:
            steps.append(train_step(engine, len(steps)))
    return steps[jump:] if jump is not None else []


def test_the_guard_thaws_while_a_request_is_pending() -> None:
    for steps in run_ranks(guard_job, 2):
        assert len(steps) == 12 and all(step["pending"] for step in steps)
        phases = [step["phase"][0] for step in steps]
        # The guard knows a loss one step late, and two in a row are a jump.
        assert phases[:3] == ["steady"] * 3 and phases[3:7] == ["cooldown"] * 4 and phases[7] == "ramp"
        assert not any(step["frozen"] for step in steps[3:7])


def ratio_zero_job() -> tuple[int | None, bool]:
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=BACKGROUND | {"planning": {"max_freeze_ratio": 0}}))
    steps = [train_step(engine, step) for step in range(12)]
    return worker_pid(engine), any(step["pending"] for step in steps)


def test_nothing_to_freeze_starts_no_process() -> None:
    assert run_ranks(ratio_zero_job, 2) == [(None, False)] * 2


def destroyed_job() -> list[int | None]:
    engine = build(1, jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK))
    for step in range(8):
        train_step(engine, step)
    before = worker_pid(engine)
    engine.destroy()
    return [before, worker_pid(engine)]


def test_destroying_the_engine_ends_the_process() -> None:
    ((before, after),) = run_ranks(destroyed_job, 1)
    assert before and after is None and gone(before)
