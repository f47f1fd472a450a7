"""The command line in a process of its own, where torch, deepspeed and ray cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks" / "profiles" / "llama8b_h200_pp4_1f1b.csv"

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
"""
RUN = 'import runpy; runpy.run_module("rlfreeze_ds", run_name="__main__", alter_sys=True)'
NEEDLESS = ("torch", "deepspeed", "ray", "matplotlib")


def python(code: str, *arguments: object, blocked: tuple[str, ...] = ("torch", "deepspeed", "ray")):
    command = [sys.executable, "-c", BLOCKED.format(names=blocked) + code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def plan(*arguments: object, profile: Path = PUBLISHED, **keywords):
    return python(RUN, "plan", "--profile", profile, *arguments, **keywords)


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one message of a run that was refused."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_the_blocker_blocks() -> None:
    assert "torch is blocked" in python("import torch").stderr


@pytest.mark.parametrize("path", sorted((ROOT / "rlfreeze_ds" / "planning").glob("*.py")), ids=lambda path: path.stem)
def test_every_planning_module_imports_without_torch(path: Path) -> None:
    name = f"rlfreeze_ds.planning.{path.stem}".removesuffix(".__init__")
    result = python(f"import {name}", blocked=NEEDLESS)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("max_freeze_ratio", "time_slack", "planned_s", "mean"),
    [(0.8, 0, 0.4234, 0.683), (0.8, 0.02, 0.4319, 0.574), (0.5, 0.02, 0.4927, 0.326)],
)
def test_the_published_profile(tmp_path: Path, max_freeze_ratio, time_slack, planned_s, mean) -> None:
    out = tmp_path / "plan.json"
    result = plan("--max-freeze-ratio", max_freeze_ratio, "--time-slack", time_slack, "--json", out)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    data = json.loads(out.read_text())
    assert data["unfrozen_makespan_s"] == pytest.approx(0.675, abs=1e-3)
    assert data["all_frozen_makespan_s"] == pytest.approx(0.385, abs=1e-3)
    assert data["planned_makespan_s"] == pytest.approx(planned_s, abs=5e-4)
    assert 0 < data["mean_freeze_ratio"] <= mean
    assert len(data["stage_freeze_ratio"]) == 4
    assert {(row["stage_id"], row["micro_batch_id"]) for row in data["freeze_ratio"]} == {
        (stage_id, micro_batch_id) for stage_id in range(4) for micro_batch_id in range(8)
    }
    for name in ("unfrozen_makespan_s", "planned_makespan_s", "all_frozen_makespan_s", "mean_freeze_ratio"):
        line = next(line for line in result.stdout.splitlines() if line.startswith(name + " "))
        assert float(line.split()[1]) == pytest.approx(data[name], abs=1e-4)
    assert data["verdict"] in result.stdout
    assert data["verdict"].startswith(f"{0.675 / planned_s:.2f}x: 0.675 s -> ")
    assert result.stdout.startswith("verdict ")


def test_split_backwards_and_two_stages_a_rank(tmp_path: Path) -> None:
    rows = ["0,0,0,F,1,1", "0,2,0,F,1,1", "0,2,0,I,1,1", "0,2,0,W,1,0", "0,0,0,B,2,1.5"]
    rows += ["1,1,0,F,1,1", "1,1,0,I,1,1", "1,1,0,W,1,0"]
    path = tmp_path / "split.csv"
    path.write_text("\n".join(["rank,stage_id,micro_batch_id,kind,unfrozen_s,frozen_s", *rows]))
    result = plan("--max-freeze-ratio", 1, "--time-slack", 0, "--json", tmp_path / "plan.json", profile=path)
    assert result.returncode == 0, result.stderr
    data = json.loads((tmp_path / "plan.json").read_text())
    # One chain of 3 F, 2 I and stage 0's B; stage 2's W runs beside stage 1's I, stage 1's W beside stage 0's B.
    assert (data["unfrozen_makespan_s"], data["planned_makespan_s"]) == pytest.approx((7.0, 6.5))
    assert data["stage_freeze_ratio"] == pytest.approx([1.0, 0.0, 0.0])
    assert "stage 1: nothing is frozen, its weight gradients are off the critical path" in result.stdout


def test_a_broken_profile_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(PUBLISHED.read_text().replace("0.013", "-0.013", 1))
    message = refused(plan(profile=path))
    assert message.startswith("rlfreeze_ds plan: error: ")
    assert "broken.csv, line 7: unfrozen_s = '-0.013'; must be a finite number of seconds >= 0" in message


