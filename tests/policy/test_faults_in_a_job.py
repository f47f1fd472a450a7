"""What may go wrong with a policy server, each while a real job of two ranks trains: no step waits, losses are finite, one line
tells, the thresholds stay, and the processes end.

The server is the real one where that says more, else a stub; it runs outside of the job, as it would.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import http.server
import io
import json
import logging
import math
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from rlfreeze_ds.__main__ import main
from rlfreeze_ds.policy import auto_server, policies
from rlfreeze_ds.policy.client import PolicyClient
from rlfreeze_ds.policy.observation import SIZE
from tests import jobs
from tests.harness import rank_main
from tests.policy.stub_server import TOKEN, Handler, StubServer, until
from tests.policy.test_serve import ROOT, Process, needs_extra
from tests.test_engine import QUICK, build, slow_weight_gradients

FEWEST_STEPS = 60
MOST_S = 120.0
"""Seconds after which a job counts as hung."""

INTERVAL, PATIENCE = 3, 4
SLOW_S = 0.1
"""That a step may be slower than the median because of a fault."""

ENDS_S = 6.0
"""Seconds from the last step to the end of the process: two of them may go into telling the server."""

ENGINES: list[Any] = []
"""Of a rank that does not destroy its own: as in a script, it lives to the end."""


@dataclass(frozen=True)
class Took:
    """Seconds by the clock, and how long threads of the process could have run meanwhile but had no core."""

    seconds: float
    starved_s: float


def starved_s() -> float:
    """Of this process since its start, as the kernel counts it; 0 where it does not. Waiting for anything else is no part."""
    nanoseconds = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError), open(path) as file:  # a thread may have ended
            nanoseconds += int(file.read().split()[1])
    return nanoseconds / 1e9


# -- the job, on every rank --------------------------------------------------------------------------------------------------


def watched_job(policy: dict[str, Any], delays: dict[str, float], destroy: bool, counts: Any, enough: Any) -> dict[str, Any]:
    """Trains until ``enough`` is set, and says what it saw: seconds of steps, and of the policy's calls in each of them."""
    lines: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))
    logging.getLogger("rlfreeze_ds").addHandler(handler)
    policies.PolicyClient = functools.partial(PolicyClient, **delays)
    auto_server.server_command = lambda: [sys.executable, "-P", "-m", "tests.policy.stub_child"]

    block = QUICK | {"policy": policy, "selection": "strict", "guard": {"enabled": False}}
    engine = build(2, jobs.ds_config(4, rlfreeze=block))
    slow_weight_gradients(engine, 0.002)
    controller = engine.freeze_controller
    tuner, group = controller.thresholds.tuner, controller.group
    _plan_once(controller)
    calls: dict[str, list[Took]] = {"offer": [], "take": []}
    if tuner is not None:
        for name, took in calls.items():
            setattr(tuner.policy, name, _timed(getattr(tuner.policy, name), took))
    losses: list[float] = []
    steps: list[Took] = []
    thresholds: list[float] = []
    windows: list[int] = []
    train = _timed(lambda step: float(engine.train_batch(jobs.batches(step, 4))), steps)
    while not group.broadcast(enough.is_set()):
        losses.append(train(engine.global_steps))
        if tuner is not None:
            thresholds.append(tuner.thresholds.gradient)
            windows.append(tuner.number)
            counts[:] = [len(steps), len(set(thresholds))]
    found = {"losses": losses, "steps": steps, "thresholds": thresholds, "windows": windows, "calls": calls, "lines": lines}
    if tuner is not None:
        client = tuner.policy.client._thread
        found["client_s"] = time.clock_gettime(time.pthread_getcpuclockid(client.ident)) if client.is_alive() else 0.0
    found["ended"] = time.monotonic()
    if destroy:
        engine.destroy()
    else:
        ENGINES.append(engine)
    return found


def _rank(*arguments: Any) -> None:
    rank_main(*arguments)
    # As an interpreter ends: it waits for threads, calls what atexit knows of, takes itself apart. A forked process would not.
    ctypes.pythonapi.Py_Exit(0)


def _plan_once(controller: Any) -> None:
    """Each window asks for a plan, which takes longer than a step, fault or not. The first stays, so that steps are alike."""
    ask = controller._ask

    def ask_once(order: str) -> None:
        if controller.decision is None:
            ask(order)
        else:
            controller.asked = (controller.step, order.count("F"))

    controller._ask = ask_once


