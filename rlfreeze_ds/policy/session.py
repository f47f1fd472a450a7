"""The server's book of training jobs: windows that come in become transitions, and each is learned from exactly once.

Plain Python: knows neither Ray nor HTTP. Each refusal carries the HTTP status that says the same.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.policy.fragment import Decision, Fragment, Transition, assemble
from rlfreeze_ds.policy.messages import VERSION, Answer, Close, Closed, Open, Opened, Window
from rlfreeze_ds.policy.observation import NAMES, NUM_ACTIONS, SIZE

MAX_SESSIONS = 1024
IDLE_S = 3600.0
"""Seconds without a word after which a job counts as gone; one window of a large job may take many minutes."""

MAX_TRANSITIONS = 100_000
"""That wait for the learner; beyond that the oldest are dropped."""

PATIENCE_S = 10.0
"""Seconds that a retried window waits for the answer to the first try."""

_FRAGMENT = 512  # transitions after which a session's are cut, so that the oldest can be dropped alone
_REMEMBERED = 4096  # sessions that are over, to tell a late client why

Decide = Callable[[np.ndarray], Decision]
"""Observation, float32 [SIZE], to what to do. Called without any lock of the book."""

_PROGRESS = NAMES.index("progress")


class SessionError(RLFreezeError):
    """The book refuses a message; nothing was changed by it. ``status``: that HTTP has for this."""

    status = 400


class UnknownSessionError(SessionError):
    """No such session: of a server before this one, or given up since. The client opens another."""

    status = 404


class ReplacedError(SessionError):
    """Another client opened a session of the same run."""

    status = 409


class OrderError(SessionError):
    """Not the window that comes next, nor the last one again."""

    status = 409


class VersionError(SessionError):
    """Another version of the messages."""

    status = 409


class InvalidError(SessionError):
    """Numbers that are none, or not as many as there should be."""

    status = 422


class FullError(SessionError):
    """As many jobs as there may be."""

    status = 503


class BusyError(SessionError):
    """The first try of this window is still being answered."""

    status = 503


class DecisionError(SessionError):
    """The policy gave what is no action."""

    status = 500


@dataclass(eq=False)
class _Session:
    id: str
    run_id: str
    next_window: int
    last_word: float
    turn: threading.Lock = field(default_factory=threading.Lock)  # held by whoever works out this session's answer
    # Of the newest window; None before the first.
    observation: np.ndarray | None = None
    reward: float | None = None
    decision: Decision | None = None
    answer: Answer | None = None
    transitions: list[Transition] = field(default_factory=list)  # not yet cut
    num_transitions: int = 0


@dataclass(frozen=True)
class _Ended:
    error: type[SessionError]
    reason: str
    closed: Closed | None = None


class Sessions:
    """Thread-safe. No lock is held while a decision is made, so a slow job holds up none but itself."""

    def __init__(
        self,
        *,
        max_sessions: int = MAX_SESSIONS,
        idle_s: float = IDLE_S,
        max_transitions: int = MAX_TRANSITIONS,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sessions, self._idle_s, self._max_transitions = max_sessions, idle_s, max_transitions
        self._patience_s, self._clock = patience_s, clock
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
        self._stopped = False
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # the one that has been silent longest first
        self._by_run: dict[str, _Session] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._cuts: deque[tuple[_Session, list[Transition], bool, bool]] = deque()
        self._waiting = 0
        self._counts = dict.fromkeys(("opened", "closed", "replaced", "expired", "transitions", "retries", "dropped"), 0)

    def open(self, message: Open) -> Opened:
        """Begin a session; an earlier one of the same run ends, and its finished transitions count.

        Raises:
            VersionError, FullError.
        """
        _check_version(message.version)
        with self._lock:
            self._expire()
            earlier = self._by_run.get(message.run_id)
            if earlier is None and len(self._sessions) >= self._max_sessions:
                raise FullError(f"there are {self._max_sessions} sessions already; try again later")
            if earlier is not None:
                self._counts["replaced"] += 1
                self._finish(earlier, _Ended(ReplacedError, "another client opened a session of this run"))
            session = _Session(secrets.token_hex(16), message.run_id, message.next_window, self._clock())
            self._sessions[session.id] = self._by_run[session.run_id] = session
            self._counts["opened"] += 1
            return Opened(session_id=session.id)

    def act(self, session_id: str, window: Window, decide: Decide) -> Answer:
        """Answer a window; the same number again gets the same answer again.

        Raises:
            SessionError: a subclass that says why not. After a DecisionError, or one of ``decide``, the window may come again.
        """
        _check_version(window.version)
        observation = _numbers(window.observation, SIZE, "observation")
        if window.reward is not None:
            _numbers([window.reward], 1, "reward")
        with self._lock:
            self._expire()
            session = self._live(session_id)
        if not session.turn.acquire(timeout=self._patience_s):
            raise BusyError(f"window {window.window} is still being answered")
        try:
            with self._lock:
                self._heard(session)
                if session.observation is not None and window.window == session.next_window - 1:
                    self._counts["retries"] += 1
                    if not np.array_equal(observation, session.observation) or window.reward != session.reward:
                        raise OrderError(f"window {window.window} came before with other numbers")
                    if session.answer is not None:
                        return session.answer
                else:
                    self._take_in(session, window, observation)
            decision = decide(observation.copy())
            action = _numbers(decision.actions_for_env, NUM_ACTIONS, "action", DecisionError)
            _numbers(decision.actions, NUM_ACTIONS, "action", DecisionError)
            answer = Answer(window=window.window, action=np.clip(action, -1.0, 1.0).tolist(), updates=decision.updates)
            with self._lock:
                self._heard(session)  # it may have been replaced meanwhile
                session.decision, session.answer = decision, answer
            return answer
        finally:
            session.turn.release()

    def close(self, session_id: str, message: Close) -> Closed:
        """End a session. ``message.window``: the number that the next window would have had. With a reward and an observation the
        last answer counts too, else it does not; a run that is done (progress 1) has terminated, any other is truncated.

        Raises:
            SessionError: a subclass that says why not.
        """
        _check_version(message.version)
        observation = None if message.observation is None else _numbers(message.observation, SIZE, "observation")
        if message.reward is not None:
            _numbers([message.reward], 1, "reward")
        with self._lock:
            self._expire()
            if (ended := self._ended.get(session_id)) is not None and ended.closed is not None:
                return ended.closed  # a retry
            session = self._live(session_id)
            terminated = False
            if message.reward is not None and observation is not None:
                if session.decision is None or message.window != session.next_window:
                    raise OrderError(f"window {message.window} does not follow an answer; {session.next_window} is next")
                self._add(session, message.reward, observation)
                terminated = bool(observation[_PROGRESS] >= 1.0)
            closed = Closed(transitions=session.num_transitions)
            self._counts["closed"] += 1
            self._finish(session, _Ended(UnknownSessionError, "this session was closed", closed), terminated)
            return closed

    def drain(self, min_transitions: int, timeout_s: float = 0.0) -> list[Fragment]:
        """All transitions that have not been given out, of open sessions too; nothing while there are fewer than
        ``min_transitions``. Waits at most ``timeout_s`` for them, or until :meth:`stop`."""
        enough = max(1, min_transitions)
        with self._grown:
            self._expire()
            self._grown.wait_for(lambda: self._stopped or self._waiting >= enough, timeout_s)
            if self._waiting < enough:
                return []
            for session in self._sessions.values():
                self._cut(session)
            cuts, self._cuts, self._waiting = self._cuts, deque(), 0
        return [
            assemble(session.run_id, session.id, transitions, terminated, truncated)
            for session, transitions, terminated, truncated in cuts
        ]

    def stop(self) -> None:
        """Wake whoever waits in :meth:`drain`; nobody waits there any more."""
        with self._grown:
            self._stopped = True
            self._grown.notify_all()

    def counts(self) -> Mapping[str, int]:
        """Numbers since the start, and of what is there now (``sessions``, ``waiting`` transitions)."""
        with self._lock:
            self._expire()
            return {**self._counts, "sessions": len(self._sessions), "waiting": self._waiting}

    # All below with the lock held.

    def _live(self, session_id: str) -> _Session:
        if (session := self._sessions.get(session_id)) is not None:
            return session
        ended = self._ended.get(session_id)
        if ended is not None:
            raise ended.error(ended.reason)
        raise UnknownSessionError("there is no such session; open one")

    def _heard(self, session: _Session) -> None:
        self._live(session.id)
        session.last_word = self._clock()
        self._sessions.move_to_end(session.id)

    def _take_in(self, session: _Session, window: Window, observation: np.ndarray) -> None:
        """A window that was not there before, and with it the transition that it completes."""
        if window.window != session.next_window:
            raise OrderError(f"window {window.window} came where {session.next_window} is next")
        first = session.observation is None
        if not first and session.decision is None:
            raise OrderError(f"window {window.window} came before {window.window - 1} was answered")
        if first and window.reward is not None:
            raise OrderError("a session's first window has no reward: there was no answer before it")
        if not first:
            if window.reward is None:
                raise OrderError(f"window {window.window} has no reward; open a session to begin anew")
            self._add(session, window.reward, observation)
        session.observation, session.reward = observation, window.reward
        session.decision = session.answer = None
        session.next_window += 1

    def _add(self, session: _Session, reward: float, next_observation: np.ndarray) -> None:
        window = session.next_window - 1
        session.transitions.append(Transition(window, session.observation, session.decision, reward, next_observation))
        session.num_transitions += 1
        self._counts["transitions"] += 1
        self._waiting += 1
        if len(session.transitions) >= _FRAGMENT:
            self._cut(session)
        while self._waiting > self._max_transitions and self._cuts:
            _, dropped, _, _ = self._cuts.popleft()
            self._waiting -= len(dropped)
            self._counts["dropped"] += len(dropped)
        self._grown.notify_all()

    def _cut(self, session: _Session, terminated: bool = False, truncated: bool = False) -> None:
        if session.transitions:
            self._cuts.append((session, session.transitions, terminated, truncated))
            session.transitions = []

    def _finish(self, session: _Session, ended: _Ended, terminated: bool = False) -> None:
        self._cut(session, terminated, not terminated)
        del self._sessions[session.id]
        if self._by_run.get(session.run_id) is session:
            del self._by_run[session.run_id]
        self._ended[session.id] = ended
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _expire(self) -> None:
        too_old = self._clock() - self._idle_s
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last_word > too_old:
                return
            self._counts["expired"] += 1
            self._finish(session, _Ended(UnknownSessionError, "this session was silent for too long; open another"))


def _check_version(version: int) -> None:
    if version != VERSION:
        raise VersionError(f"version {version} of the messages; this server speaks version {VERSION}")


def _numbers(values: object, size: int, name: str, error: type[SessionError] = InvalidError) -> np.ndarray:
    """float32 [size], finite."""
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        raise error(f"{name}: must be {size} numbers") from None
    if array.shape != (size,) or not np.isfinite(array).all():
        raise error(f"{name}: must be {size} finite numbers")
    return array
