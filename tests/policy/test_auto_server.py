"""A server of the job's own: it is started without waiting, sees nothing of the job, and never outlives it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlfreeze_ds.errors import ConfigError, RLFreezeError
from rlfreeze_ds.log import logger
from rlfreeze_ds.policy import auto_server
from rlfreeze_ds.policy.auto_server import AutoServer, server_command, server_environment
from rlfreeze_ds.policy.connection import read_token
from tests.policy.stub_server import until
from tests.policy.test_client import Job, ended

ROOT = Path(__file__).parents[2]
CHILD = [sys.executable, "-P", "-m", "tests.policy.stub_child"]


@pytest.fixture(autouse=True)
def _package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def gone(pid: int) -> bool:
    """Ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def failure(server: AutoServer) -> str:
    """Why there is no server; empty while there may be one."""
    try:
        server.url()
    except RLFreezeError as error:
        return str(error)
    return ""


def listening(server: AutoServer) -> str:
    return until(server.url, 30.0)


def test_a_client_reaches_it_as_soon_as_it_listens(tmp_path: Path) -> None:
    server = AutoServer(command=CHILD)
    begin = time.perf_counter()
    server.start()
    assert time.perf_counter() - begin < 1.0 and server.url() is None, "starting waited for the server"
    job = Job(server.url, token=server.token)
    assert job.window(wait_s=0.0) is None and job.client.state == "waiting"
    assert job.window(wait_s=30) and job.window(wait_s=5)
    ended(job)
    pid = server.pid
    begin = time.perf_counter()
    server.close()
    assert time.perf_counter() - begin < 2.0 and gone(pid) and server.pid is None
    server.close()
    assert not list(tmp_path.iterdir()), "files were left"
    with pytest.raises(RLFreezeError, match="closed"):
        server.url()


