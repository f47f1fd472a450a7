"""The server's book of jobs: what comes in more than once, out of order, or half, is learned from exactly once, or refused."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable

import numpy as np
import pytest

from rlfreeze_ds.policy.fragment import Decision, Fragment
from rlfreeze_ds.policy.messages import Close, Open, Window
from rlfreeze_ds.policy.observation import SIZE
from rlfreeze_ds.policy.session import (
    BusyError,
    DecisionError,
    FullError,
    InvalidError,
    OrderError,
    ReplacedError,
    SessionError,
    Sessions,
    UnknownSessionError,
    VersionError,
)
from tests.policy.stub_server import decide, until


def window(number: int, value: float = 0.0, reward: float | None = None) -> Window:
    return Window(window=number, observation=[value] * SIZE, reward=reward)


def opened(book: Sessions, run_id: str = "run", next_window: int = 0) -> str:
    return book.open(Open(run_id=run_id, next_window=next_window)).session_id


class Clock:
    """Seconds as told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_windows_become_transitions() -> None:
    book = Sessions()
    session = opened(book, next_window=5)
    answers = [
        book.act(session, message, decide) for message in (window(5, 0.1), window(6, 0.2, 1.0), window(7, 0.3, 2.0))
    ]
    assert [answer.window for answer in answers] == [5, 6, 7]
    assert [answer.action for answer in answers] == [[pytest.approx(value)] * 2 for value in (0.1, 0.2, 0.3)]
    assert book.close(session, Close(window=8, observation=[1.0] * SIZE, reward=3.0)).transitions == 3
    (fragment,) = book.drain(1)
    assert len(fragment) == 3 and list(fragment.windows()) == [5, 6, 7]
    assert fragment.observations.shape == (4, SIZE) and fragment.observations.dtype == np.float32
    assert fragment.observations[:, 0] == pytest.approx([0.1, 0.2, 0.3, 1.0])
    assert fragment.actions[:, 1] == pytest.approx([0.1, 0.2, 0.3]) and fragment.rewards == pytest.approx([1, 2, 3])
    assert fragment.extras["action_logp"] == pytest.approx([0.1, 0.2, 0.3]) and fragment.updates.tolist() == [0, 0, 0]
    assert fragment.terminated and not fragment.truncated
    assert not book.drain(1)


def test_a_session_that_goes_on_gives_what_is_finished() -> None:
    book = Sessions()
    session = opened(book)
    for number in range(4):
        book.act(session, window(number, number / 10, None if number == 0 else 1.0), decide)
    assert not book.drain(4)
    (part,) = book.drain(3)
    assert len(part) == 3 and not part.terminated and not part.truncated
    book.act(session, window(4, 0.4, 1.0), decide)
    (rest,) = book.drain(1)
    assert rest.observations[:, 0] == pytest.approx([0.3, 0.4])


def test_a_retried_window_gets_the_same_answer_and_counts_once() -> None:
    book, asked = Sessions(), []

    def counted(observation: np.ndarray) -> Decision:
        asked.append(observation)
        return Decision(np.full(2, len(asked) / 10), np.full(2, len(asked) / 10))

    session = opened(book)
    first = book.act(session, window(0), counted)
    second = book.act(session, window(1, 0.5, 1.0), counted)
    assert book.act(session, window(1, 0.5, 1.0), counted) == second != first
    assert len(asked) == 2 and sum(map(len, book.drain(1))) == 1
    for other in (window(1, 0.6, 1.0), window(1, 0.5, 2.0)):
        with pytest.raises(OrderError, match="other numbers"):
            book.act(session, other, counted)


def test_a_policy_that_fails_may_be_asked_again() -> None:
    book = Sessions()
    session = opened(book)
    book.act(session, window(0), decide)

    def broken(_: np.ndarray) -> Decision:
        raise RuntimeError("no weights")

    def nonsense(_: np.ndarray) -> Decision:
        return Decision(np.zeros(2), np.array([0.0, np.nan]))

    with pytest.raises(RuntimeError):
        book.act(session, window(1, 0.1, 1.0), broken)
    with pytest.raises(DecisionError) as caught:
        book.act(session, window(1, 0.1, 1.0), nonsense)
    assert caught.value.status == 500
    with pytest.raises(OrderError, match="before 1 was answered"):
        book.act(session, window(2, 0.2, 1.0), decide)
    assert book.act(session, window(1, 0.1, 1.0), decide).window == 1
    assert sum(map(len, book.drain(1))) == 1


