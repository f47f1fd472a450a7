"""``python -m rlfreeze_ds serve`` as a process: starts, says so, learns, keeps to itself, and leaves nothing behind."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlfreeze_ds.__main__ import main
from rlfreeze_ds.policy.observation import SIZE

ROOT = Path(__file__).parents[2]
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""As the kernel writes it: in IPv4, that in IPv6, and of IPv6."""
needs_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "fastapi", "uvicorn")),
    reason="needs the server extra: ray[rllib], fastapi, uvicorn",
)


class Process:
    """A server as a child, and what it prints."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        program: Sequence[str] = ("-m", "rlfreeze_ds"),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.ready, self.log, self.token_file = folder / "ready", folder / "log", folder / "token"
        self.ready.unlink(missing_ok=True)
        # Without what a Ray in this process left there.
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder), "TMPDIR": "/tmp"}
        environment = {**plain, **own, **(variables or {})}
        with self.log.open("w") as log:
            self.child = subprocess.Popen(
                [
                    sys.executable, "-P", *program, "serve", "--port", "0", "--ready-file", str(self.ready),
                    "--token-file", str(self.token_file), "--exit-with-parent", *options,
                ],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=folder,
            )  # fmt: skip
        end = time.monotonic() + 90
        while not self.ready.exists():
            assert self.child.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        self.port = json.loads(self.ready.read_text())["port"]
        self.token = self.token_file.read_text().strip()
        self.tree = _tree(self.child.pid)

    def ask(self, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"Authorization": f"Bearer {self.token}"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        assert response.status == 200, text
        return json.loads(text) if "json" in response.headers["content-type"] else text

    def metric(self, name: str) -> float:
        return next(float(line.split()[1]) for line in self.ask("/metrics").splitlines() if line.startswith(f"{name} "))

    def ends(self, end: Callable[[], Any], within_s: float = 20.0) -> int:
        """How it ended by ``end``; asserts that all of its processes did."""
        self.tree |= _tree(self.child.pid)
        started = time.monotonic()
        end()
        code = self.child.wait(timeout=30)
        assert time.monotonic() - started < within_s
        while left := {one for one in self.tree if start_time(one[0]) == one[1]}:
            assert time.monotonic() - started < within_s, left
            time.sleep(0.05)
        self.child.stdin.close()
        return code


def _environment(pid: int) -> list[bytes]:
    """Its variables; none when it is gone, as some of Ray's soon are."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def start_time(pid: int) -> str | None:
    """Tells a process from a later one of the same number; None when it is gone or only waits to be collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _tree(pid: int) -> set[tuple[int, str]]:
    """(process, start time) of ``pid`` and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, last = {pid}, set()
    while found != last:
        last = found
        found = found | {child for child, parent in parents.items() if parent in found}
    return {(one, start) for one in found if (start := start_time(one)) is not None}


def listening(pids: set[int]) -> set[str]:
    """Addresses, as the kernel writes them, on which any of the processes listens."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(entry))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Process]:
    process = Process(folder, "--checkpoint-dir", str(folder / "kept"), "--train-batch", "16", "--seed", "1")
    yield process
    process.child.kill()


@needs_extra
def test_nothing_listens_beyond_loopback(served: Process) -> None:
    found = listening({pid for pid, _ in served.tree})
    assert "0100007F" in found
    assert found <= LOOPBACK


@needs_extra
def test_the_token_is_its_owners_alone(served: Process) -> None:
    assert len(served.token) >= 32
    assert stat.S_IMODE(served.token_file.stat().st_mode) == 0o600
    assert served.token not in served.log.read_text()
    for pid, _ in served.tree:
        for name in ("cmdline", "environ"):
            assert served.token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


@needs_extra
def test_a_taken_port_is_an_error_at_once(served: Process, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", str(served.port)]) == 2
    assert f"--port {served.port}: Address already in use" in capsys.readouterr().err


@needs_extra
def test_jobs_teach_it_and_a_restart_goes_on(served: Process, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.metric("rlfreeze_updates_total") == 0
    session = f"/v1/sessions/{served.ask('/v1/sessions', {'run_id': 'job'})['session_id']}"
    for window in range(20):
        reward = 0.1 if window else None
        answer = served.ask(f"{session}/act", {"window": window, "observation": [0.1] * SIZE, "reward": reward})
        assert answer["window"] == window
    end = time.monotonic() + 20
    while served.metric("rlfreeze_updates_total") == 0:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert served.ends(lambda: served.child.send_signal(signal.SIGTERM)) == 0
    assert [entry.name for entry in (folder / "kept").iterdir()] == ["checkpoint-000000001"]
    assert not served.ready.exists()
    left = {entry.name for entry in folder.iterdir()}
    assert left == {"kept", "log", "token"}, "nothing else in its home or working directory"

    assert main(["serve", "--checkpoint-dir", str(folder / "kept")]) == 2
    assert "holds a policy: go on from it with --restore" in capsys.readouterr().err
    again = Process(folder, "--checkpoint-dir", str(folder / "kept"), "--restore")
    assert again.token == served.token
    assert again.metric("rlfreeze_updates_total") == 1
    assert again.ends(again.child.stdin.close) == 0


@needs_extra
def test_a_killed_server_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    process = Process(tmp_path / "home")
    variables = [entry for pid, _ in process.tree for entry in _environment(pid)]
    tokens = {Path(entry.decode().partition("=")[2]) for entry in variables if entry.startswith(b"RAY_AUTH_TOKEN_PATH=")}
    (token,) = tokens  # some hold it no longer: a title takes the room of the environment
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert process.ends(process.child.kill) == -signal.SIGKILL
    assert not token.parent.exists()


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("ray", "fastapi") else find_spec(name))
    assert main(["serve"]) == 2
    assert "ray, fastapi not installed: the server needs pip install 'rlfreeze_ds[server]'" in capsys.readouterr().err


@needs_extra
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--restore"], "--restore needs --checkpoint-dir"),
        (["--port", "70000"], "must be between 0 and 65535"),
        (["--host", "203.0.113.7"], "cannot listen on --host 203.0.113.7"),
        (["--algorithm", "DQN"], "must be one of PPO, SAC, APPO"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert main(["serve", *options]) == 2
    assert words in capsys.readouterr().err
    assert time.monotonic() - started < 5


@needs_extra
def test_a_token_file_must_be_private_and_hold_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("not-secret-enough-for-us")
    token.chmod(0o644)
    assert main(["serve", "--token-file", str(token)]) == 2
    assert f"--token-file '{token}': has rights 0644, so others can reach it" in capsys.readouterr().err
    token.chmod(0o600)
    for text in ("short", "two words of which none counts", "x" * 600):
        token.write_text(text)
        assert main(["serve", "--token-file", str(token)]) == 2
        words = capsys.readouterr().err
        assert "a token is one" in words and text not in words
    os.unlink(token)
    os.mkfifo(token, 0o600)
    assert main(["serve", "--token-file", str(token)]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert main(["serve", "--token-file", str(tmp_path / "absent" / "token")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_asking_for_help_imports_no_ray() -> None:
    code = "import sys, rlfreeze_ds.__main__, rlfreeze_ds.policy.serve; print([m for m in ('ray', 'torch') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout == "[]\n"
