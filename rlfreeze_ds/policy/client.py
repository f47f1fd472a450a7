"""What asks a policy server from within a training job, on rank 0: training never waits for it, whatever becomes of the server.

A daemon thread does all that can take time. The training thread and that thread share two attributes, of which each writes one,
so no lock can hold up a step. Needs neither ray nor torch.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from rlfreeze_ds.errors import ConfigError, RLFreezeError
from rlfreeze_ds.log import logger
from rlfreeze_ds.policy.calls import Calls, LostError, RefusedError
from rlfreeze_ds.policy.connection import check_token, split_url
from rlfreeze_ds.policy.messages import Answer, Close, Closed, Open, Opened, Window

DEADLINE_S = 5.0
CLOSE_S = 2.0
"""Seconds that the end of a job waits at most to tell the server."""

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Seconds until the first try after a failure; doubled by each one that follows, up to the longest."""

_POLL_S = 0.1  # between two looks at whether a server that is being started has its port
_LARGEST_WINDOW = 10**9

State = Literal["waiting", "connected", "lost", "refused", "replaced"]


class _ReplacedError(Exception):
    """Another client took this run over."""


@dataclass(frozen=True, eq=False)
class _Offer:
    """One window, as the training thread hands it over. ``session``: the one that ``reward`` belongs to."""

    window: int
    observation: tuple[float, ...]
    reward: float | None
    session: str | None


@dataclass(frozen=True, eq=False)
class _Session:
    id: str
    first: _Offer


@dataclass(frozen=True, eq=False)
class _Answered:
    offer: _Offer
    session: str
    answer: Answer


@dataclass(frozen=True)
class _Farewell:
    """What :meth:`PolicyClient.close` leaves to say. ``session``: the one that ``reward`` belongs to."""

    window: int
    observation: tuple[float, ...] | None
    reward: float | None
    session: str | None
    deadline: float


