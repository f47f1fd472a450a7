"""``"server": "auto"``: a policy server of the job's own, as a child of rank 0 that does not outlive it.

The two agree on: the token lies in the file after ``--token-file``; once the server listens it writes ``{"port": N}``, in one
piece, to the file after ``--ready-file``; with ``--exit-with-parent`` it ends when :func:`watch_parent` says so.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rlfreeze_ds.child_environment import child_environment
from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.log import logger
from rlfreeze_ds.planning.atomic_write import write_text

START_S = 180.0
"""Seconds in which a server has to listen: it imports much, on a machine that is busy training."""

CLOSE_S = 5.0
"""Seconds that a server may take to save what it learned when the job ends; then it is killed."""

RESTART_DELAYS_S = (1.0, 10.0, 60.0)
"""Until a server that had listened and is gone is started again, the first time and each one after; there are no more."""

PARENT_CHECK_S = 1.0
"""Between two looks at whether the parent is still there."""

_PARENT = "RLFREEZE_PARENT_PID"


def server_command() -> list[str]:
    """Without ``-P`` the server would look for its modules in the job's working directory first."""
    return [sys.executable, "-P", "-m", "rlfreeze_ds", "serve"]


def server_environment() -> dict[str, str]:
    """Ours without our place in the job, and with no accelerator: those are for training."""
    own = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", _PARENT: str(os.getpid())}
    return {**child_environment(), **own}


def write_ready(path: str | os.PathLike[str], port: int) -> None:
    """For the server: say that ``port`` listens.

    Raises:
        RLFreezeError: the file cannot be written.
    """
    write_text(os.fspath(path), json.dumps({"port": port}))


def watch_parent(gone: Callable[[], None]) -> threading.Thread:
    """For the server: call ``gone`` once, from a thread, when standard input ends or the parent has died.

    Either alone would not do: a process that the parent forked may hold the other end of standard input open.
    """
    # By the number that the parent left: it may have died before this process came so far.
    parent = int(os.environ.get(_PARENT, "") or os.getppid())

    def watch() -> None:
        while True:
            try:
                ready, _, _ = select.select([0], [], [], PARENT_CHECK_S)
                if ready and not os.read(0, 4096):
                    break
            except OSError:
                time.sleep(PARENT_CHECK_S)  # there is no standard input
            if os.getppid() != parent:
                break
        gone()

    thread = threading.Thread(target=watch, name="rlfreeze parent watch", daemon=True)
    thread.start()
    return thread