def _timed(call: Callable[..., Any], took: list[Took]) -> Callable[..., Any]:
    """``call`` that notes in ``took`` how long each of its calls takes."""

    def timed(*arguments: Any) -> Any:
        before, started = starved_s(), time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds = time.perf_counter() - started
            took.append(Took(seconds, max(0.0, starved_s() - before)))

    return timed


# -- the job, from outside ---------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What a rank saw, and how its process ended. ``left_s``: from its last step to its end."""

    saw: dict[str, Any]
    exit_code: int | None
    left_s: float


class Job:
    """A running job whose policy is at ``server``. Every fault has processes of its own, forked from one that has imported
    what takes long."""

    def __init__(self, server: str, token_file: Path, *, destroy: bool = False, deadline_s: float = 0.5) -> None:
        """``destroy``: its engine; else the job ends as most scripts do, which leave that to the end of the interpreter."""
        self.run_id = f"run-{time.monotonic_ns()}"
        policy = {
            "type": "rllib", "server": server, "token_file": str(token_file), "interval": INTERVAL, "patience_steps": PATIENCE,
            "run_id": self.run_id, "deadline_s": deadline_s,
        }  # fmt: skip
        context = multiprocessing.get_context("forkserver")
        delays = {"first_delay_s": 0.05, "longest_delay_s": 0.2}  # so that there is more than one try
        self._counts, self._enough = context.Array("i", 2, lock=False), context.Event()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.results = [context.SimpleQueue() for _ in range(2)]
        arguments = (policy, delays, destroy, self._counts, self._enough)
        self.processes = [
            context.Process(target=_rank, args=(watched_job, rank, 2, port, self.results[rank], arguments), daemon=True)
            for rank in range(2)
        ]
        for process in self.processes:
            process.start()

    def until(self, true: Callable[[], Any]) -> Any:
        """Wait for it while the job trains."""

        def now() -> Any:
            assert all(process.is_alive() for process in self.processes), "the job ended: " + self._why()
            return true()

        return until(now, MOST_S)

    def trains(self, num_steps: int) -> None:
        """Wait until it has made so many more steps."""
        first = self._counts[0]
        self.until(lambda: self._counts[0] >= first + num_steps)

    def moves(self, num_times: int) -> None:
        """Wait until its thresholds have moved so often since the start."""
        self.until(lambda: self._counts[1] > num_times)

    def finish(self) -> list[Rank]:
        """Let it end, once it has made enough steps."""
        self.until(lambda: self._counts[0] >= FEWEST_STEPS)
        self._enough.set()
        ended, found = [0.0, 0.0], []
        for results in self.results:
            until(lambda results=results: not results.empty(), MOST_S)
            _, failed_at, value = results.get()
            assert failed_at is None, value
            found.append(torch.load(io.BytesIO(value), weights_only=False))
        deadline = time.monotonic() + 2 * ENDS_S
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if not ended[rank] and not process.is_alive():
                    ended[rank] = time.monotonic()
            time.sleep(0.01)
        now = time.monotonic()
        return [
            Rank(saw, process.exitcode, (ended[rank] or now) - saw["ended"])
            for rank, (saw, process) in enumerate(zip(found, self.processes, strict=True))
        ]

    def stop(self) -> None:
        """Whatever is left of it goes."""
        for process in self.processes:
            process.kill()
            process.join()

    def _why(self) -> str:
        return " ".join(str(results.get()[2]) for results in self.results if not results.empty())