class PolicyClient:
    """One run's line to a policy server. All methods are for the training thread, take microseconds and raise nothing because of
    the server; :meth:`close` alone may take :data:`CLOSE_S`."""

    def __init__(
        self,
        url: str | Callable[[], str | None],
        token: str,
        run_id: str,
        *,
        deadline_s: float = DEADLINE_S,
        first_delay_s: float = FIRST_DELAY_S,
        longest_delay_s: float = LONGEST_DELAY_S,
        ca_file: str | None = None,
    ) -> None:
        """
        Args:
            url: ``http://host:port`` or ``https://...``; or what is called in the background for it, with None as long as there
                is none and an RLFreezeError where there will be none.
            token: the server's, see :func:`~rlfreeze_ds.policy.connection.read_token`.
            run_id: of the job; the same after a restart, another one for every other job.
            deadline_s: seconds for the whole of one request.
            first_delay_s, longest_delay_s: seconds until the next try after a failure, before jitter.
            ca_file: certificates to trust instead of the system's.

        Raises:
            ConfigError: one of them cannot be used. The token is never quoted.
        """
        try:
            Open(run_id=run_id)
        except ValidationError:
            raise ConfigError(
                f"rlfreeze.policy.run_id = {run_id!r}: must be 1 to 128 letters, digits or any of . _ : - (it names the episode)."
            ) from None
        for name, seconds in (("deadline_s", deadline_s), ("first_delay_s", first_delay_s), ("longest_delay_s", longest_delay_s)):
            if not 0.0 < seconds <= 3600.0:
                raise ConfigError(f"rlfreeze.policy.{name} = {seconds!r}: must be more than 0 and at most 3600 seconds.")
        self.run_id = run_id
        self.state: State = "waiting"
        self._url = url
        token = check_token(token)
        self._calls_to = lambda address: Calls(address, token, deadline_s, ca_file)
        self._address = url if isinstance(url, str) else "its server"
        self._calls: Calls | None = None
        if isinstance(url, str):
            self._calls = self._calls_to(url)
            secure, host, _, _ = split_url(url)
            if not secure and host not in ("localhost", "::1") and not host.startswith("127."):
                logger.warning("policy: %s is not https, so whoever can listen on the way can read the token", url)
        self._first_delay_s, self._longest_delay_s = first_delay_s, longest_delay_s
        # Of the run and not of the clock: jobs that lost one server together do not come back together, and a test can repeat.
        self._jitter = random.Random(run_id)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

        # Written by the training thread.
        self._offer: _Offer | None = None
        self._taken: _Answered | None = None
        self._next_window = 0
        self._farewell: _Farewell | None = None
        # Written by the other one.
        self._answered: _Answered | None = None
        self._session: _Session | None = None
        self._num_unsure_opens = 0
        self._lost_at = 0.0

        self._thread = threading.Thread(target=self._run, name="rlfreeze policy client", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"PolicyClient({self._address!r}, run_id={self.run_id!r}, state={self.state!r})"

    @property
    def next_window(self) -> int:
        """The number that the next window has to have for the episode to go on."""
        return self._next_window

    def offer(self, window: int, observation: np.ndarray, reward: float | None) -> None:
        """Hand over what a window of steps brought; one that still waits to be sent is dropped, and its episode ends with that.

        Args:
            window: counts up by one, from :attr:`next_window`.
            observation: [observation.SIZE], finite.
            reward: of what :meth:`take` gave for the window before; None where it gave nothing.
        """
        taken = self._taken  # of the window before this one, or None
        follows = taken is not None and window == taken.offer.window + 1
        goes_on = follows and reward is not None and math.isfinite(reward)
        self._taken, self._next_window = None, window + 1
        self._offer = _Offer(
            window,
            tuple(np.asarray(observation, dtype=np.float64).ravel().tolist()),
            float(reward) if goes_on else None,
            taken.session if goes_on else None,
        )
        if self.state != "replaced":
            self._wake.put(None)

    def take(self) -> Answer | None:
        """The answer to the newest window, once; None while there is none."""
        answered = self._answered
        if answered is None or answered.offer is not self._offer or answered is self._taken:
            return None
        self._taken = answered
        return answered.answer

    def close(self, observation: np.ndarray | None = None, reward: float | None = None, timeout_s: float = CLOSE_S) -> None:
        """End the episode, in at most ``timeout_s`` whatever the server does. The second call does nothing.

        Args:
            observation: [observation.SIZE], of the end of the job; None where the last answer cannot be judged.
            reward: of the last answer; likewise.
        """
        if self._farewell is not None:
            return
        deadline = time.monotonic() + timeout_s
        taken = self._taken
        judged = taken is not None and observation is not None and reward is not None and math.isfinite(reward)
        self._farewell = _Farewell(
            self._next_window,
            tuple(np.asarray(observation, dtype=np.float64).ravel().tolist()) if judged else None,
            float(reward) if judged else None,
            taken.session if judged else None,
            deadline,
        )
        if (calls := self._calls) is not None:
            calls.limit(deadline)
        self._wake.put(None)
        self._thread.join(timeout_s / 2)
        if self._thread.is_alive():
            # It waits for an answer that nobody needs any more; what is left of the time is for the farewell.
            if (calls := self._calls) is not None:
                calls.abort()
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps, so that the episode goes on after the job's restart."""
        return {"next_window": self._next_window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, before the first :meth:`offer`.

        Raises:
            ConfigError: it is none.
        """
        number = state.get("next_window")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _LARGEST_WINDOW:
            raise ConfigError(f"policy state: next_window = {number!r}: must be a whole number from 0 to {_LARGEST_WINDOW}.")
        self._next_window, self._offer, self._taken = number, None, None

    # What follows runs in the other thread.

    def _run(self) -> None:
        done: _Offer | None = None
        num_failures = 0
        while self._farewell is None:
            offer = self._offer
            if offer is None or offer is done:
                self._wake.get()
                continue
            try:
                self._connect()
                if self._farewell is not None:
                    break
                if self._calls is None:
                    self._sleep(_POLL_S)
                    continue
                self._answered = self._ask(offer)
                done, num_failures = offer, 0
                self._report("connected", "")
                continue
            except LostError as error:
                self._report("lost", str(error))
                delay = self._first_delay_s * 2.0 ** min(num_failures, 30)
            except RefusedError as error:
                # It will say the same again until somebody acts.
                self._session = None
                self._report("refused", str(error))
                delay = self._longest_delay_s
            except _ReplacedError:
                self._session = None
                self._report("replaced", "")
                break
            except Exception as error:  # ours; an own mistake must not end the thread in silence
                self._session = None
                self._report("lost", f"{type(error).__name__} in the client")
                delay = self._longest_delay_s
            num_failures += 1
            self._sleep(min(delay, self._longest_delay_s) * self._jitter.uniform(0.5, 1.0))
        self._say_goodbye()

    def _sleep(self, seconds: float) -> None:
        """Until then, or until the job ends; new windows do not shorten it."""
        until = time.monotonic() + seconds
        while self._farewell is None and (left := until - time.monotonic()) > 0.0:
            try:
                self._wake.get(timeout=left)
            except queue.Empty:
                return

    def _connect(self) -> None:
        """Make the connection to where the server is now; there is none while it has no address."""
        if isinstance(self._url, str):
            return
        try:
            url = self._url()
            if self._calls is not None and url != self._address:
                # A server that is started anew: somebody else may listen where it did.
                self._calls.close()
                self._calls = self._session = None
            if self._calls is None and url is not None:
                self._address, self._calls = url, self._calls_to(url)
        except RLFreezeError as error:
            raise LostError(str(error)) from None

    def _ask(self, offer: _Offer) -> _Answered:
        """Put the window to the server, in the session that its reward belongs to or at the start of a new one."""
        if not self._invited(offer):
            self._open(offer)
        try:
            return self._act(offer)
        except RefusedError as error:
            if error.status == 404:
                # A server that was started anew, or that gave us up.
                logger.info("policy: %s no longer knows this run's session and gets a new one", self._address)
            elif error.status != 409:
                raise
            elif self._num_unsure_opens == 0:
                raise _ReplacedError from None
            # After an open whose answer never came, it may have been that one that replaced us: once more, but not for ever.
            self._num_unsure_opens = 0
        self._open(offer)
        return self._act(offer)

    def _invited(self, offer: _Offer) -> bool:
        """Whether the present session is one in which this window comes next (or came already, and is retried)."""
        return self._session is not None and (self._session.first is offer or self._session.id == offer.session)

    def _open(self, offer: _Offer) -> None:
        self._session = None
        self._num_unsure_opens += 1
        try:
            opened = self._calls.post("/v1/sessions", Open(run_id=self.run_id, next_window=offer.window), Opened)
        except RefusedError:
            self._num_unsure_opens -= 1  # it did answer
            raise
        self._num_unsure_opens -= 1
        self._session = _Session(opened.session_id, offer)

    def _act(self, offer: _Offer) -> _Answered:
        session = self._session
        reward = None if session.first is offer else offer.reward
        try:
            window = Window(window=offer.window, observation=list(offer.observation), reward=reward)
        except ValidationError:
            raise RefusedError("this job's own observation or reward is out of bounds") from None
        answer = self._calls.post(f"/v1/sessions/{session.id}/act", window, Answer)
        if answer.window != offer.window:
            raise RefusedError(f"it answers window {answer.window} when asked about {offer.window}")
        self._num_unsure_opens = 0
        return _Answered(offer, session.id, answer)

    def _say_goodbye(self) -> None:
        try:
            farewell, session = self._farewell, self._session
            if farewell is not None and session is not None and self._calls is not None:
                self._calls.limit(farewell.deadline)
                judged = farewell.session == session.id
                message = Close(
                    window=farewell.window,
                    observation=list(farewell.observation) if judged else None,
                    reward=farewell.reward if judged else None,
                )
                self._calls.post(f"/v1/sessions/{session.id}/close", message, Closed)
        except Exception as error:
            # The server learns from it what it has; the job is over, so nobody needs to act.
            logger.debug("policy: the end of the run did not reach %s: %s", self._address, type(error).__name__)
        finally:
            if self._calls is not None:
                self._calls.close()

    def _report(self, state: State, reason: str) -> None:
        """One line for a change, none for more of the same."""
        before, self.state = self.state, state
        if before == state or self._farewell is not None:
            return  # at the end of a job nothing depends on it any more
        stay = "the thresholds stay as they are"
        if state == "connected":
            since = f" again after {time.monotonic() - self._lost_at:.0f} s" if self._lost_at else ""
            logger.info("policy: %s moves the thresholds of run %s%s", self._address, self.run_id, since)
        elif state == "lost":
            logger.warning("policy: no answer from %s (%s); %s, training goes on, tried again", self._address, reason, stay)
        elif state == "refused":
            logger.warning("policy: %s is of no use (%s); %s, training goes on, tried again", self._address, reason, stay)
        else:
            text = "policy: another client reported as run %s, so %s has let this one go; %s until the end of the job"
            logger.log(logging.WARNING, text, self.run_id, self._address, stay)
        self._lost_at = 0.0 if state == "connected" else self._lost_at or time.monotonic()