class AutoServer:
    """The child. :meth:`start` returns before it listens; :meth:`url` is for
    :class:`~rlfreeze_ds.policy.client.PolicyClient`, which calls it in the background."""

    def __init__(self, arguments: Sequence[str] = (), command: Sequence[str] | None = None, start_s: float = START_S) -> None:
        """
        Args:
            arguments: more of them for ``python -m rlfreeze_ds serve``. Others see them: nothing secret.
            command: in place of ``python -m rlfreeze_ds serve``.
            start_s: seconds until the server has to listen.
        """
        self.token = secrets.token_urlsafe(32)
        self._command = [*(server_command() if command is None else command)]
        self._arguments, self._start_s = list(arguments), start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._words: IO[bytes] | None = None
        self._end: weakref.finalize | None = None
        self._deadline = 0.0
        self._url: str | None = None
        self._lock = threading.Lock()  # between a start in the background and the end of the job
        self._has_listened = False
        self._num_restarts = 0
        self._restart_at: float | None = None

    def __repr__(self) -> str:
        return f"AutoServer(pid={self.pid}, url={self._url!r})"

    @property
    def pid(self) -> int | None:
        """Of the server's process; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and return at once.

        Raises:
            RLFreezeError: it cannot be started.
        """
        if self._process is not None:
            return
        folder = words = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="rlfreeze_policy_"))  # for its owner only
            token_file, ready_file = folder / "token", folder / "ready.json"
            with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self.token + "\n")
            words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            process = subprocess.Popen(
                [
                    *self._command, "--port", "0", "--token-file", str(token_file), "--ready-file", str(ready_file),
                    "--exit-with-parent", *self._arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                bufsize=0,
                env=server_environment(),
                # Its own processes end with it, and an interrupt from the terminal is the job's to handle.
                process_group=0,
            )  # fmt: skip
        except BaseException as error:
            if words is not None:
                words.close()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise RLFreezeError(f"policy: cannot start a server: {error.strerror or error}.") from None
            raise
        self._process, self._folder, self._words = process, folder, words
        self._deadline, self._url = time.monotonic() + self._start_s, None
        self._end = weakref.finalize(self, _end, process, str(folder), words, os.getpid(), 0.0)

    def url(self) -> str | None:
        """Where the server listens; None while it does not yet. From any one thread.

        One that had listened and has ended is started again, see :data:`RESTART_DELAYS_S`, with the same arguments: with
        ``--checkpoint-dir`` and ``--restore`` it goes on from what was kept.

        Raises:
            RLFreezeError: it has ended, or took too long; with its last words.
        """
        process = self._process
        if process is None:
            raise RLFreezeError("the server has not been started, or has been closed")
        if (code := _exit_code(process)) is not None:
            ended = f"the server was killed by signal {-code}" if code < 0 else f"the server ended with code {code}"
            if not self._restart(process, ended):
                raise RLFreezeError(ended + self._last_words())
        if self._url is None:
            port = self._port()
            if port is not None:
                self._url, self._has_listened = f"http://127.0.0.1:{port}", True
            elif time.monotonic() > self._deadline:
                raise RLFreezeError(f"the server does not listen after {self._start_s:g} s{self._last_words()}")
        return self._url

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Tell the server to save and end; kill it after ``timeout_s``. Nothing of it is left."""
        with self._lock:
            process, end = self._process, self._end
            self._process = self._end = None
            self._url = None
        if process is None or end is None or not end.detach():
            return
        _end(process, str(self._folder), self._words, os.getpid(), timeout_s)

    def _restart(self, ended: subprocess.Popen[bytes], why: str) -> bool:
        """Whether there is another process now in the place of one that has ended; False before its time, and after the last.

        One that never listened would most likely fail again in the same way, so only a server that worked is started again.
        """
        if not self._has_listened:
            return False
        if self._restart_at is None:
            if self._num_restarts == len(RESTART_DELAYS_S):
                self._restart_at = math.inf
                text = "policy: %s, after it was started again %d times, the last; the thresholds stay"
                logger.warning(text, why, self._num_restarts)
            else:
                self._restart_at = time.monotonic() + RESTART_DELAYS_S[self._num_restarts]
        if time.monotonic() < self._restart_at:
            return False
        with self._lock:
            if self._process is not ended:
                return False  # closed meanwhile
            self._num_restarts, self._restart_at = self._num_restarts + 1, None
            logger.warning("policy: %s and is started again, %d of %d times", why, self._num_restarts, len(RESTART_DELAYS_S))
            before = self._end, str(self._folder), self._words
            self._process = None
            try:
                self.start()
            except RLFreezeError:
                self._process = ended  # for the next try
                raise
        end, folder, words = before
        if end.detach():
            _end(ended, folder, words, os.getpid(), 0.0)
        return True

    def _port(self) -> int | None:
        try:
            with open(self._folder / "ready.json", "rb") as file:
                found = json.loads(file.read(1024))
        except (OSError, ValueError, RecursionError):
            return None  # not there yet
        port = found.get("port") if isinstance(found, dict) else None
        valid = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536
        return port if valid else None

    def _last_words(self) -> str:
        """The end of what it printed in one line, after a colon; nothing if it printed nothing."""
        descriptor = self._words.fileno()
        size = os.fstat(descriptor).st_size
        # The child writes at the offset that both share, so this must not move it.
        words = os.pread(descriptor, 2000, max(0, size - 2000)).decode("utf-8", "replace").replace(self.token, "***")
        lines = (line.strip() for line in words.split("\n"))
        last = " | ".join(line for line in lines if line)[-300:]
        return f": {last}" if last else ""


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As ``process.poll()``, but the process stays a zombie: its number, and that of its group, go to nobody else meanwhile."""
    if process.returncode is not None:
        return process.returncode
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()  # somebody else in the job waited for it
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _end(process: subprocess.Popen[bytes], folder: str, words: IO[bytes], owner: int, patience_s: float) -> None:
    if os.getpid() != owner:
        return  # a forked copy of the job, which owns no process
    with suppress(OSError):
        process.stdin.close()  # which ends a server that is well
    deadline = time.monotonic() + patience_s
    while _exit_code(process) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if process.returncode is None:
        # Also when it has ended: what it started may not have.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    with suppress(OSError):
        words.close()
    shutil.rmtree(folder, ignore_errors=True)