def test_what_is_out_of_order_is_refused_and_changes_nothing() -> None:
    book = Sessions()
    session = opened(book, next_window=3)
    for wrong in (window(2), window(4), window(3, 0.0, 1.0)):
        with pytest.raises(OrderError) as caught:
            book.act(session, wrong, decide)
        assert caught.value.status == 409
    book.act(session, window(3), decide)
    for wrong in (window(2), window(5, 0.0, 1.0), window(4)):
        with pytest.raises(OrderError):
            book.act(session, wrong, decide)
    with pytest.raises(OrderError):
        book.close(session, Close(window=7, observation=[0.0] * SIZE, reward=1.0))
    book.act(session, window(4, 0.1, 1.0), decide)
    assert sum(map(len, book.drain(1))) == 1
    with pytest.raises(UnknownSessionError) as caught:
        book.act("nobody", window(0), decide)
    assert caught.value.status == 404


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "x", None])
def test_what_is_no_number_never_reaches_a_session(bad: object) -> None:
    """Even past the message's own check."""
    book = Sessions()
    session = opened(book)
    book.act(session, window(0), decide)
    wrong = Window.model_construct(version=1, window=1, observation=[0.0] * (SIZE - 1) + [bad], reward=1.0)
    with pytest.raises(InvalidError) as caught:
        book.act(session, wrong, decide)
    assert caught.value.status == 422
    if bad is not None:
        with pytest.raises(InvalidError):
            book.act(session, Window.model_construct(version=1, window=1, observation=[0.0] * SIZE, reward=bad), decide)
        with pytest.raises(InvalidError):
            book.close(session, Close.model_construct(version=1, window=1, observation=[0.0] * SIZE, reward=bad))
    with pytest.raises(InvalidError, match=f"{SIZE} finite"):
        book.act(session, Window.model_construct(version=1, window=1, observation=[0.0], reward=1.0), decide)
    assert not book.drain(1)
    book.act(session, window(1, 0.1, 1.0), decide)
    assert sum(map(len, book.drain(1))) == 1


def test_another_version_is_refused() -> None:
    book = Sessions()
    session = opened(book)
    for call in (
        lambda: book.open(Open(version=2, run_id="run")),
        lambda: book.act(session, Window(version=2, window=0, observation=[0.0] * SIZE), decide),
        lambda: book.close(session, Close(version=2, window=0)),
    ):
        with pytest.raises(VersionError, match="speaks version 1") as caught:
            call()
        assert caught.value.status == 409
    assert book.act(session, window(0), decide)


def test_a_second_client_of_the_same_run_closes_the_first() -> None:
    book = Sessions()
    first = opened(book)
    book.act(first, window(0), decide)
    book.act(first, window(1, 0.1, 1.0), decide)
    second = opened(book, next_window=7)
    for call in (lambda: book.act(first, window(2, 0.0, 1.0), decide), lambda: book.close(first, Close(window=2))):
        with pytest.raises(ReplacedError) as caught:
            call()
        assert caught.value.status == 409
    book.act(second, window(7), decide)
    (fragment,) = book.drain(1)
    assert fragment.session_id == first and fragment.truncated and not fragment.terminated and len(fragment) == 1


def test_a_client_that_is_replaced_while_it_waits_gets_no_answer() -> None:
    book = Sessions()
    first = opened(book)

    def slow(observation: np.ndarray) -> Decision:
        opened(book)
        return decide(observation)

    with pytest.raises(ReplacedError):
        book.act(first, window(0), slow)


