"""The loss guard, the launcher's arguments, the run log."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

from rlfreeze_ds.config import GuardConfig
from rlfreeze_ds.guard import LossGuard
from rlfreeze_ds.launch import main, split_arguments
from rlfreeze_ds.telemetry.profiler import InstructionProfiler
from rlfreeze_ds.telemetry.run_log import RunLog


@pytest.mark.parametrize("bad", [2.0, math.nan, math.inf])
def test_guard_acts_after_patience_steps_beyond_the_trend(bad: float) -> None:
    guard = LossGuard(GuardConfig(tolerance=0.5, patience=3))
    assert not any(guard.observe(1.0) for _ in range(20))
    assert [guard.observe(bad) for _ in range(3)] == [False, False, True]


def test_guard_ignores_a_single_jump_a_falling_loss_and_its_own_absence() -> None:
    guard = LossGuard(GuardConfig(tolerance=0.2, patience=2))
    assert not any(guard.observe(loss) for loss in [3.0, 2.0, 9.0, 1.5, 9.0, 1.0])
    off = LossGuard(GuardConfig(enabled=False, tolerance=0.1, patience=1))
    assert not any(off.observe(loss) for loss in [1.0, 50.0, math.nan])


def test_launcher_passes_local_rank_and_arguments_on() -> None:
    assert split_arguments(["--local_rank=1", "train.py", "--lr", "3"]) == (
        ["--local_rank=1"],
        False,
        "train.py",
        ["--lr", "3"],
    )
    assert split_arguments(["-m", "pkg.train", "-x"]) == ([], True, "pkg.train", ["-x"])
    with pytest.raises(SystemExit, match="no script found"):
        split_arguments(["--local_rank=0", "--lr", "3"])
    with pytest.raises(SystemExit, match="no such script: absent.py"):
        main(["--local_rank=0", "absent.py"])


def test_run_log_appends_lines_and_survives_a_place_it_cannot_write(tmp_path: Path) -> None:
    log = RunLog(str(tmp_path))
    log.write("plan", step=3)
    assert json.loads((tmp_path / "rlfreeze.jsonl").read_text()) == {"event": "plan", "step": 3}
    (tmp_path / "file").write_text("")
    blocked = RunLog(str(tmp_path / "file"))
    blocked.write("plan", step=4)
    assert not blocked.active and not RunLog(None).active


def test_profiler_hands_out_whole_steps_in_order() -> None:
    profiler = InstructionProfiler(torch.device("cpu"))
    for kind, micro_batch_id in (("F", 0), ("F", 1), ("B", 0), ("B", 1)):
        with profiler.record(kind, micro_batch_id):
            pass
    time.sleep(0.01)
    profiler.end_schedule()
    (timing,) = profiler.finish_step(7)
    assert timing.step == 7 and list(timing.seconds) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    assert timing.tail_s >= 0.01 and timing.makespan_s >= timing.tail_s + sum(timing.seconds.values()) > timing.tail_s
    assert profiler.finish_step(8) == []


def test_profiler_forgets_a_step_that_ended_with_an_error() -> None:
    profiler = InstructionProfiler(torch.device("cpu"))
    for _ in range(2):
        profiler.start_step()
        with profiler.record("F", 0):
            pass
        time.sleep(0.01)
        with profiler.record("B", 0):
            pass
    profiler.end_schedule()
    (timing,) = profiler.finish_step(0)
    assert timing.makespan_s < 0.02
