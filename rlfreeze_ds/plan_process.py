"""The process that plans beside a training job, as rank 0 sees it: asked without waiting, bounded in time, killable.

A process and not a thread: PuLP holds the interpreter's lock, and a solver may hang or crash.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from rlfreeze_ds.child_environment import child_environment
from rlfreeze_ds.errors import SolverError
from rlfreeze_ds.plan_worker import ANSWER, DONE, REQUEST

# Seconds beyond the solver's own limit: to start the process and to simulate batches, on a busy machine.
GRACE_S = 20.0


def worker_command() -> list[str]:
    """Without ``-P`` the worker would look for its modules in the job's working directory first."""
    return [sys.executable, "-P", "-m", "rlfreeze_ds.plan_worker"]


def worker_environment() -> dict[str, str]:
    """Ours, without our place in the job; on one thread."""
    return {**child_environment(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class PlanProcess:
    """Started by the first request and used again; a failed one is killed, and the next request starts another."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._errors: IO[bytes] | None = None
        self._end: weakref.finalize | None = None
        self._deadline = 0.0
        self._limit_s = 0.0

    def send(self, request: str, time_limit_s: float) -> None:
        """Hand ``request`` over and return at once.

        Raises:
            OSError: the process cannot be started or reached.
        """
        self._limit_s = time_limit_s + GRACE_S
        self._deadline = time.monotonic() + self._limit_s
        try:
            if self._worker is not None and self._says_something(0.0):
                self.stop()  # it should be silent, so it died since, or is about to
            if self._worker is None:
                self._start()
            # By a file: what a pipe cannot take at once would hold up the step.
            (self._folder / REQUEST).write_text(request, encoding="utf-8")
            os.write(self._worker.stdin.fileno(), b"\n")
        except OSError:
            self.stop()
            raise

    def receive(self, *, wait: bool) -> str | None:
        """The answer to the last request; None while there is none, unless ``wait``.

        Raises:
            SolverError: there will be none. The process has been stopped; the message says what became of it.
        """
        if self._worker is None:
            raise SolverError("the solver is not running")
        if self._says_something(self._deadline - time.monotonic() if wait else 0.0):
            line = os.read(self._worker.stdout.fileno(), 4096)
            if line == DONE:
                with suppress(OSError, UnicodeDecodeError):
                    return (self._folder / ANSWER).read_text(encoding="utf-8")
            raise SolverError(self._failed(f"solver said {line[:80]!r}" if line else ""))
        if wait or time.monotonic() >= self._deadline:
            raise SolverError(self._failed(f"no answer within {self._limit_s:g} s, solver killed"))
        return None

    def stop(self) -> None:
        """End the process, if there is one; also called when this object, or the interpreter, goes away."""
        if self._end is not None:
            self._end()
        self._worker = self._errors = self._end = None

    def _says_something(self, timeout_s: float) -> bool:
        """Whether there is a line to read, or the end of all lines."""
        poll = select.poll()  # select() knows no file descriptor beyond 1023
        poll.register(self._worker.stdout, select.POLLIN)
        return bool(poll.poll(1000.0 * max(0.0, timeout_s)))

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="rlfreeze_plan_")
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        try:
            worker = subprocess.Popen(
                [*worker_command(), folder, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                # CBC's files go where they are removed with the rest.
                env={**worker_environment(), "TMPDIR": folder},
                # A solver's own processes end with it. Not a session of its own: there its niceness might not count.
                process_group=0,
            )
        except BaseException:
            errors.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._worker, self._folder, self._errors = worker, Path(folder), errors
        self._end = weakref.finalize(self, _end, worker, folder, errors, os.getpid())

    def _failed(self, reason: str) -> str:
        """Stop the process and say what became of it, with its own last words."""
        worker, errors = self._worker, self._errors
        if not reason:
            # Its output has ended, so it has or is about to.
            with suppress(subprocess.TimeoutExpired):
                worker.wait(timeout=0.02)
            code = worker.returncode
            reason = "solver stopped" if code is None else f"solver ended with code {code}"
            if code is not None and code < 0:
                reason = f"solver killed by signal {-code}"
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - 2000))
        words = errors.read().decode("utf-8", "replace").split("\n")
        last = " | ".join(line.strip() for line in words if line.strip())[-300:]
        self.stop()
        return f"{reason}: {last}" if last else reason


def _end(worker: subprocess.Popen[bytes], folder: str, errors: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of the job, which owns no process
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    for file in (worker.stdin, worker.stdout, errors):
        with suppress(OSError):
            file.close()
    with suppress(subprocess.TimeoutExpired):
        worker.wait(timeout=1.0)
    shutil.rmtree(folder, ignore_errors=True)