def test_a_missing_profile_is_one_error(tmp_path: Path) -> None:
    assert "cannot be read" in refused(plan(profile=tmp_path / "absent.csv"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-freeze-ratio", 1.7), "max_freeze_ratio = 1.7: must be between 0 and 1"),
        (("--max-freeze-ratio", "nan"), "max_freeze_ratio = nan: must be between 0 and 1"),
        (("--max-freeze-ratio", "much"), "invalid float value: 'much'"),
        (("--time-slack", "-1"), "time_slack = -1.0: must be a finite number >= 0"),
        (("--time-limit-s", "0"), "time_limit_s = 0.0: must be a finite number of seconds > 0"),
        (("--solver", "glpk"), "invalid choice: 'glpk'"),
    ],
)
def test_arguments_out_of_range(arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(plan(*arguments))


def test_no_solver_and_no_pulp_is_one_error() -> None:
    message = refused(plan(blocked=("torch", "deepspeed", "ray", "pulp")))
    assert "no linear-program solver" in message
    assert "pip install" in message


def test_cbc_is_enough() -> None:
    result = plan("--max-freeze-ratio", 0.8, "--time-slack", 0, blocked=("torch", "deepspeed", "ray", "highspy"))
    if "no linear-program solver" in result.stderr:
        pytest.skip("cbc is not installed")
    assert result.returncode == 0, result.stderr
    assert "planned_makespan_s     0.4234" in result.stdout


def test_an_unwritable_place_leaves_the_old_file(tmp_path: Path) -> None:
    assert "cannot write" in refused(plan("--json", tmp_path / "absent" / "plan.json"))
    old = tmp_path / "plan.json"
    old.write_text("old")
    assert "must be between 0 and 1" in refused(plan("--max-freeze-ratio", 2, "--json", old))
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_text_shows_and_explains_the_planned_batch(tmp_path: Path) -> None:
    result = plan("--max-freeze-ratio", 0.8, "--trace", tmp_path / "trace.json", blocked=NEEDLESS)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    # Rank 3 begins when three forwards are over, at 0.055 s of 0.432 s.
    (row,) = [line for line in lines if line.startswith("rank 3 |")]
    assert len(row.split("|")[1]) * 0.055 / 0.4319 == pytest.approx(row.index("F0") - row.index("|") - 1, abs=1.01)
    # Rank 3 has the most seconds of the CSV: 8 forwards and backwards, 0.492 s.
    assert lines[-1].startswith("stage 3 is the bottleneck (busy 0.492 s of 0.675 s unfrozen): ")
    assert [line.split()[:2] for line in lines[-4:]] == [["stage", f"{stage_id}{':' * (stage_id < 3)}"] for stage_id in range(4)]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ends = {pid: max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (0, 1)}
    assert ends == {0: 675_000, 1: pytest.approx(431_900, abs=100)}


def test_a_picture_of_both_batches(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = plan("--max-freeze-ratio", 0.8, "--gantt", tmp_path / "plan.png")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    message = refused(plan("--gantt", tmp_path / "plan.png", "--json", tmp_path / "plan.json", blocked=NEEDLESS))
    assert "matplotlib is blocked" in message and "pip install matplotlib" in message
    assert "must be one of .png, .svg, .pdf" in refused(plan("--gantt", tmp_path / "plan.jpg"))
    assert "cannot write" in refused(plan("--trace", tmp_path / "absent" / "trace.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("noise_scale", "gain", "mean"), [(14, 1.19, 0.37), (3, 1.31, 0.49), (None, 1.125, 0.28)])
def test_the_most_loss_per_second_on_the_published_profile(tmp_path: Path, noise_scale, gain: float, mean: float) -> None:
    known = [] if noise_scale is None else ["--noise-scale", noise_scale]
    result = plan("--objective", "progress", *known, "--max-freeze-ratio", 0.8, "--json", tmp_path / "plan.json")
    assert result.returncode == 0, result.stderr
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["expected_loss_per_second_gain"] >= gain and data["mean_freeze_ratio"] == pytest.approx(mean, abs=0.02)
    assert 0.5 < data["expected_kept_progress"] < 1 and data["objective"] == "progress"
    assert f"{data['expected_loss_per_second_gain']:.2f}x the loss per second" in result.stdout


def test_frontier_and_target(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = plan("--frontier", "--target-speedup", 1.2, "--json", out)
    assert result.returncode == 0, result.stderr
    data = json.loads(out.read_text())
    assert data["unfrozen_makespan_s"] / data["planned_makespan_s"] == pytest.approx(1.2, abs=1e-4)
    points = data["frontier"]["points"]
    assert points[0]["mean_freeze_ratio"] == 0 and points[-1]["planned_makespan_s"] == pytest.approx(0.483, abs=1e-3)
    assert "knee" in result.stdout
    python("from rlfreeze_ds.planning.plan import Plan; import sys; Plan.load(sys.argv[1])", out).check_returncode()
    assert "target_speedup = 3: at most 1.398 can be reached here" in refused(plan("--target-speedup", 3))
    assert "noise_scale = -1.0: must be a number >= 0" in refused(plan("--objective", "progress", "--noise-scale", -1))


def test_the_frontier_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = plan("--frontier-picture", tmp_path / "frontier.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
