"""The client within a training job: what a server does or fails to do costs no time and no error there."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlfreeze_ds.errors import ConfigError, RLFreezeError
from rlfreeze_ds.policy.client import PolicyClient
from rlfreeze_ds.policy.messages import LARGEST_BODY, Answer
from rlfreeze_ds.policy.observation import SIZE
from rlfreeze_ds.policy.session import Sessions
from tests.policy.stub_server import TOKEN, Handler, StubServer, until

# A call that waited for anything would be slower every time; a machine with other work to do interrupts one now and then.
SLOWEST_CALL_S, SLOWEST_INTERRUPTED_S = 0.02, 0.1
QUICK = {"deadline_s": 0.5, "first_delay_s": 0.02, "longest_delay_s": 0.1}


def seen(number: float) -> np.ndarray:
    return np.full(SIZE, number, dtype=np.float32)


class Job:
    """A training loop in small: offers a window, goes on with its steps, takes the answer when there is one, and is timed."""

    def __init__(self, url: Any, run_id: str = "run", token: str = TOKEN, **settings: Any) -> None:
        self.client = PolicyClient(url, token, run_id, **{**QUICK, **settings})
        self.slowest_s = [0.0] * 3
        self.answered: list[int] = []
        self._took = False

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        self.slowest_s = sorted([*self.slowest_s, time.perf_counter() - begin])[1:]
        return result

    def window(self, value: float = 0.25, reward: float = 0.5, wait_s: float = 0.3) -> Answer | None:
        """One window; waits for its answer as steps would, at most ``wait_s``."""
        number = self.client.next_window
        self.timed(self.client.offer, number, seen(value), reward if self._took else None)
        deadline = time.monotonic() + wait_s
        while (answer := self.timed(self.client.take)) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        self._took = answer is not None
        if answer is not None:
            assert answer.window == number
            self.answered.append(number)
        return answer


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the client has logged so far; the token never is in it."""
    logger = logging.getLogger("rlfreeze_ds")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG, logger="rlfreeze_ds")

    def found(level: int = logging.INFO) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= level]

    yield found
    logger.removeHandler(caplog.handler)
    assert TOKEN not in " ".join(found(logging.DEBUG))


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "rlfreeze policy client"], 2.0)


def ended(job: Job, *last: Any) -> None:
    """The job ends: in bounded time, and without a slow call."""
    begin = time.perf_counter()
    job.client.close(*last)
    assert time.perf_counter() - begin < 2.5
    assert job.slowest_s[0] < SLOWEST_CALL_S and job.slowest_s[-1] < SLOWEST_INTERRUPTED_S


def test_every_window_of_an_episode_is_answered_and_learned_from(lines: Any) -> None:
    server = StubServer()
    job = Job(server.url)
    answers = [job.window(value, wait_s=5) for value in (0.1, 0.2, 0.3)]
    assert [answer.action for answer in answers] == [[pytest.approx(value)] * 2 for value in (0.1, 0.2, 0.3)]
    assert job.client.take() is None, "an answer was given twice"
    ended(job, seen(1.0), 0.75)
    (fragment,) = server.book.drain(1)
    assert fragment.observations[:, 0] == pytest.approx([0.1, 0.2, 0.3, 1.0]) and fragment.terminated
    assert fragment.rewards == pytest.approx([0.5, 0.5, 0.75]) and fragment.run_id == "run"
    assert {authorization for _, authorization, _ in server.requests} == {f"Bearer {TOKEN}"}
    assert lines() == [f"policy: {server.url} moves the thresholds of run run"]
    server.stop()