def check(ranks: list[Rank], says: list[str], *, moves: bool, level: int = logging.WARNING) -> list[float]:
    """What holds whatever the fault. Rank 0's thresholds by step.

    Args:
        says: of each of the lines of ``level`` about the policy, in order, a part.
        moves: whether the thresholds do.
    """
    first, second = (rank.saw for rank in ranks)
    assert first["losses"] == second["losses"] and len(first["losses"]) >= FEWEST_STEPS
    assert all(map(math.isfinite, first["losses"]))

    found = [line for number, line in first["lines"] if number >= level and line.startswith("policy: ")]
    assert len(found) == len(says) and all(part in line for part, line in zip(says, found, strict=True)), found
    assert not [line for _, line in second["lines"] if line.startswith("policy: ")]
    assert TOKEN not in str(first["lines"])
    assert (len(set(first["thresholds"])) > 1) == moves, first["thresholds"]

    # What the policy takes of the training thread is what a step can be slower by because of it: nothing else there waits.
    for name, calls in first["calls"].items():
        median, longest = statistics.median(took.seconds for took in calls), max(took.seconds - took.starved_s for took in calls)
        assert median < 0.001 and longest < SLOW_S, (name, median, longest)
    # And so it is: a client that waits hits all steps in which a window ends. A rank that had to wait for a core, as on a busy
    # machine, hits any step, of either rank.
    since = first["windows"].index(1)
    starved = [sum(took.starved_s for took in pair) for pair in zip(first["steps"], second["steps"], strict=True)]
    for saw in (first, second):
        seconds = [took.seconds for took in saw["steps"]][since:]
        median = statistics.median(seconds)
        excess = [taken - median - lost for taken, lost in zip(seconds, starved[since:], strict=True)]
        slow = [round(one, 3) for one in excess if one > SLOW_S]
        assert len(slow) <= 2 and max(slow, default=0.0) < 1.0, (median, slow)
    # The client's thread would slow every step alike, were it busy.
    whole = sum(took.seconds for took in first["steps"])
    assert first["client_s"] < 0.05 * whole, (first["client_s"], whole)
    for rank in ranks:
        assert rank.exit_code == 0 and rank.left_s < ENDS_S, rank
    return first["thresholds"]


@pytest.fixture(scope="module", autouse=True)
def _ranks_start_fast() -> Iterator[None]:
    """The process that ranks are forked from imports what takes long, once."""
    changed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    imported = ["deepspeed", "torch._dynamo", "setuptools", "rlfreeze_ds.engine", "tests.test_engine"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(imported)
    forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    yield
    forkserver._forkserver._stop()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """Of the stub's token."""
    return written(tmp_path / "token", TOKEN)


def written(path: Path, token: str) -> Path:
    path.write_text(token + "\n")
    path.chmod(0o600)
    return path


@contextmanager
def job_at(server: str, token_file: Path, **settings: Any) -> Iterator[Job]:
    job = Job(server, token_file, **settings)
    try:
        yield job
    finally:
        job.stop()


# -- faults of a stub --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def num_acts(server: StubServer) -> int:
    return sum(path.endswith("/act") for path, _, _ in server.requests)


def test_no_fault(token_file: Path) -> None:
    """What the others are compared with: thresholds move, and nobody warns."""
    server = StubServer()
    with job_at(server.url, token_file, destroy=True) as job:
        job.until(lambda: num_acts(server) >= 10)
        ranks = job.finish()
    thresholds = check(ranks, ["moves the thresholds of run"], moves=True, level=logging.INFO)
    assert len(set(thresholds)) >= 8 and server.book.counts()["closed"] == 1
    server.stop()


@pytest.mark.parametrize("destroy", [True, False])
def test_server_absent_at_start(token_file: Path, destroy: bool) -> None:
    with job_at(f"http://127.0.0.1:{free_port()}", token_file, destroy=destroy) as job:
        ranks = job.finish()
    check(ranks, ["Connection refused"], moves=False)


def test_server_that_comes_late_is_found(token_file: Path) -> None:
    port = free_port()
    with job_at(f"http://127.0.0.1:{port}", token_file) as job:
        job.trains(30)
        server = StubServer(port)
        job.until(lambda: num_acts(server) >= 5)
        ranks = job.finish()
    thresholds = check(ranks, ["Connection refused", "again after"], moves=True, level=logging.INFO)
    assert len(set(thresholds[:25])) == 1
    assert server.book.counts()["closed"] == 1, "a job that does not destroy its engine ends without a word"
    server.stop()


@pytest.mark.parametrize(
    ("deadline_s", "destroy"),
    [
        pytest.param(1.5, False, id="too late"),
        pytest.param(MOST_S, True, id="in time, the job ends before"),
        pytest.param(MOST_S, False, id="in time, the job ends before, its engine left"),
    ],
)
def test_server_answers_after_30_s(token_file: Path, deadline_s: float, destroy: bool) -> None:
    over = threading.Event()

    def late(handler: Handler, path: str, body: bytes) -> bool:
        over.wait(30 if deadline_s < 30 else MOST_S)  # a busy machine may need more for the whole job
        return False

    server = StubServer(fault=late)
    with job_at(server.url, token_file, deadline_s=deadline_s, destroy=destroy) as job:
        job.until(lambda: len(server.requests) >= (3 if deadline_s < 30 else 1))
        ranks = job.finish()
    check(ranks, ["no answer within 1.5 s"] if deadline_s < 30 else [], moves=False)
    over.set()
    server.stop()


def _answers(status: int, body: bytes) -> Callable[[Handler, str, bytes], bool]:
    """A server that opens a session and then answers each window with ``body``, its WINDOW replaced."""

    def fault(handler: Handler, path: str, request: bytes) -> bool:
        if path.endswith("/act"):
            handler.say(status, body.replace(b"WINDOW", b"%d" % json.loads(request)["window"]))
        return path.endswith("/act")

    return fault


NAN = b'{"version": 1, "window": WINDOW, "action": [0.9, NaN], "updates": 0}'
OTHER = b'{"version": 2, "window": WINDOW, "action": [0.9, 0.9], "updates": 0}'
OLDER = b'{"error": "message version 1: this server speaks version 2. Install the same release on both sides."}'


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        pytest.param(200, b"\x00\xff<html>\r\n" * 50, "not one of a policy server", id="garbage"),
        pytest.param(200, NAN, "not one of a policy server", id="nan"),
        pytest.param(200, OTHER, "speaks version 2 of the messages, this job version 1", id="answer of another schema version"),
        pytest.param(409, OLDER, "HTTP 409: message version 1: this server speaks", id="refusal of another schema version"),
    ],
)
def test_server_answers(token_file: Path, status: int, body: bytes, says: str) -> None:
    server = StubServer(fault=_answers(status, body))
    with job_at(server.url, token_file) as job:
        job.until(lambda: num_acts(server) >= 3)
        ranks = job.finish()
    check(ranks, [says], moves=False)
    server.stop()


