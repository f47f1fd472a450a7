"""The policy server's HTTP side: the routes of :mod:`messages` over a session book, behind a token. Knows nothing of ray."""

from __future__ import annotations

import asyncio
import bisect
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException

from rlfreeze_ds.log import logger
from rlfreeze_ds.policy.fragment import Decision
from rlfreeze_ds.policy.messages import LARGEST_BODY, VERSION, Close, Open, Window
from rlfreeze_ds.policy.session import SessionError, Sessions

BODY_S = 10.0
"""How long a request may take to arrive: a client that trickles holds a connection no longer."""

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of the histogram of answer seconds."""

_Model = TypeVar("_Model", bound=BaseModel)
_Scope = dict[str, Any]
_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


class Policy(Protocol):
    """What :class:`~rlfreeze_ds.policy.learner.Learner` tells about itself."""

    @property
    def updates(self) -> int: ...

    @property
    def transitions(self) -> int: ...

    def act(self, observation: np.ndarray) -> Decision: ...


class Refused(Exception):
    """A request that gets ``status`` and ``{"error": text}``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class AnswerSeconds:
    """A histogram as Prometheus wants it: what the server itself takes, from a whole request to its answer."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        lines, total = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


def make_app(sessions: Sessions, policy: Policy, token: str) -> Callable[[_Scope, _Receive, _Send], Awaitable[None]]:
    """The ASGI application. Acting happens in the event loop: it takes well under a millisecond.

    Args:
        sessions: the book of episodes.
        policy: that decides.
        token: every route but ``/healthz`` asks for it.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    seconds = AnswerSeconds()
    refusals = [0]

    @app.post("/v1/sessions")
    async def open_session(request: Request) -> Response:
        message = _read(Open, await request.body())
        return _write(_book(sessions.open, message))

    @app.post("/v1/sessions/{session_id}/act")
    async def act(session_id: str, request: Request) -> Response:
        started = time.perf_counter()
        message = _read(Window, await request.body())
        answer = _book(sessions.act, session_id, message, policy.act)
        seconds.add(time.perf_counter() - started)
        return _write(answer)

    @app.post("/v1/sessions/{session_id}/close")
    async def close(session_id: str, request: Request) -> Response:
        return _write(_book(sessions.close, session_id, _read(Close, await request.body())))

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response('{"status": "ok"}', media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        counts = dict(sessions.counts())
        gauges = {"sessions": counts.pop("sessions"), "transitions_waiting": counts.pop("waiting")}
        counters = {
            **{f"transitions_{name}" if name == "dropped" else name: count for name, count in counts.items()},
            "transitions_learned": policy.transitions,
            "updates": policy.updates,
            "refused": refusals[0],
        }
        lines = seconds.lines("rlfreeze_answer_seconds")
        for name, value in gauges.items():
            lines += [f"# TYPE rlfreeze_{name} gauge", f"rlfreeze_{name} {value}"]
        for name, value in counters.items():
            lines += [f"# TYPE rlfreeze_{name}_total counter", f"rlfreeze_{name}_total {value}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        refusals[0] += 1
        return _error(error.status, error.text)

    @app.exception_handler(HTTPException)
    async def no_such_route(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, f"{error.detail}. The routes are POST /v1/sessions[/ID/act|/ID/close].")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        logger.warning("a request failed in the server: %s: %s", type(error).__name__, error)
        return _error(500, "the server failed; its log says how")

    return _Guard(app, token)


class _Guard:
    """Refuses before anything is parsed: no token, a body too large, one that does not come to its end."""

    def __init__(self, app: FastAPI, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        try:
            if scope["path"] != "/healthz" and not self._allowed(headers.get(b"authorization", b"")):
                raise Refused(401, "a bearer token is needed: Authorization: Bearer ..., with what the server's token file holds")
            body = await _body(headers, receive)
        except Refused as error:
            # What is left of the body is not read: the connection ends with the answer.
            response = _error(error.status, error.text, {"connection": "close"})
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            return await response(scope, receive, send)
        sent = False

        async def replay() -> dict[str, Any]:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _allowed(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        # Compared in any case, and in constant time: how long it takes tells nothing about the token.
        same = hmac.compare_digest(token.strip(), self._token)
        return same and scheme.lower() == b"bearer"


async def _body(headers: dict[bytes, bytes], receive: _Receive) -> bytes:
    """The request's body, of :data:`LARGEST_BODY` bytes at most, declared or not."""
    too_large = Refused(413, f"a body of more than {LARGEST_BODY} bytes")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > LARGEST_BODY:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the connection ended within the body")
                body += message.get("body", b"")
                if len(body) > LARGEST_BODY:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:g} s") from None


class _Versioned(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    version: int


def _read(model: type[_Model], body: bytes) -> _Model:
    """The message in ``body``. Its version is looked at first: another one's fields mean nothing here."""
    try:
        version = _Versioned.model_validate_json(body).version
    except ValidationError:
        version = VERSION  # none, or no JSON: what follows says so
    if version != VERSION:
        raise Refused(
            409, f"message version {version}: this server speaks version {VERSION}. Install the same release on both sides."
        )
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        status = 422 if place else 400  # the fields are wrong, or it is no JSON object at all
        raise Refused(status, f"{model.__name__}{'.' if place else ''}{place[:200]}: {first['msg']}") from None


def _book(call: Callable[..., BaseModel], *arguments: Any) -> BaseModel:
    """A call of the session book, its errors as answers."""
    try:
        return call(*arguments)
    except SessionError as error:
        raise Refused(error.status, str(error)) from None


def _write(message: BaseModel) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps({"error": text}), status, headers, media_type="application/json")