def test_a_server_that_comes_later_is_found(lines: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = Job(f"http://127.0.0.1:{port}")
    assert [job.window() for _ in range(3)] == [None] * 3
    (line,) = lines()
    assert "no answer" in line and "Connection refused" in line and job.client.state == "lost"
    server = StubServer(port)
    assert job.window(wait_s=5) is not None
    ended(job)
    assert len(lines()) == 2 and "again" in lines()[1]
    server.stop()


def test_a_server_that_is_killed_and_started_anew(lines: Any) -> None:
    server = StubServer()
    job = Job(server.url)
    assert job.window(wait_s=5) and job.window(wait_s=5)
    server.stop()
    assert [job.window() for _ in range(3)] == [None] * 3
    again = StubServer(server.port)
    assert job.window(wait_s=5) and job.window(wait_s=5)
    ended(job, seen(0.5), 0.25)
    (before,), (after,) = server.book.drain(1), again.book.drain(1)
    assert list(before.windows()) == [0] and list(after.windows()) == [5, 6]
    assert len(lines()) == 3 and ["moves", "no answer", "again"] == [
        word for line, word in zip(lines(), ("moves", "no answer", "again"), strict=True) if word in line
    ]
    again.stop()


def test_a_server_that_restarts_between_two_windows_gets_a_new_session(lines: Any) -> None:
    server = StubServer()
    job = Job(server.url)
    assert job.window(wait_s=5)
    server.stop()
    again = StubServer(server.port)
    assert job.window(wait_s=5) and job.window(wait_s=5)
    ended(job)
    (fragment,) = again.book.drain(1)
    assert list(fragment.windows()) == [1] and fragment.truncated
    assert not server.book.drain(1) and len(lines()) == 2 and "new one" in lines()[1]
    again.stop()


def test_an_idle_connection_that_the_server_closed_is_no_failure(lines: Any) -> None:
    server = StubServer()
    job = Job(server.url)
    assert job.window(wait_s=5)
    for connection in server._connections:
        connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.05)
    assert job.window(wait_s=5)
    ended(job)
    assert len(lines()) == 1 and len(server.book.drain(1)) == 1
    server.stop()


def test_a_server_that_answers_after_the_deadline(lines: Any) -> None:
    slow = threading.Event()

    def late(handler: Handler, path: str, body: bytes) -> bool:
        if path.endswith("/act") and slow.is_set():
            time.sleep(1.2)
        return False

    server = StubServer(fault=late)
    job = Job(server.url)
    assert job.window(wait_s=5)
    slow.set()
    assert job.window(wait_s=0.7) is None
    assert job.window(wait_s=0.7) is None
    slow.clear()
    assert job.window(wait_s=5) and job.window(wait_s=5)
    slow.set()
    job.window(wait_s=0.05)
    ended(job)
    assert "within 0.5 s" in lines()[1] and len(lines()) == 3
    # Windows 1 and 2 were never answered in time, so nobody learns from what the policy would have done there.
    learned = {window for fragment in server.book.drain(1) for window in fragment.windows()}
    assert 3 in learned and not {1, 2} & learned
    server.stop()


def test_a_server_that_drips(lines: Any) -> None:
    def drip(handler: Handler, path: str, body: bytes) -> bool:
        for byte in b"HTTP/1.1 200 OK\r\nX-Header: " + b"x" * 1000:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.05)
        return True

    server = StubServer(fault=drip)
    job = Job(server.url)
    assert job.window(wait_s=0.8) is None
    assert "within 0.5 s" in lines()[0]
    ended(job)
    server.stop()


def _answer(**changes: Any) -> bytes:
    return json.dumps({"version": 1, "window": 0, "action": [0.0, 0.0], "updates": 0, **changes}).encode()


@pytest.mark.parametrize(
    ("status", "body", "headers", "word"),
    [
        (200, b"<html>hello</html>", {}, "not one of a policy server"),
        (200, b"\x00\xff\xfe" * 100, {}, "not one of a policy server"),
        (200, b"[" * 10_000, {}, "not one of a policy server"),
        (200, b"", {}, "not one of a policy server"),
        (200, _answer(action=[float("nan"), 0.0]), {}, "not one of a policy server"),
        (200, _answer(action=[float("inf"), 0.0]), {}, "not one of a policy server"),
        (200, _answer(action=[7.0, 0.0]), {}, "not one of a policy server"),
        (200, _answer(action=[0.0]), {}, "not one of a policy server"),
        (200, _answer(window=17), {}, "answers window 17 when asked about 0"),
        (200, _answer(version=2), {}, "speaks version 2 of the messages, this job version 1"),
        (200, json.dumps({"version": 3, "other": TOKEN}).encode(), {}, "speaks version 3"),
        (200, _answer(more=TOKEN), {}, "not one of a policy server"),
        (200, _answer() + b" " * 2 * LARGEST_BODY, {}, f"longer than {LARGEST_BODY} bytes"),
        (307, b"", {"Location": "http://127.0.0.1:9/"}, "sends us elsewhere"),
        (401, b'{"error": "no"}', {}, "token is not the server's"),
        (403, json.dumps({"error": f"not {TOKEN}\n\x1b[2J" + "x" * 999}).encode(), {}, "HTTP 403: not ***"),
        (413, b"", {}, "HTTP 413"),
        (422, b'{"error": [1]}', {}, "HTTP 422"),
        (204, b"", {}, "HTTP 204"),
    ],
)
def test_answers_that_are_of_no_use(lines: Any, status: int, body: bytes, headers: dict[str, str], word: str) -> None:
    def useless(handler: Handler, path: str, request: bytes) -> bool:
        if path.endswith("/act"):
            handler.say(status, body, headers)
        return path.endswith("/act")

    server = StubServer(fault=useless)
    job = Job(server.url, longest_delay_s=0.05)
    assert job.window(wait_s=0.4) is None and job.client.state == "refused"
    num_tries = len([path for path, _, _ in server.requests if path.endswith("/act")])
    assert 2 <= num_tries <= 40, "no try, or no pause between tries"
    (line,) = lines()
    assert word in line and "thresholds stay" in line and len(line) < 400 and line.isprintable()
    server.fault = None
    assert job.window(wait_s=5) is not None
    ended(job)
    assert len(lines()) == 2 and "again" in lines()[1]
    server.stop()


