"""The HTTP side, over a real socket: who may ask what, and what comes back."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the server extra: fastapi")
pytest.importorskip("uvicorn", reason="needs the server extra: uvicorn")

from rlfreeze_ds.policy import server  # noqa: E402
from rlfreeze_ds.policy.fragment import Decision  # noqa: E402
from rlfreeze_ds.policy.messages import LARGEST_BODY  # noqa: E402
from rlfreeze_ds.policy.observation import NUM_ACTIONS, SIZE  # noqa: E402
from rlfreeze_ds.policy.serve import _bind, _Http  # noqa: E402
from rlfreeze_ds.policy.session import Sessions  # noqa: E402

TOKEN = "a-token-of-the-tests"


class _Policy:
    updates, transitions = 7, 40

    def __init__(self) -> None:
        self.fails = False

    def act(self, observation: np.ndarray) -> Decision:
        if self.fails:
            raise ValueError("no policy today")
        action = np.full(NUM_ACTIONS, 0.25, dtype=np.float32)
        return Decision(2 * action, action, {"action_logp": np.float32(0)}, self.updates)


class _Served:
    """A server of the tests' own process."""

    def __init__(self) -> None:
        self.policy = _Policy()
        self.sessions = Sessions()
        listener = _bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.http = _Http(server.make_app(self.sessions, self.policy, TOKEN), listener)
        self.http.start(lambda: None)

    def ask(self, path: str, body: Any = None, token: str | None = TOKEN, method: str = "POST") -> tuple[int, Any]:
        """Status and decoded answer. ``body``: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, json.loads(text) if "json" in response.headers["content-type"] else text
        finally:
            connection.close()

    def raw(self, request: bytes) -> int:
        """Status of the answer to what no client would send."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(request)
            return int(connection.recv(100).split()[1])

    def opened(self, run_id: str = "run") -> str:
        status, answer = self.ask("/v1/sessions", {"run_id": run_id})
        assert status == 200
        return f"/v1/sessions/{answer['session_id']}"


@pytest.fixture(scope="module")
def served() -> Iterator[_Served]:
    served = _Served()
    yield served
    served.http.stop()


def _window(number: int, reward: float | None = None, **changes: Any) -> dict[str, Any]:
    return {"version": 1, "window": number, "observation": [0.1] * SIZE, "reward": reward, **changes}


def test_an_episode(served: _Served) -> None:
    session = served.opened()
    for number in range(3):
        status, answer = served.ask(f"{session}/act", _window(number, 0.5 if number else None))
        assert (status, answer) == (200, {"version": 1, "window": number, "action": [0.25, 0.25], "updates": 7})
    # A retry is no second transition.
    assert served.ask(f"{session}/act", _window(2, 0.5))[0] == 200
    assert served.ask(f"{session}/close", _window(3, 0.5)) == (200, {"version": 1, "transitions": 3})
    fragments = served.sessions.drain(1)
    assert [len(fragment.rewards) for fragment in fragments] == [3]
    assert fragments[0].actions.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "\xe9"])
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/x/act", "/metrics", "/nothing"])
def test_without_the_token_nothing_is_served(served: _Served, token: str | None, path: str) -> None:
    before = served.sessions.counts()["opened"]
    status, answer = served.ask(path, {"run_id": "intruder"}, token)
    assert status == 401
    assert list(answer) == ["error"] and TOKEN not in answer["error"]
    assert served.sessions.counts()["opened"] == before


def test_the_scheme_must_be_bearer(served: _Served) -> None:
    for header in (f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN} {TOKEN}"):
        assert served.raw(f"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nAuthorization: {header}\r\n\r\n".encode()) == 401


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b"", {400}),
        (b"\x80\x04\x95\xff\xfe\x00", {400}),  # binary, no UTF-8
        (b"[" * 8000 + b"]" * 8000, {400, 422}),
        (b'{"run_id":' * 1500, {400, 422}),
        (b'{"run_id": "a", "next_window": ' + b"9" * 5000 + b"}", {400, 422}),
        (b'{"run_id": "a", "run": 1}', {422}),
        (b'{"run_id": "a b"}', {422}),
        (b'{"run_id": ["a"]}', {422}),
        (b'{"run_id": "a", "version": "1"}', {422}),
        (b"null", {400}),
        (b"{" + b" " * LARGEST_BODY, {413}),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused(served: _Served, body: bytes, statuses: set[int]) -> None:
    status, answer = served.ask("/v1/sessions", body)
    assert status in statuses
    assert list(answer) == ["error"] and len(answer["error"]) < 400


