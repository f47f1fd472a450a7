"""One request to a policy server and what may come of it: a checked answer, none, or one that is of no use."""

from __future__ import annotations

import http.client
import json
from typing import Any, TypeVar

from pydantic import BaseModel

from rlfreeze_ds.policy.connection import Connection, TooLargeError
from rlfreeze_ds.policy.messages import LARGEST_BODY, VERSION

Reply = TypeVar("Reply", bound=BaseModel)


class LostError(Exception):
    """No answer; a later try may bring one."""


class RefusedError(Exception):
    """The server does not want us, or says what we do not understand. ``status``: of HTTP, 0 for the latter."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Calls:
    """To one server, from one thread; :meth:`limit` and :meth:`abort` are for another."""

    def __init__(self, url: str, token: str, deadline_s: float, ca_file: str | None = None) -> None:
        """
        Raises:
            ConfigError: see :class:`~rlfreeze_ds.policy.connection.Connection`.
        """
        self._connection = Connection(url, token, ca_file)
        self._token, self._deadline_s = token, deadline_s
        self.limit, self.abort, self.close = self._connection.limit, self._connection.abort, self._connection.close

    def post(self, path: str, message: BaseModel, reply: type[Reply]) -> Reply:
        """Send ``message``; the answer, checked.

        Raises:
            LostError, RefusedError: no answer, or none to go by; neither quotes the token.
        """
        try:
            status, body = self._connection.post(path, message.model_dump_json().encode(), self._deadline_s)
        except TimeoutError:
            raise LostError(f"no answer within {self._deadline_s:g} s") from None
        except TooLargeError:
            raise RefusedError(f"its answer is longer than {LARGEST_BODY} bytes") from None
        except http.client.HTTPException as error:
            raise LostError(f"its answer is no HTTP ({type(error).__name__})") from None
        except OSError as error:
            raise LostError(self._harmless(error.strerror or type(error).__name__)) from None
        if status >= 500 or status in (408, 429):
            raise LostError(f"HTTP {status}")
        if status == 409 and "version" in str(_value_in(body, "error")):
            # Not as what else is a conflict: there another client has taken the run over, and this one has to give way.
            raise RefusedError(self._explained(status, body))
        if status != 200:
            raise RefusedError(self._explained(status, body), status)
        try:
            answer = reply.model_validate_json(body)
            version = answer.version
        except ValueError:
            answer, version = None, _value_in(body, "version")
        if isinstance(version, int) and version != VERSION:
            raise RefusedError(f"it speaks version {version} of the messages, this job version {VERSION}")
        if answer is None:
            raise RefusedError("its answer is not one of a policy server")
        return answer

    def _explained(self, status: int, body: bytes) -> str:
        if 300 <= status < 400:
            return f"HTTP {status}: it sends us elsewhere, and the token goes to no other address"
        if status == 401:
            return "HTTP 401: the token is not the server's; compare rlfreeze.policy.token_file with what the server was given"
        detail = _value_in(body, "error")
        return f"HTTP {status}: {self._harmless(detail)}" if isinstance(detail, str) else f"HTTP {status}"

    def _harmless(self, text: str) -> str:
        """Fit for a log: one short line without the token, which a server could send back."""
        text = "".join(character if character.isprintable() else " " for character in text.replace(self._token, "***"))
        return text[:160]


def _value_in(body: bytes, key: str) -> Any:
    """What a JSON object holds under ``key``; None where it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found.get(key) if isinstance(found, dict) else None