@pytest.mark.parametrize("path", ["/v1/sessions", "/act"])
def test_a_server_of_another_version_is_asked_again(lines: Any, path: str) -> None:
    """It may be replaced by the right one."""

    def other(handler: Handler, asked: str, body: bytes) -> bool:
        if asked.endswith(path):
            handler.say(409, {"error": "version 1 of the messages; this server speaks version 2"})
        return asked.endswith(path)

    server = StubServer()
    job = Job(server.url)
    assert job.window(wait_s=5)
    server.stop()
    again = StubServer(server.port, fault=other)
    assert job.window() is None and job.client.state == "refused" and "speaks version 2" in lines()[-1]
    again.fault = None
    assert job.window(wait_s=5)
    ended(job)
    assert "again" in lines()[-1]
    again.stop()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_asked_again_in_the_same_session(lines: Any, status: int) -> None:
    trouble = threading.Event()

    def fault(handler: Handler, path: str, request: bytes) -> bool:
        if trouble.is_set():
            handler.say(status, b"")
        return trouble.is_set()

    server = StubServer(fault=fault)
    job = Job(server.url)
    assert job.window(wait_s=5)
    trouble.set()
    threading.Timer(0.2, trouble.clear).start()
    assert job.window(wait_s=5)
    ended(job)
    assert [len(fragment) for fragment in server.book.drain(1)] == [1] and server.book.counts()["opened"] == 1
    assert len(lines()) == 3 and f"HTTP {status}" in lines()[1]
    server.stop()


def test_a_lost_answer_is_asked_for_again_and_counts_once(lines: Any) -> None:
    lose = threading.Event()

    def fault(handler: Handler, path: str, body: bytes) -> bool:
        if path.endswith("/act") and lose.is_set():
            lose.clear()
            handler.say = lambda *_: handler.connection.shutdown(socket.SHUT_RDWR)  # after the book has taken it in
        return False

    server = StubServer(fault=fault)
    job = Job(server.url)
    for _ in range(3):
        assert job.window(wait_s=5)
        lose.set()
    assert job.window(wait_s=5)
    ended(job)
    assert server.book.counts()["retries"] == 3 and [len(fragment) for fragment in server.book.drain(1)] == [3]
    server.stop()


def test_a_wrong_token(lines: Any) -> None:
    server = StubServer()
    wrong = "another-token-of-the-tests"
    job = Job(server.url, token=wrong)
    assert job.window() is None and job.window() is None
    ended(job)
    (line,) = lines()
    assert "HTTP 401" in line and "token_file" in line and wrong not in line and wrong not in repr(job.client)
    assert server.book.counts()["opened"] == 0
    server.stop()


def test_a_second_client_of_the_same_run_wins(lines: Any) -> None:
    server = StubServer()
    first, second = Job(server.url), Job(server.url)
    assert first.window(wait_s=5) and second.window(wait_s=5)
    assert first.window() is None and first.client.state == "replaced"
    num_requests = len(server.requests)
    assert first.window() is None and first.window() is None and len(server.requests) == num_requests
    assert second.window(wait_s=5), "the second was let go too"
    ended(first)
    ended(second)
    assert len(lines()) == 3 and "another client" in lines(logging.WARNING)[0]
    server.stop()