def test_it_sees_nothing_of_the_job_and_nobody_sees_the_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1", "NCCL_DEBUG": "INFO",
        "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "3", "SLURM_PROCID": "0",
        "OMPI_COMM_WORLD_RANK": "0", "DS_ACCELERATOR": "cuda", "RAY_ADDRESS": "10.0.0.1:6379",
    }  # fmt: skip
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    looks = tmp_path / "looks.json"
    server = AutoServer(["--looks", str(looks)], command=CHILD)
    server.start()
    listening(server)
    for place in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                assert server.token.encode() not in (place / name).read_bytes(), f"{place}/{name}"
            except OSError:
                continue
    seen = json.loads(looks.read_text())
    assert seen["token"] == server.token and len(server.token) >= 32 and server.token not in repr(server)
    environment = dict(entry.split("=", 1) for entry in seen["environ"] if entry)
    assert {name: environment[name] for name in hidden if name in environment} == {
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert environment["PATH"] == os.environ["PATH"]
    token_file = next(tmp_path.glob("rlfreeze_policy_*/token"))
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600 and stat.S_IMODE(token_file.parent.stat().st_mode) == 0o700
    server.close()


def test_the_command_is_the_packages_own() -> None:
    assert server_command()[1:] == ["-P", "-m", "rlfreeze_ds", "serve"]
    places = server_environment()["PYTHONPATH"].split(os.pathsep)
    assert str(ROOT) in places


PARENT = """
import os, sys, time
from rlfreeze_ds.policy.auto_server import AutoServer
server = AutoServer(command=[sys.executable, "-P", "-m", "tests.policy.stub_child"])
server.start()
while server.url() is None and sys.argv[1] != "early":
    time.sleep(0.01)
worker = 0
if sys.argv[1] in ("forked", "early"):
    # As a data loader's worker: a copy of the job that holds all of its pipes and outlives it for a while.
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
print(server.pid, worker, flush=True)
if sys.argv[1] == "ends":
    sys.exit(0)
if sys.argv[1] == "fails":
    raise RuntimeError
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["killed", "forked", "early", "ends", "fails"])
def test_it_is_gone_when_the_job_is_gone(how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    child, worker = map(int, parent.stdout.readline().split())
    try:
        if how in ("killed", "forked", "early"):
            assert not gone(child)
            parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        until(lambda: gone(child), 5.0)
    finally:
        parent.kill()
        parent.stdout.close()
        if worker:
            os.kill(worker, signal.SIGKILL)


def test_one_that_does_not_end_is_killed() -> None:
    server = AutoServer(["--deaf"], command=CHILD)
    server.start()
    listening(server)
    pid, begin = server.pid, time.perf_counter()
    server.close(timeout_s=0.3)
    assert 0.3 <= time.perf_counter() - begin < 1.5 and gone(pid)


def test_a_forgotten_one_is_killed(tmp_path: Path) -> None:
    server = AutoServer(["--deaf"], command=CHILD)
    server.start()
    pid = server.pid
    del server
    until(lambda: gone(pid), 5.0)
    assert not list(tmp_path.iterdir())


def test_one_that_fails_says_why_without_the_token() -> None:
    server = AutoServer(["--say", "cannot bind, token"], command=CHILD)
    server.start()
    said = until(lambda: failure(server), 30.0)
    assert said == failure(server) == "the server ended with code 3: cannot bind, token ***"
    server.close()


def test_one_that_is_killed_or_never_listens_is_lost() -> None:
    server = AutoServer(["--never-ready"], command=CHILD, start_s=0.2)
    server.start()
    time.sleep(0.3)
    with pytest.raises(RLFreezeError, match="does not listen after 0.2 s"):
        server.url()
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: "killed by signal 9" in failure(server), 5.0)
    server.close()
    with pytest.raises(RLFreezeError, match="cannot start"):
        AutoServer(command=["/nowhere/python"]).start()


def test_one_that_is_killed_is_started_again_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(auto_server, "RESTART_DELAYS_S", (0.1, 0.3))
    looks = tmp_path / "looks.json"
    server = AutoServer(["--looks", str(looks)], command=CHILD)
    server.start()
    job = Job(server.url, token=server.token)
    assert job.window(wait_s=30)
    pids = []
    for delay_s in (0.1, 0.3):
        pids.append(server.pid)
        looks.unlink()
        os.kill(server.pid, signal.SIGKILL)
        killed = time.monotonic()
        assert job.window(wait_s=30), "no answer from a server started again"
        assert time.monotonic() - killed > delay_s and job.client.state == "connected"
        assert server.pid not in pids and all(map(gone, pids))
        arguments = json.loads(looks.read_text())["cmdline"]
        assert arguments[arguments.index("--looks") + 1] == str(looks), "not what it was started with"
    os.kill(server.pid, signal.SIGKILL)
    last = server.pid
    assert job.window(wait_s=1.0) is None and job.client.state == "lost"
    assert server.pid == last and gone(last)
    assert [line for line in said if "started again" in line] == [
        "policy: the server was killed by signal 9 and is started again, 1 of 2 times",
        "policy: the server was killed by signal 9 and is started again, 2 of 2 times",
        "policy: the server was killed by signal 9, after it was started again 2 times, the last; the thresholds stay",
    ]
    ended(job)
    server.close()
    looks.unlink()
    assert not list(tmp_path.iterdir()), "files were left"


def test_none_is_started_again_after_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_server, "RESTART_DELAYS_S", (0.1,))
    server = AutoServer(command=CHILD)
    server.start()
    listening(server)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: "killed by signal 9" in failure(server), 5.0)
    server.close()
    time.sleep(0.2)
    assert "closed" in failure(server) and server.pid is None


@pytest.mark.parametrize("text", ["", "{", '{"port": 0}', '{"port": "80"}', '{"port": true}', "[]", '{"port": 65536}'])
def test_half_a_ready_file_is_none(text: str, tmp_path: Path) -> None:
    server = AutoServer(["--never-ready"], command=CHILD)
    server.start()
    ready = next(tmp_path.glob("rlfreeze_policy_*")) / "ready.json"
    ready.write_text(text)
    assert server.url() is None
    auto_server.write_ready(ready, 4711)
    assert server.url() == "http://127.0.0.1:4711"
    server.close()


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789-abcdefgh\n")
    path.chmod(0o600)
    assert read_token(path) == "0123456789-abcdefgh"
    (tmp_path / "link").symlink_to(path)
    assert read_token(tmp_path / "link") == "0123456789-abcdefgh"
    for mode in (0o640, 0o604, 0o620, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600") as caught:
            read_token(path)
        assert "0123456789" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "holds 0 characters"), (b"short", "holds 5"), (b"two words of a token", "one word"), (b"\xff\x00" * 20, "one word"),
     (b"x" * 100_000, "512")],
)  # fmt: skip
def test_a_file_that_holds_no_token(content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=word):
        read_token(path)


def test_what_is_no_file_holds_no_token(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    wrong: list[Any] = [tmp_path / "pipe", tmp_path, tmp_path / "absent", "nul\0"]
    for path in wrong:
        with pytest.raises(ConfigError, match="token_file"):
            read_token(path)
