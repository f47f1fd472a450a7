"""A policy server of a few lines, for tests of what talks to one: the real book of sessions behind http.server, and faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from rlfreeze_ds.policy.fragment import Decision
from rlfreeze_ds.policy.messages import Close, Open, Window
from rlfreeze_ds.policy.session import SessionError, Sessions

TOKEN = "a-token-of-the-tests-0123456789"
Fault = Callable[["Handler", str, bytes], bool]
"""Called first with the path and the body of a request; True when it has answered."""


def decide(observation: np.ndarray) -> Decision:
    """A policy whose action tells what it saw: the first entry of the observation."""
    action = np.full(2, observation[0], dtype=np.float32)
    return Decision(action, np.clip(action, -1, 1), {"action_logp": np.float32(observation[0])})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StubServer

    def do_POST(self) -> None:
        stub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with stub.lock:
            stub.requests.append((self.path, self.headers.get("Authorization", ""), body))
        if stub.fault is not None and stub.fault(self, self.path, body):
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.say(401, {"error": "wrong token"})
        try:
            parts = self.path.strip("/").split("/")
            if parts[-1] == "act":
                reply = stub.book.act(parts[-2], Window.model_validate_json(body), decide)
            elif parts[-1] == "close":
                reply = stub.book.close(parts[-2], Close.model_validate_json(body))
            else:
                reply = stub.book.open(Open.model_validate_json(body))
        except SessionError as error:
            return self.say(error.status, {"error": str(error)})
        self.say(200, reply.model_dump())

    def say(self, status: int, message: Any, headers: dict[str, str] | None = None) -> None:
        """Answer, with ``message`` as JSON or, if it is bytes, as it is."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


class StubServer(ThreadingHTTPServer):
    """Serves from its construction until :meth:`stop`; ``book`` None: one that remembers nothing."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, port: int = 0, book: Sessions | None = None, fault: Fault | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.socket.settimeout(1.0)  # a connection may be gone again before it is accepted, and stop() would wait for the next
        self.book, self.fault = book or Sessions(), fault
        self.requests: list[tuple[str, str, bytes]] = []
        self.lock = threading.Lock()
        self._connections: list[Any] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), name="stub server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def port(self) -> int:
        return self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that go away are what is tested

    def stop(self) -> None:
        """As if killed: every connection breaks."""
        self.shutdown()
        self.server_close()
        for connection in self._connections:
            try:
                connection.shutdown(2)
            except OSError:
                pass
        self._thread.join(5)


def until(true: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What ``true`` returns once it is true; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
    return found