def test_wrong_numbers_are_refused_and_change_nothing(served: _Served) -> None:
    session = served.opened("numbers")
    assert served.ask(f"{session}/act", _window(0))[0] == 200
    before = served.sessions.counts()["transitions"]
    for wrong in ("NaN", "Infinity", "1e999", "-1e7", "true", '"1"', "null"):
        values = ", ".join([wrong, *["0.0"] * (SIZE - 1)])
        body = f'{{"window": 1, "observation": [{values}], "reward": 0.0}}'.encode()
        assert served.ask(f"{session}/act", body)[0] == 422, wrong
    assert served.ask(f"{session}/act", _window(1, 0.0, observation=[0.0] * (SIZE + 1)))[0] == 422
    body = json.dumps(_window(1)).replace('"reward": null', '"reward": NaN').encode()
    assert served.ask(f"{session}/act", body)[0] == 422
    assert served.sessions.counts()["transitions"] == before
    assert served.ask(f"{session}/act", _window(1, 0.0))[0] == 200


def test_another_version_hears_which_is_spoken(served: _Served) -> None:
    for body in ({"run_id": "a", "version": 2}, {"version": 3, "what": "it may say then"}):
        status, answer = served.ask("/v1/sessions", body)
        assert status == 409
        assert "speaks version 1" in answer["error"]


def test_no_such_session_or_route(served: _Served) -> None:
    assert served.ask("/v1/sessions/none/act", _window(0))[0] == 404
    assert served.ask("/v1/sessions/none/close", {"window": 0})[0] == 404
    status, answer = served.ask("/docs", method="GET")
    assert status == 404 and "POST /v1/sessions" in answer["error"]
    assert served.ask("/v1/sessions", method="GET")[0] == 405
    first = served.opened("twice")
    served.opened("twice")
    assert served.ask(f"{first}/act", _window(0))[0] == 409


def test_a_body_is_bounded_whatever_it_says(served: _Served, monkeypatch: pytest.MonkeyPatch) -> None:
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    assert served.raw(head + b"Content-Length: 999999999\r\n\r\n") == 413
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    assert served.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 5) == 413
    monkeypatch.setattr(server, "BODY_S", 0.2)
    assert served.raw(head + b"Content-Length: 10\r\n\r\n{") == 408
    assert served.raw(b"\x16\x03\x01\x00\xff not HTTP\r\n\r\n") == 400


def test_health_and_metrics(served: _Served) -> None:
    assert served.ask("/healthz", token=None, method="GET") == (200, {"status": "ok"})
    session = served.opened("metrics")
    served.ask(f"{session}/act", _window(0))
    status, text = served.ask("/metrics", method="GET")
    assert status == 200
    values = {name: float(value) for name, value in (line.split() for line in text.splitlines() if not line.startswith("#"))}
    assert values["rlfreeze_updates_total"] == 7 and values["rlfreeze_transitions_learned_total"] == 40
    assert values["rlfreeze_sessions"] == served.sessions.counts()["sessions"]
    assert values['rlfreeze_answer_seconds_bucket{le="+Inf"}'] == values["rlfreeze_answer_seconds_count"] > 0
    assert TOKEN not in text


def test_a_failing_policy_is_the_servers_fault(served: _Served) -> None:
    session = served.opened("failing")
    served.policy.fails = True
    status, answer = served.ask(f"{session}/act", _window(0))
    served.policy.fails = False
    assert status == 500 and list(answer) == ["error"]
    assert served.ask(f"{session}/act", _window(0))[0] == 200
