"""``python -m rlfreeze_ds serve``: the life of a policy server, from its arguments to a clean end. Imports ray when it runs."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.log import logger
from rlfreeze_ds.policy import sweep
from rlfreeze_ds.policy.auto_server import watch_parent, write_ready
from rlfreeze_ds.policy.checkpoint_folder import CheckpointFolder
from rlfreeze_ds.policy.connection import read_token
from rlfreeze_ds.policy.learner_settings import LearnerSettings
from rlfreeze_ds.policy.network import PRETRAINED, Network

if TYPE_CHECKING:
    from rlfreeze_ds.policy.learner import Learner

MAX_CONNECTIONS = 2048
"""More are answered with 503; each of the most sessions may hold one, and one more."""

SWITCH_S = 0.0002
"""How long the learning thread may keep the interpreter from the answering one. An answer lets go of it thirty times, in torch:
at Python's usual 5 ms an update would hold it up for a sixth of a second."""

START_S = 30.0
HTTP_STOP_S = 3.0

LAST_RESORT_S = 20.0
"""A server that was told to end and has not by then ends without ceremony."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``serve``."""
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on (default: %(default)s, this machine alone)")
    parser.add_argument("--port", type=int, default=0, help="0: a free one (default)")
    parser.add_argument(
        "--token-file", type=Path, metavar="PATH", help="the bearer token, made there when absent (default: a private file)"
    )
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help='write {"port": N} there once the server answers')
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input does, or the parent")
    parser.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="keep the policy there (default: nowhere)")
    parser.add_argument("--restore", action="store_true", help="go on from the newest policy in --checkpoint-dir")
    parser.add_argument("--algorithm", default="PPO", help="of RLlib: PPO (default), SAC or APPO")
    parser.add_argument(
        "--train-batch", type=int, default=256, metavar="N", help="transitions of an update (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="of weights and exploration (default: drawn)")
    parser.add_argument(
        "--policy-file", type=Path, metavar="FILE",
        help='what the policy begins as, where nothing is restored; "pretrained" is the one that comes with the package '
        "(default: at random)",
    )
    parser.add_argument(
        "--num-env-runners", type=int, default=0, metavar="N", help="processes with simulated jobs (default: %(default)s)"
    )
    parser.add_argument(
        "--num-learners", type=int, default=0, metavar="N", help="processes that compute updates (default: the server's own)"
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="an existing Ray cluster, its RAY_AUTH_... variables set (default: a local Ray)"
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal, or the parent's end; 0 after a clean one.

    Raises:
        RLFreezeError: what was asked for cannot be had.
    """
    absent = [name for name in ("ray", "gymnasium", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if absent:
        raise RLFreezeError(f"{', '.join(absent)} not installed: the server needs pip install 'rlfreeze_ds[server]'.")
    settings = LearnerSettings(
        arguments.algorithm, arguments.train_batch, arguments.seed, arguments.num_env_runners, arguments.num_learners,
        PRETRAINED if arguments.policy_file == Path("pretrained") else arguments.policy_file,
    )  # fmt: skip
    if settings.policy_file is not None:
        Network.load(settings.policy_file)  # a wrong one is refused before Ray starts
    checkpoints = None if arguments.checkpoint_dir is None else CheckpointFolder(arguments.checkpoint_dir.resolve())
    if arguments.restore and checkpoints is None:
        raise RLFreezeError("--restore needs --checkpoint-dir, where the policy was kept.")
    if not arguments.restore and checkpoints is not None and checkpoints.all():
        raise RLFreezeError(f"{checkpoints.path} holds a policy: go on from it with --restore, or name another --checkpoint-dir.")
    with ExitStack() as undo:
        stop = _Stop()
        undo.callback(stop.close)
        stop.on_signals()
        if arguments.exit_with_parent:
            watch_parent(stop.ask)
        listener = _bind(arguments.host, arguments.port)
        undo.callback(listener.close)
        folder = _private_folder()
        undo.callback(sweep.end, sweep.start(folder))
        token_file = arguments.token_file or folder / "token"
        token = _token(token_file)
        learner = _learner(arguments, settings, checkpoints, stop, folder, undo)
        if learner is not None:
            _answer(arguments, learner, stop, listener, token, token_file, undo)
    return 0


def _learner(
    arguments: argparse.Namespace,
    settings: LearnerSettings,
    checkpoints: CheckpointFolder | None,
    stop: _Stop,
    folder: Path,
    undo: ExitStack,
) -> Learner | None:
    """Ray and the learner, which ``undo`` ends; None when the wish to end came first."""
    sys.setswitchinterval(SWITCH_S)
    os.environ["OMP_NUM_THREADS"] = "1"  # more would take the cores that answer; before torch is imported
    from rlfreeze_ds.policy import local_ray

    if arguments.ray_address is None:
        local_ray.prepare(folder)
    local_ray.start(folder, settings.num_cpus, arguments.ray_address)
    undo.callback(local_ray.stop)
    stop.on_signals()  # Ray has put its own in place
    if stop.asked():
        return None

    from rlfreeze_ds.policy.learner import Learner

    learner = Learner(settings, checkpoints)
    undo.callback(learner.close)
    if arguments.restore:
        learner.restore()
    return None if stop.asked() else learner


def _answer(
    arguments: argparse.Namespace,
    learner: Learner,
    stop: _Stop,
    listener: socket.socket,
    token: str,
    token_file: Path,
    undo: ExitStack,
) -> None:
    """Answer and learn until the wish to end. ``undo`` ends both, learning first."""
    from rlfreeze_ds.policy.server import make_app
    from rlfreeze_ds.policy.session import Sessions

    sessions = Sessions()
    http = _Http(make_app(sessions, learner, token), listener)
    undo.callback(http.stop)
    undo.callback(learner.stop)
    undo.callback(sessions.stop)
    # What was imported stays for good. Were it looked through in every collection, answers would wait for that.
    gc.collect()
    gc.freeze()
    http.start(stop.ask)
    learner.start(sessions.drain)
    host, port = listener.getsockname()[:2]
    if arguments.ready_file is not None:
        write_ready(arguments.ready_file, port)
        undo.callback(arguments.ready_file.unlink, missing_ok=True)
    logger.info("policy server on http://%s:%d, its token in %s", f"[{host}]" if ":" in host else host, port, token_file)
    if not _is_loopback(host):
        logger.warning(
            "anyone who can reach %s sees the token and the traffic: put TLS in front, or keep the network private", host
        )
    stop.wait()
    threading.Thread(target=_last_resort, name="last resort", daemon=True).start()
    logger.info("policy server ends after %d updates", learner.updates)


def _private_folder() -> Path:
    """For its owner only. Its name is short, wherever temporary files go: see :func:`local_ray.start`."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="rlf-", dir=usual if len(usual) <= 30 else "/tmp"))


class _Stop:
    """The wish to end. A pipe: unlike a lock, a signal handler may write to it whatever it interrupts."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_signals(self) -> None:
        for number in self._before:
            signal.signal(number, lambda *_: self.ask())

    def ask(self) -> None:
        with suppress(OSError):
            os.write(self._write, b"x")

    def asked(self) -> bool:
        return bool(select.select([self._read], [], [], 0)[0])

    def wait(self) -> None:
        select.select([self._read], [], [])

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


def _last_resort() -> None:
    """Ray's processes end with this one, however it ends."""
    threading.Event().wait(LAST_RESORT_S)
    os._exit(1)


def _bind(host: str, port: int) -> socket.socket:
    """A socket on ``host`` that does not listen yet: a client is refused, not kept waiting, while the server starts."""
    if not 0 <= port < 65536:
        raise RLFreezeError(f"--port {port}: must be between 0 and 65535.")
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise RLFreezeError(
            f"cannot listen on --host {host} --port {port}: {error.strerror or error}. Take another port, or 0 for a free one."
        ) from None


def _token(path: Path) -> str:
    """The token in a file that only its owner reads; made there when absent."""
    try:
        with suppress(FileExistsError), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    except (OSError, ValueError) as error:
        raise RLFreezeError(f"--token-file {path}: {getattr(error, 'strerror', None) or error}.") from None
    return read_token(path, "--token-file")


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


class _Http:
    """uvicorn in a thread, so that signals stay with the main one."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        import uvicorn

        self._listener = listener
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
                server_header=False, proxy_headers=False, backlog=512, limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=75, timeout_graceful_shutdown=1, h11_max_incomplete_event_size=16_384,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._ended: Callable[[], None] = lambda: None

    def start(self, ended: Callable[[], None]) -> None:
        """Returns once it answers. ``ended`` is called should it end by itself."""
        self._ended = ended
        self._thread.start()
        patience = threading.Event()
        for _ in range(int(START_S / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            patience.wait(0.01)
        if not self._server.started:
            raise RLFreezeError("the HTTP server does not start; the port may have been taken meanwhile.")

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(HTTP_STOP_S)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except (Exception, SystemExit) as error:
            logger.warning("the HTTP server ended: %s: %s", type(error).__name__, error)
        self._ended()