def test_a_run_that_stops_early_is_truncated_and_closing_twice_is_the_same() -> None:
    book = Sessions()
    session = opened(book)
    book.act(session, window(0), decide)
    book.act(session, window(1, 0.1, 1.0), decide)
    last = Close(window=2, observation=[0.5] * SIZE, reward=1.0)
    assert book.close(session, last) == book.close(session, last)
    with pytest.raises(UnknownSessionError):
        book.act(session, window(2, 0.1, 1.0), decide)
    (fragment,) = book.drain(1)
    assert len(fragment) == 2 and fragment.truncated
    unjudged = opened(book)
    book.act(unjudged, window(0), decide)
    assert book.close(unjudged, Close(window=1)).transitions == 0 and not book.drain(1)


def test_silent_sessions_make_room_and_what_they_finished_counts() -> None:
    clock = Clock()
    book = Sessions(max_sessions=2, idle_s=10.0, clock=clock)
    silent, alive = opened(book, "silent"), opened(book, "alive")
    book.act(silent, window(0), decide)
    book.act(silent, window(1, 0.1, 1.0), decide)
    clock.now = 9.0
    book.act(alive, window(0), decide)
    with pytest.raises(FullError) as caught:
        opened(book, "third")
    assert caught.value.status == 503
    assert opened(book, "alive"), "a run that is known needs no room"
    clock.now = 10.0
    opened(book, "third")
    with pytest.raises(UnknownSessionError, match="silent for too long"):
        book.act(silent, window(2, 0.1, 1.0), decide)
    (fragment,) = book.drain(1)
    assert fragment.run_id == "silent" and fragment.truncated
    assert book.counts()["expired"] == 1 and book.counts()["sessions"] == 2


def test_what_nobody_learns_from_is_dropped_oldest_first() -> None:
    book = Sessions(max_transitions=600)
    session = opened(book)
    for number in range(2001):
        book.act(session, window(number, 0.0, None if number == 0 else 1.0), decide)
    learned = [number for fragment in book.drain(1) for number in fragment.windows()]
    assert learned == list(range(2000 - len(learned), 2000)) and 0 < len(learned) <= 600
    assert book.counts()["dropped"] == 2000 - len(learned)


def test_a_slow_job_holds_up_no_other_and_its_retry_waits_only_so_long() -> None:
    book = Sessions(patience_s=0.05)
    slow, fast = opened(book, "slow"), opened(book, "fast")
    go, inside = threading.Event(), threading.Event()

    def waits(observation: np.ndarray) -> Decision:
        inside.set()
        go.wait(10)
        return decide(observation)

    thread = threading.Thread(target=book.act, args=(slow, window(0), waits))
    thread.start()
    inside.wait(10)
    begin = time.perf_counter()
    for number in range(100):
        book.act(fast, window(number, 0.0, None if number == 0 else 1.0), decide)
    assert sum(map(len, book.drain(1))) == 99 and time.perf_counter() - begin < 1.0
    with pytest.raises(BusyError):
        book.act(slow, window(0), decide)
    go.set()
    thread.join()
    assert book.act(slow, window(0), decide).window == 0


def test_draining_waits_until_there_is_enough_or_it_is_stopped() -> None:
    book = Sessions()
    session = opened(book)
    begin = time.perf_counter()
    assert not book.drain(1, timeout_s=0.05) and time.perf_counter() - begin >= 0.05
    got: list[Fragment] = []
    thread = threading.Thread(target=lambda: got.extend(book.drain(2, timeout_s=30)))
    thread.start()
    for number in range(3):
        book.act(session, window(number, 0.0, None if number == 0 else 1.0), decide)
    thread.join(10)
    assert sum(map(len, got)) == 2
    waiting = threading.Thread(target=book.drain, args=(1, 30))
    waiting.start()
    book.stop()
    waiting.join(5)
    assert not waiting.is_alive()


