"""``python -m rlfreeze_ds.plan_worker``: the process in which a training job's plans are made. Imports no torch.

Started by :mod:`rlfreeze_ds.plan_process`, not by users. A line on standard input: there is a request in ``request.json`` of
the folder; a line on standard output: the answer lies beside it. It ends with its standard input, or with its parent.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlfreeze_ds.errors import in_words
from rlfreeze_ds.plan_request import PlanRequest, answer

REQUEST, ANSWER = "request.json", "answer.json"
DONE = b"answered\n"

# Training comes first: with all cores busy this process gets what the ranks leave while they wait for each other.
NICENESS = 10
# Seconds between two looks at whether the parent is still there; the end of standard input tells it at once, but a process
# that the parent forked may hold the other end open.
PARENT_CHECK_S = 5.0
# A hung solver ends this process even with its parent gone. Seconds beyond the solver's own limit; the parent's grace is shorter.
ALARM_GRACE_S = 60.0


class _Collected(logging.Handler):
    """Warnings of the planner: the parent logs them where the user looks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def answered(text: str) -> str:
    """The answer to one request, or ``{"error": ...}``: whatever goes wrong, the parent gets a line to show."""
    collected = _Collected()
    logger = logging.getLogger("rlfreeze_ds")
    logger.addHandler(collected)
    try:
        request = PlanRequest.from_json(text)
        signal.setitimer(signal.ITIMER_REAL, request.config.planning.time_limit_s + ALARM_GRACE_S)
        return replace(answer(request), warnings=tuple(collected.lines)).to_json()
    except Exception as error:  # a solver's or our own
        traceback.print_exc()
        return json.dumps({"error": in_words(error)})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        logger.removeHandler(collected)


def main(argv: list[str]) -> None:
    """Serve until nobody asks any more. ``argv``: the folder of requests and answers, and the parent's process id."""
    folder, parent = Path(argv[0]), int(argv[1])
    # Whatever a solver prints, also from C, must not be taken for an answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    # An interrupt from the terminal is the parent's to handle; the alarm must end the process whatever the parent did with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.nice(NICENESS)
    try:
        for _ in _requests(parent):
            text = answered((folder / REQUEST).read_text(encoding="utf-8"))
            (folder / ANSWER).write_text(text, encoding="utf-8")
            os.write(answers, DONE)
    except BrokenPipeError:
        pass  # the parent is gone
    finally:
        # The parent removes the folder; it can no longer do so if it was killed.
        shutil.rmtree(folder, ignore_errors=True)


def _requests(parent: int) -> Iterator[None]:
    while True:
        ready, _, _ = select.select([0], [], [], PARENT_CHECK_S)
        if ready:
            lines = os.read(0, 4096)
            if not lines:
                return
            yield from (None for _ in range(lines.count(b"\n")))
        elif os.getppid() != parent:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
