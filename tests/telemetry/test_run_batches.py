"""The batches of a run, from its log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.timeline import KINDS, SKIPPED, comparison_size, draw_comparison
from rlfreeze_ds.telemetry.run_batches import read_run
from tests import jobs
from tests.harness import run_ranks
from tests.planning.test_main import RUN, python
from tests.test_engine import QUICK, build, slow_weight_gradients

FIT = {"forward_s": 1.0, "backward_s": 3.0, "weight_gradient_s": 1.0, "unit_shares": [1.0], "tail_s": 0.5}
BATCH = {
    "event": "batch", "step": 40, "orders": ["F SA RG B", "RA F B SG"], "ratios": [[0.5], [1.0]], "predicted_makespan_s": 7.0,
    "measured_makespan_s": 7.2, "transfer_s": 0.0, "seconds": [[["F", 0, 1.1], ["B", 0, 2.6]], [["F", 0, 1.0], ["B", 0, 2.1]]],
    "fits": [FIT, FIT],
}  # fmt: skip


def log(folder: Path, *lines: object) -> Path:
    (folder / "rlfreeze.jsonl").write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return folder


def test_three_timelines_by_hand(tmp_path: Path) -> None:
    found = read_run(log(tmp_path, {"event": "plan"}, BATCH | {"step": 20}, BATCH))
    # All in a row, and half a second of reduction and optimizer behind it.
    assert found.timelines["unfrozen"].makespan == pytest.approx(1 + 1 + 3 + 3 + 0.5)
    assert found.timelines["planned"].makespan == pytest.approx(1 + 1 + 2 + 2.5 + 0.5)
    assert found.timelines["measured"].makespan == pytest.approx(1.1 + 1.0 + 2.1 + 2.6 + 0.5)
    assert found.step == 40 and (found.predicted_s, found.measured_s) == (7.0, 7.2)
    assert found.ratios["planned"] == {Instruction.parse("0B0"): 0.5, Instruction.parse("1B0"): 1.0}


def test_backwards_in_two_by_hand(tmp_path: Path) -> None:
    """Of stage 1's backward of 3 s an I of 2 s and a W of 1 s, of which its mask of 1 skips 0.75 s."""
    in_two = FIT | {"weight_s": 1.0, "weight_saving_s": 0.75, "weight_gradient_s": 0.75}
    seconds = [[["F", 0, 1.1], ["I", 0, 2.2], ["W", 0, 0.9]], [["F", 0, 1.0], ["I", 0, 2.1], ["W", 0, 0.2]]]
    batch = BATCH | {"orders": ["F SA RG I W", "RA F I SG W"], "seconds": seconds, "fits": [in_two, in_two]}
    found = read_run(log(tmp_path, batch))
    first, last = Instruction.parse("0W0"), Instruction.parse("1W0")
    assert found.ratios["planned"] == found.ratios["measured"] == {first: 0.5, last: 1.0}
    unfrozen, planned, measured = (found.timelines[name] for name in ("unfrozen", "planned", "measured"))
    assert (unfrozen.start[last], unfrozen.end[last]) == (4.0, 5.0)  # beside stage 0's I, from 4 s to 6 s
    assert (planned.start[last], planned.end[last]) == (4.0, 4.25) and planned.makespan == pytest.approx(6 + 0.625 + 0.5)
    assert measured.makespan == pytest.approx(1.1 + 1.0 + 2.1 + 2.2 + 0.9 + 0.5)
    ax = pytest.importorskip("matplotlib.figure").Figure(figsize=(12, 5)).add_subplot()
    draw_comparison(ax, found.timelines, found.ratios)
    drawn = {container.get_label() for container in ax.containers}
    assert drawn == {"forward", "input gradient", "weight gradient", SKIPPED}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"event": "plan"}], "no plan ran long enough to be measured"),
        (["{oops", BATCH], "line 1: is not JSON; is it a run log"),
        ([BATCH | {"fits": []}], "its last batch cannot be used"),
        ([{k: v for k, v in BATCH.items() if k != "orders"}], "its last batch cannot be used .KeyError"),
    ],
)
def test_a_log_that_cannot_be_used_is_one_error(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(RLFreezeError, match=message):
        read_run(log(tmp_path, *lines))
    with pytest.raises(RLFreezeError, match="cannot be read"):
        read_run(tmp_path / "absent")


def test_a_run_that_was_killed_while_it_wrote_is_read(tmp_path: Path) -> None:
    assert read_run(log(tmp_path, BATCH, '{"event": "ba')).step == 40


def run_job(folder: str, schedule: str) -> None:
    os.environ["RLFREEZE_RUN_DIR"] = folder
    block = QUICK | {"replan_interval": 16, "planning": {"background": False, "schedule": schedule}}
    engine = build(2, jobs.ds_config(4, rlfreeze=block))
    slow_weight_gradients(engine, 0.004)
    for step in range(30):
        engine.train_batch(jobs.batches(step, 4))


@pytest.mark.parametrize("schedule", ["stock", "planned"])
def test_a_real_run_is_laid_out_and_drawn_without_torch(tmp_path: Path, schedule: str) -> None:
    run_ranks(run_job, 2, str(tmp_path), schedule)
    found = read_run(tmp_path)
    sums = {name: timeline.makespan for name, timeline in found.timelines.items()}
    assert sums["planned"] < sums["unfrozen"] and 0 < sums["measured"] < 3 * sums["unfrozen"]
    trace = tmp_path / "trace.json"
    shown = python(RUN, "timeline", "--run", tmp_path, "--trace", trace)
    assert shown.returncode == 0, shown.stderr
    assert "the measured batch" in shown.stdout and f"step {found.step}: predicted" in shown.stdout
    names = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "process_name"}
    assert any("measured" in name for name in names) and len(names) == 3
    kinds = "FB" if schedule == "stock" else "FIW"
    assert {i.kind for timeline in found.timelines.values() for i in timeline.start} == set(kinds)
    assert {(s, kind, m) for s in range(2) for kind in kinds for m in range(4)} == {
        (i.stage_id, i.kind, i.micro_batch_id) for i in found.timelines["measured"].start
    }
    ax = pytest.importorskip("matplotlib.figure").Figure(figsize=comparison_size(found.timelines)).add_subplot()
    draw_comparison(ax, found.timelines, found.ratios)
    drawn = {container.get_label(): len(container.patches) for container in ax.containers}
    assert {KINDS[kind][0] for kind in kinds} == drawn.keys() - {SKIPPED} and drawn["forward"] == 8
    refused = python(RUN, "timeline", "--run", tmp_path / "absent")
    assert refused.returncode == 2 and "RLFREEZE_RUN_DIR" in refused.stderr and "Traceback" not in refused.stderr