def test_the_newest_window_alone_waits() -> None:
    hold = threading.Event()

    def fault(handler: Handler, path: str, body: bytes) -> bool:
        hold.wait(5)
        return False

    server = StubServer(fault=fault)
    job = Job(server.url, deadline_s=5.0)
    for _ in range(50):
        job.window(wait_s=0.0)
    hold.set()
    until(lambda: job.timed(job.client.take))
    acted = [json.loads(body)["window"] for path, _, body in server.requests if path.endswith("/act")]
    assert acted[-1] == 49 and len(acted) <= 2
    ended(job)
    server.stop()


def test_an_answer_that_was_never_taken_ends_the_episode() -> None:
    server = StubServer()
    job = Job(server.url)
    job.client.offer(0, seen(0.1), None)
    until(lambda: server.book.counts()["opened"] == 1 and job.client.state == "connected")
    job.client.offer(1, seen(0.2), 0.9)  # the reward of thresholds that the policy did not choose
    until(job.client.take)
    job.client.offer(2, seen(0.3), 0.7)
    until(job.client.take)
    ended(job)
    (fragment,) = server.book.drain(1)
    assert list(fragment.windows()) == [1] and fragment.rewards == pytest.approx([0.7])
    server.stop()


@pytest.mark.parametrize("bad", [seen(float("nan")), seen(1e9), np.zeros(3)])
def test_a_jobs_own_nonsense_is_not_sent(lines: Any, bad: np.ndarray) -> None:
    server = StubServer()
    job = Job(server.url)
    job.client.offer(0, bad, None)
    until(lambda: job.client.state == "refused")
    assert job.window(wait_s=5) is not None
    ended(job, bad, 0.5)
    assert len(lines()) == 2 and not [1 for path, _, _ in server.requests if path.endswith("/close")]
    server.stop()


def test_a_reward_that_is_no_number_begins_anew() -> None:
    server = StubServer()
    job = Job(server.url)
    assert job.window(wait_s=5) and job.window(reward=float("nan"), wait_s=5)
    ended(job)
    assert server.book.counts()["opened"] == 2 and not server.book.drain(1)
    server.stop()


def test_the_episode_goes_on_after_the_jobs_restart() -> None:
    book = Sessions()
    server = StubServer(book=book)
    before = Job(server.url)
    assert all(before.window(wait_s=5) for _ in range(3))
    state = json.loads(json.dumps(before.client.state_dict()))
    ended(before)
    after = Job(server.url)
    after.client.load_state_dict(state)
    assert after.client.next_window == 3
    assert after.window(wait_s=5) and after.window(wait_s=5)
    ended(after)
    assert [list(fragment.windows()) for fragment in book.drain(1)] == [[0, 1], [3]]
    for wrong in ({}, {"next_window": -1}, {"next_window": "3"}, {"next_window": True}, {"next_window": 2.0}):
        with pytest.raises(ConfigError, match="next_window"):
            after.client.load_state_dict(wrong)
    server.stop()


def test_nothing_is_sent_to_where_a_server_was() -> None:
    server = StubServer()
    place: list[str | None] = [server.url]
    job = Job(lambda: place[0])
    assert job.window(wait_s=5)
    place[0] = None
    num = len(server.requests)
    assert job.window(wait_s=0.3) is None and len(server.requests) == num
    place[0] = server.url
    assert job.window(wait_s=5)
    ended(job)
    server.stop()


