"""``python -m rlfreeze_ds serve`` with more processes: simulated jobs beside the live ones, and somebody else's Ray cluster."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from rlfreeze_ds.policy.observation import NUM_ACTIONS, SIZE
from tests.policy.stub_server import until
from tests.policy.test_serve import LOOPBACK, Process, listening, needs_extra, start_time

pytestmark = [needs_extra, pytest.mark.timeout(150)]

NUM_CPUS = 2


class _Cluster:
    """A Ray that is not the server's, on loopback and behind a token of its own."""

    def __init__(self, folder: Path) -> None:
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        # What whoever joins sets too. The last keeps it on loopback; the name tells where Ray needed that first.
        self.variables = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }  # fmt: skip
        environment = {**os.environ, **self.variables}
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block",
                    "--port=0", "--node-ip-address=127.0.0.1", f"--temp-dir={folder / 'r'}", "--include-dashboard=false",
                    f"--num-cpus={NUM_CPUS}", "--num-gpus=0", f"--object-store-memory={100 * 2**20}",
                ],
                stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True,
            )  # fmt: skip
        until(lambda: "Ray runtime started" in (folder / "log").read_text(), 60)
        self.address = (folder / "r" / "ray_current_cluster").read_text()

    def members(self) -> set[tuple[int, str]]:
        """(process, start time) of what ``ray start`` began."""
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return {(pid, start) for pid in found if _parent(pid) == self.process.pid and (start := start_time(pid)) is not None}

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _program(pid: int) -> str:
    """Name of what it runs; "" when it is gone, as some of Ray's soon are."""
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


@pytest.fixture(scope="module")
def cluster() -> Iterator[_Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="rlc-", dir="/tmp"))  # short: sockets lie in it
    cluster = _Cluster(folder)
    yield cluster
    cluster.end()
    shutil.rmtree(folder)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts a server; whatever becomes of the test, it does not outlive it."""
    started: list[Process] = []

    def start(*options: str, variables: Mapping[str, str] | None = None) -> Process:
        started.append(Process(tmp_path, *options, variables=variables))
        return started[-1]

    yield start
    for server in started:
        server.child.kill()


def _job(server: Process, num_windows: int, run_id: str = "job") -> None:
    session = f"/v1/sessions/{server.ask('/v1/sessions', {'run_id': run_id})['session_id']}"
    for window in range(num_windows):
        reward = 0.1 if window else None
        answer = server.ask(f"{session}/act", {"window": window, "observation": [0.1] * SIZE, "reward": reward})
        assert np.isfinite(answer["action"]).all() and len(answer["action"]) == NUM_ACTIONS


def test_simulated_jobs_teach_it_beside_live_ones(serve: Callable[..., Process]) -> None:
    server = serve("--num-env-runners", "1", "--train-batch", "32", "--seed", "1")
    assert listening({pid for pid, _ in server.tree}) <= LOOPBACK
    until(lambda: server.metric("rlfreeze_updates_total") >= 2, 60)  # no job has come yet
    assert server.metric("rlfreeze_transitions_learned_total") >= 64 and server.metric("rlfreeze_transitions_total") == 0
    _job(server, 11)
    updates = server.metric("rlfreeze_updates_total")
    until(lambda: server.metric("rlfreeze_transitions_waiting") == 0, 30)  # ten of it, which fill no batch
    until(lambda: server.metric("rlfreeze_updates_total") > updates, 30)
    assert server.metric("rlfreeze_transitions_total") == 10
    assert server.ends(lambda: server.child.send_signal(signal.SIGTERM)) == 0


def test_a_server_joins_a_cluster_and_leaves_it_as_it_was(
    cluster: _Cluster, serve: Callable[..., Process], tmp_path: Path
) -> None:
    before = cluster.members()
    assert len(before) >= 2 and listening({pid for pid, _ in before}) <= LOOPBACK
    joined = ["--ray-address", cluster.address, "--train-batch", "16", "--checkpoint-dir", str(tmp_path / "kept")]
    server = serve(*joined, "--num-learners", "1", variables=cluster.variables)
    assert not {program for pid, _ in server.tree if (program := _program(pid)) in ("raylet", "gcs_server")}, "a Ray of its own"
    assert listening({pid for pid, _ in server.tree}) <= LOOPBACK
    _job(server, 20)
    until(lambda: server.metric("rlfreeze_updates_total") >= 1, 60)
    assert server.ends(lambda: server.child.send_signal(signal.SIGTERM)) == 0
    assert cluster.process.poll() is None and before <= cluster.members()

    # The cluster still answers, and is too small for this one.
    with pytest.raises(AssertionError, match=f"has {NUM_CPUS} CPUs and the server asks for 3.*restores with fewer as well"):
        serve(*joined, "--num-learners", "2", "--restore", variables=cluster.variables)

    alone = serve("--checkpoint-dir", str(tmp_path / "kept"), "--restore", "--train-batch", "16")
    assert alone.metric("rlfreeze_updates_total") >= 1
    _job(alone, 20)
    until(lambda: alone.metric("rlfreeze_updates_total") >= 2, 60)
    assert alone.ends(alone.child.stdin.close) == 0
    assert cluster.process.poll() is None and before <= cluster.members()