class Other(http.server.BaseHTTPRequestHandler):
    """Of a server that serves something else."""

    def log_message(self, *arguments: Any) -> None:
        pass


@needs_extra
def test_port_is_taken_by_something_else(token_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    port = other.server_address[1]
    assert main(["serve", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--port {port}: Address already in use. Take another port" in line
    with job_at(f"http://127.0.0.1:{port}", token_file) as job:
        ranks = job.finish()
    check(ranks, ["no answer from"], moves=False)
    other.shutdown()
    other.server_close()


def test_server_of_the_jobs_own_minds_no_taken_port(token_file: Path) -> None:
    with job_at("auto", token_file) as job:
        job.moves(5)
        ranks = job.finish()
    check(ranks, [], moves=True)


# -- faults of the real server -----------------------------------------------------------------------------------------------

OFTEN_SAVED = """
import sys
from rlfreeze_ds.__main__ import main
from rlfreeze_ds.policy import serve

make = serve._learner

def learner(*arguments):
    made = make(*arguments)
    from rlfreeze_ds.policy import learner
    learner.CHECKPOINT_S = 0.5
    return made

serve._learner = learner
sys.exit(main(sys.argv[1:]))
"""
"""``python -m rlfreeze_ds`` with a checkpoint every half second instead of every minute."""


class Real:
    """One real server that tests share; one that a test killed is started anew on its port, with its token."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, 0
        self.kept = folder / "kept"
        self.kept.mkdir(mode=0o700)
        self.process: Process | None = None

    def running(self) -> Process:
        if self.process is None or self.process.child.poll() is not None:
            options = ["--port", str(self._port), "--checkpoint-dir", str(self.kept), "--restore", "--train-batch", "8"]
            self.process = Process(self._folder, *options, "--seed", "1", program=("-c", OFTEN_SAVED))
            self._port = self.process.port
        return self.process

    def kill(self) -> None:
        if self.process is not None:
            self.process.ends(self.process.child.kill)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    server = Real(tmp_path_factory.mktemp("real"))
    yield server
    server.kill()


def at(real: Real) -> tuple[str, Path]:
    process = real.running()
    return f"http://127.0.0.1:{process.port}", process.token_file


def answered(process: Process) -> float:
    return process.metric("rlfreeze_answer_seconds_count")


@needs_extra
def test_wrong_token(real: Real, tmp_path: Path) -> None:
    url, _ = at(real)
    refused = real.running().metric("rlfreeze_opened_total")
    with job_at(url, written(tmp_path / "token", "another-token-0123456789")) as job:
        ranks = job.finish()
    check(ranks, ["HTTP 401: the token is not the server's"], moves=False)
    assert real.running().metric("rlfreeze_opened_total") == refused
    assert "another-token" not in str(ranks[0].saw["lines"])


@needs_extra
def test_second_client_with_the_same_run_id(real: Real) -> None:
    url, token_file = at(real)
    server = real.running()
    before = answered(server)
    with job_at(url, token_file) as job:
        job.until(lambda: answered(server) >= before + 3)
        session = server.ask("/v1/sessions", {"run_id": job.run_id})["session_id"]
        job.trains(10)
        opened = server.metric("rlfreeze_opened_total")
        job.trains(30)
        ranks = job.finish()
    thresholds = check(ranks, ["another client reported as run"], moves=True)
    assert len(set(thresholds[-30:])) == 1
    # The job does not take the run back: the second client is the one that goes on.
    assert server.metric("rlfreeze_opened_total") == opened
    assert server.ask(f"/v1/sessions/{session}/act", {"window": 0, "observation": [0.1] * SIZE})["window"] == 0


@needs_extra
def test_client_vanishes_within_an_episode(real: Real) -> None:
    url, token_file = at(real)
    server = real.running()
    before = answered(server)
    with job_at(url, token_file) as job:
        job.until(lambda: answered(server) >= before + 6)
        os.kill(job.processes[0].pid, signal.SIGKILL)
        begin = time.monotonic()
        until(lambda: not any(process.is_alive() for process in job.processes), ENDS_S)
        assert time.monotonic() - begin < ENDS_S
        assert job.processes[0].exitcode == -signal.SIGKILL and not job.results[1].empty()
        reported = server.metric("rlfreeze_transitions_total")
        # Another job goes on, and what the one that is gone had reported is learned from with it.
        session = f"/v1/sessions/{server.ask('/v1/sessions', {'run_id': 'another'})['session_id']}"
        for window in range(9):
            reward = 0.1 if window else None
            server.ask(f"{session}/act", {"window": window, "observation": [0.1] * SIZE, "reward": reward})
        until(lambda: server.metric("rlfreeze_transitions_learned_total") >= reported, 30.0)
        again = server.ask("/v1/sessions", {"run_id": job.run_id, "next_window": 6})["session_id"]
        assert server.ask(f"/v1/sessions/{again}/act", {"window": 6, "observation": [0.1] * SIZE})["window"] == 6


@needs_extra
def test_disk_is_full_at_a_checkpoint(real: Real) -> None:
    url, token_file = at(real)
    server = real.running()

    def updates() -> float:
        return server.metric("rlfreeze_updates_total")

    def saved() -> int:
        return max((int(path.name[-9:]) for path in real.kept.glob("checkpoint-*")), default=0)

    with job_at(url, token_file) as job:
        job.until(lambda: updates() >= 1 and saved() >= 1)
        # No file of this process may grow beyond that: what it prints is shorter, a checkpoint is longer.
        _, most = resource.prlimit(server.child.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.child.pid, resource.RLIMIT_FSIZE, (8192, most))
        job.trains(10)
        full = (saved(), updates())
        job.until(lambda: updates() >= full[1] + 3)
        assert saved() == full[0], "the disk was not full"
        resource.prlimit(server.child.pid, resource.RLIMIT_FSIZE, (most, most))
        job.until(lambda: saved() > full[0])
        ranks = job.finish()
    thresholds = check(ranks, [], moves=True)
    assert len(set(thresholds[-20:])) > 1
    told = [line for line in server.log.read_text().splitlines() if "Learning goes on" in line]
    assert len(told) == 1 and "File too large" in told[0]


@needs_extra
def test_server_is_killed_and_restarted(real: Real) -> None:
    url, token_file = at(real)
    before = answered(real.running())
    with job_at(url, token_file) as job:
        job.until(lambda: answered(real.running()) >= before + 3)
        real.kill()
        job.trains(20)
        before = answered(real.running())
        job.until(lambda: answered(real.running()) >= before + 3)
        ranks = job.finish()
    check(ranks, ["moves the thresholds", "no answer from", "again after"], moves=True, level=logging.INFO)


@needs_extra
def test_server_is_killed(real: Real) -> None:
    url, token_file = at(real)
    before = answered(real.running())
    with job_at(url, token_file) as job:
        job.until(lambda: answered(real.running()) >= before + 3)
        real.kill()
        job.trains(40)
        ranks = job.finish()
    thresholds = check(ranks, ["no answer from"], moves=True)
    assert len(set(thresholds[-35:])) == 1