def test_closing_does_not_wait_for_a_server_that_hangs() -> None:
    """Whether it hangs before it accepts, before it answers, or in mid-answer."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        job = Job(f"http://127.0.0.1:{port}", deadline_s=60.0)
        job.window(wait_s=0.1)
        ended(job)
        assert not job.client._thread.is_alive()
        for filler in fillers:
            filler.close()

    for answered in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"):

        def hang(handler: Handler, path: str, body: bytes, answered: bytes = answered) -> bool:
            handler.wfile.write(answered)
            time.sleep(4)
            return True

        server = StubServer(fault=hang)
        job = Job(server.url, deadline_s=60.0)
        job.window(wait_s=0.1)
        ended(job)
        assert not job.client._thread.is_alive()
        server.stop()


def test_closing_tells_a_server_even_when_a_request_hangs(lines: Any) -> None:
    hang = threading.Event()

    def fault(handler: Handler, path: str, body: bytes) -> bool:
        if path.endswith("/act") and hang.is_set():
            time.sleep(5)
        return False

    server = StubServer(fault=fault)
    job = Job(server.url, deadline_s=60.0)
    assert job.window(wait_s=5) and job.window(wait_s=5)
    hang.set()
    job.window(wait_s=0.1)
    ended(job)
    assert server.book.counts()["closed"] == 1
    job.client.close()
    assert len(lines()) == 1
    server.stop()


def test_a_job_that_never_had_a_window_just_ends() -> None:
    job = Job("http://127.0.0.1:1")
    ended(job)


def test_an_address_that_is_known_later(lines: Any) -> None:
    place: list[Any] = [None]

    def url() -> str | None:
        if isinstance(place[0], Exception):
            raise place[0]
        return place[0]

    job = Job(url)
    assert job.window() is None and not lines(), "waiting for a server that is being started is no failure"
    server = StubServer()
    place[0] = server.url
    assert job.window(wait_s=5) and job.window(wait_s=5)
    place[0] = RLFreezeError("the server ended with code 3")
    assert job.window() is None and "ended with code 3" in lines()[1]
    other = StubServer()
    place[0] = other.url
    assert job.window(wait_s=5) and other.book.counts()["sessions"] == 1
    ended(job)
    assert len(lines()) == 3
    server.stop()
    other.stop()


def test_pauses_grow_to_their_limit_and_differ_between_runs() -> None:
    tries: dict[str, list[float]] = {"a": [], "b": []}

    def address(run_id: str) -> Callable[[], str]:
        def url() -> str:
            tries[run_id].append(time.monotonic())
            raise RLFreezeError("there is none")

        return url

    jobs = [Job(address(run_id), run_id, first_delay_s=0.02, longest_delay_s=0.16) for run_id in tries]
    for job in jobs:
        job.window(wait_s=0.0)
    time.sleep(1.0)
    for job in jobs:
        ended(job)
    pauses = {run_id: np.diff(times) for run_id, times in tries.items()}
    for found in pauses.values():
        for k, pause in enumerate(found):
            longest = min(0.16, 0.02 * 2**k)
            assert 0.5 * longest <= pause < longest + 0.5
    assert not np.allclose(pauses["a"][:5], pauses["b"][:5], atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"url": "ftp://host:1"}, "must be http"),
        ({"url": "host:80"}, "must be http"),
        ({"url": "http://user:secret@host"}, "must not hold a user"),
        ({"url": "http://host:99999"}, "not an address"),
        ({"url": "http://host/?a=b"}, "must end with the port"),
        ({"run_id": "a/b"}, "run_id"),
        ({"token": "short"}, "5 characters"),
        ({"token": "a token with blanks in it"}, "one word"),
        ({"token": "a-token-with\r\nX-Header: 1"}, "one word"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"url": "https://host", "ca_file": "/nowhere"}, "ca_file"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], word: str) -> None:
    settings = {"url": "http://127.0.0.1:1", "token": TOKEN, "run_id": "run", **changes}
    with pytest.raises(ConfigError, match=word) as caught:
        PolicyClient(**settings)
    assert settings["token"] not in str(caught.value) and "secret" not in str(caught.value)


def test_a_token_that_crosses_a_network_in_the_open_is_warned_of(lines: Any) -> None:
    PolicyClient("http://policy.example:8000", TOKEN, "run").close()
    (line,) = lines(logging.WARNING)
    assert "not https" in line


def test_a_server_behind_https_is_trusted_only_with_its_certificate(lines: Any, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = StubServer()
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    url = f"https://localhost:{server.port}"
    stranger, friend = Job(url, "stranger"), Job(url, "friend", ca_file=certificate)
    assert stranger.window() is None and "certificate verify failed" in lines()[0]
    assert friend.window(wait_s=5) and friend.window(wait_s=5)
    ended(stranger)
    ended(friend)
    assert server.book.counts()["opened"] == 1 and len(lines()) == 2
    server.stop()


def test_the_client_imports_neither_ray_nor_torch_nor_fastapi() -> None:
    code = (
        "import sys, rlfreeze_ds.policy.client, rlfreeze_ds.policy.auto_server, rlfreeze_ds.policy.session\n"
        "print([m for m in ('torch', 'ray', 'fastapi', 'uvicorn', 'deepspeed', 'gymnasium') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
