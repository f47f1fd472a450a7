"""One connection to one policy server: JSON goes out, a bounded answer comes back within a bounded time, nothing is followed."""

from __future__ import annotations

import http.client
import io
import math
import os
import socket
import ssl
import stat
import time
from contextlib import suppress
from urllib.parse import urlsplit

from rlfreeze_ds.errors import ConfigError
from rlfreeze_ds.policy.messages import LARGEST_BODY

SHORTEST_TOKEN, LONGEST_TOKEN = 16, 512


class TooLargeError(Exception):
    """An answer of more than :data:`LARGEST_BODY` bytes; the rest of it was not read."""


def read_token(path: str | os.PathLike[str], option: str = "rlfreeze.policy.token_file =") -> str:
    """The bearer token in a file that nobody but its owner can read.

    Args:
        path: of the file.
        option: that named it, for errors.

    Raises:
        ConfigError: it cannot be read, others can read it, or it holds no token; never quotes what is in it.
    """
    where = f"{option} {os.fspath(path)!r}"
    try:
        # Without O_NONBLOCK a named pipe would hold the job up for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{where}: cannot be read: {reason}. Name the file with the policy server's token.") from None
    try:
        found = os.fstat(descriptor)  # of what was opened: the name may mean another file by now
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{where}: is not a regular file.")
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{where}: belongs to user {found.st_uid}; it must belong to you ({os.geteuid()}) or to root.")
        if found.st_mode & 0o077:
            rights = stat.S_IMODE(found.st_mode)
            raise ConfigError(f"{where}: has rights {rights:04o}, so others can reach it; run chmod 600 on it.")
        content = os.read(descriptor, LONGEST_TOKEN + 3)
    finally:
        os.close(descriptor)
    return check_token(content.decode("latin-1").strip(), where)


def check_token(token: str, where: str = "the policy's token") -> str:
    """``token``, if it may stand in a header.

    Raises:
        ConfigError: it may not; never quotes it.
    """
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN:
        allowed = f"{SHORTEST_TOKEN} to {LONGEST_TOKEN}"
        raise ConfigError(f"{where}: holds {len(token)} characters; a token is one line of {allowed} of them.")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{where}: a token is one word of printable ASCII characters.")
    return token


def split_url(url: str) -> tuple[bool, str, int, str]:
    """(https?, host, port, path without a slash at its end) of a server's address.

    Raises:
        ConfigError: it is no http or https address, or holds what does not belong in one.
    """
    where = "rlfreeze.policy.server"
    try:
        parts = urlsplit(url)
        secure, port = parts.scheme == "https", parts.port
    except ValueError:
        raise ConfigError(f"{where}: not an address; write http://host:port or https://host:port.") from None
    if parts.username is not None or parts.password is not None:
        # Not quoted: addresses are logged, passwords must not be.
        raise ConfigError(f"{where}: must not hold a user or a password; the token goes into rlfreeze.policy.token_file.")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
        raise ConfigError(f"{where} = {url!r}: must be http://host:port or https://host:port.")
    if parts.query or parts.fragment or " " in url:
        raise ConfigError(f"{where} = {url!r}: must end with the port, or with the path below which the server answers.")
    return secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/")


class Connection:
    """Kept open between requests. Not thread-safe, but for :meth:`abort`."""

    def __init__(self, url: str, token: str, ca_file: str | None = None) -> None:
        """``ca_file``: certificates to trust instead of the system's; https only.

        Raises:
            ConfigError: from :func:`split_url` and :func:`check_token`, or ``ca_file`` cannot be used.
        """
        secure, host, port, self._prefix = split_url(url)
        self._headers = {
            "Authorization": f"Bearer {check_token(token)}",
            "Content-Type": "application/json",
            "Accept": "application/json",
        }
        try:
            context = ssl.create_default_context(cafile=ca_file) if secure else None
        except OSError as error:
            raise ConfigError(f"rlfreeze.policy.ca_file = {ca_file!r}: cannot be used: {error.strerror or error}.") from None
        self._http = _TimedConnection(host, port, context)
        self._aborted = False

    def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer to a request that may safely arrive twice.

        Raises:
            TimeoutError: the whole answer was not there in ``timeout_s``.
            TooLargeError, OSError, http.client.HTTPException: there is none.
        """
        self._http.deadline = time.monotonic() + timeout_s
        self._aborted = False
        kept_open = self._http.sock is not None
        try:
            try:
                return self._post(path, body)
            except ConnectionError:
                # A server closes a connection that was idle for some seconds, which shows only now.
                self.close()
                if not kept_open or self._aborted:
                    raise
                return self._post(path, body)
        except BaseException:
            self.close()
            raise

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self._http.request("POST", self._prefix + path, body, self._headers)
        response = self._http.getresponse()
        answer = response.read(LARGEST_BODY + 1)
        if len(answer) > LARGEST_BODY:
            raise TooLargeError
        if response.length:
            raise http.client.IncompleteRead(b"")
        if not response.isclosed():
            self.close()
        return response.status, answer

    def limit(self, deadline: float) -> None:
        """Nothing that begins from now on lasts beyond ``deadline`` (of ``time.monotonic()``)."""
        self._http.limit = deadline

    def abort(self) -> None:
        """Let the request that another thread waits for fail at once."""
        self._aborted = True
        if (sock := self._http.opened) is not None:
            with suppress(OSError, ValueError):
                # Of the class: an SSL socket's own would take the keys from under the waiting thread.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """The next request opens another connection."""
        with suppress(OSError):
            self._http.close()
        self._http.opened = None


class _TimedConnection(http.client.HTTPConnection):
    """With one deadline for all of a request. A socket's own timeout starts anew with every byte that a slow server drips."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._context = context
        if context is not None:
            self.default_port = http.client.HTTPS_PORT
        self.deadline = 0.0
        self.limit = math.inf
        self.opened: socket.socket | None = None

    def left_s(self) -> float:
        left = min(self.deadline, self.limit) - time.monotonic()
        if left <= 0.0:
            raise TimeoutError
        return left

    def connect(self) -> None:
        failed: OSError = OSError("the host has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self.left_s())
                self.opened = sock  # before it connects, so that abort() reaches it
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._context is not None:
                    sock = self._context.wrap_socket(sock, server_hostname=self.host, do_handshake_on_connect=False)
                    self.opened = sock
                    sock.settimeout(self.left_s())
                    sock.do_handshake()
                self.sock = sock
                return
            except OSError as error:
                sock.close()
                failed = error
        raise failed

    def send(self, data: bytes) -> None:  # type: ignore[override]
        if self.sock is not None:
            self.sock.settimeout(self.left_s())
        super().send(data)

    def response_class(self, sock: socket.socket, method: str | None = None) -> http.client.HTTPResponse:  # type: ignore[override]
        return http.client.HTTPResponse(_TimedSocket(sock, self), method=method)  # type: ignore[arg-type]


class _TimedSocket:
    """What a response asks of a socket: a file."""

    def __init__(self, sock: socket.socket, connection: _TimedConnection) -> None:
        self._sock, self._connection = sock, connection

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedFile(self._sock, self._connection))


class _TimedFile(io.RawIOBase):
    def __init__(self, sock: socket.socket, connection: _TimedConnection) -> None:
        # A file of the socket and not the socket: http.client closes that before it reads an answer which ends a connection.
        self._sock, self._connection, self._file = sock, connection, sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        self._sock.settimeout(self._connection.left_s())
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()