def learned_from(fragments: Iterable[Fragment]) -> list[tuple[str, int, float, float, float]]:
    """Each transition as (session, window, observation, reward, next observation), with what holds for every one checked."""
    found = []
    for fragment in fragments:
        assert len(fragment) and not (fragment.terminated and fragment.truncated)
        assert fragment.actions[:, 0] == pytest.approx(fragment.observations[:-1, 0])
        assert fragment.extras["action_logp"] == pytest.approx(fragment.observations[:-1, 0])
        for k, number in enumerate(fragment.windows()):
            before, after = fragment.observations[k, 0], fragment.observations[k + 1, 0]
            found.append((fragment.session_id, number, float(before), float(fragment.rewards[k]), float(after)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_each_transition_of_a_random_history_is_learned_from_exactly_once(seed: int) -> None:
    """Jobs that retry, lose answers, die, come back, and send nonsense, beside a learner that drains at any time; the expected
    transitions are kept by the jobs themselves."""
    rng = random.Random(seed)
    clock = Clock()
    book = Sessions(idle_s=8.0, clock=clock, max_sessions=20)
    expected, learned = [], []
    jobs: dict[str, tuple[str, int, float | None]] = {}  # run -> (session, next window, observation of the last one)
    num_posts = 0
    while num_posts < 5000:
        num_posts += 1
        clock.now += rng.random() * 0.5
        run = f"run{rng.randrange(12)}"
        event = rng.random()
        if run not in jobs or event < 0.02:  # a start, or a restart that closes what there was
            start = rng.randrange(100)
            jobs[run] = (opened(book, run, start), start, None)
            continue
        session, number, last = jobs[run]
        value, reward = float(np.float32(rng.random())), float(np.float32(rng.uniform(-2, 2)))
        if event < 0.04:
            del jobs[run]  # gone without a word
        elif event < 0.06:
            try:
                book.close(session, Close(window=number, observation=[value] * SIZE, reward=reward))
                expected.append((session, number - 1, last, reward, value))
            except UnknownSessionError:
                pass  # it had been silent for too long
            except OrderError:
                assert last is None
            del jobs[run]
        elif event < 0.12:
            wrong = rng.choice((window(number + 1, 0.0, reward), window(number + 7, 0.0, reward)))
            with pytest.raises((OrderError, UnknownSessionError)):
                book.act(session, wrong, decide)
        else:
            message = window(number, value, None if last is None else reward)
            try:
                for _ in range(rng.choice((1, 1, 1, 2, 3))):
                    answer = book.act(session, message, decide)
                    assert answer.window == number and answer.action[0] == pytest.approx(value)
            except UnknownSessionError:
                del jobs[run]
                continue
            if last is not None:
                expected.append((session, number - 1, last, reward, value))
            jobs[run] = (session, number + 1, value)
        if rng.random() < 0.05:
            learned += learned_from(book.drain(rng.randrange(1, 60)))
    learned += learned_from(book.drain(1))
    assert len(expected) > 2000 and len(set(learned)) == len(learned)
    assert sorted(learned) == sorted(expected)
    counts = book.counts()
    assert counts["transitions"] == len(expected) and counts["dropped"] == 0 and counts["retries"] > 500 and counts["expired"] > 0


def test_many_threads_at_once_learn_from_each_transition_exactly_once() -> None:
    """Two clients of each run that push each other out, each with every request sent twice at the same time."""
    book = Sessions()
    finished, learned, done = [], [], threading.Event()
    lock = threading.Lock()

    def client(run: str, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            session, last = opened(book, run), None
            for number in range(rng.randrange(1, 12)):
                value, reward = float(np.float32(rng.random())), float(np.float32(rng.random()))
                message = window(number, value, None if last is None else reward)
                twin = threading.Thread(target=quietly, args=(session, message))
                twin.start()
                arrived = quietly(session, message)
                twin.join()
                if not arrived:
                    break  # it may still have counted before the session was closed
                if last is not None:
                    with lock:
                        finished.append((session, number - 1, last, reward, value))
                last = value

    def quietly(session: str, message: Window) -> bool:
        try:
            return book.act(session, message, decide).window == message.window
        except SessionError as error:
            assert isinstance(error, ReplacedError)
            return False

    def learn() -> None:
        while not done.is_set():
            learned.extend(learned_from(book.drain(5, timeout_s=0.01)))

    learner = threading.Thread(target=learn)
    learner.start()
    clients = [threading.Thread(target=client, args=(f"run{k // 2}", k)) for k in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    done.set()
    learner.join(10)
    learned += learned_from(book.drain(1))
    assert len(set(learned)) == len(learned) == book.counts()["transitions"]
    assert finished and set(finished) <= set(learned)
    until(lambda: book.counts()["waiting"] == 0)
