"""Every benchmark runs, in a smoke version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.profile import write_profile

ROOT = Path(__file__).parent.parent
TINY = ("--warmup", "1", "--width", "16")


def run_small(tmp_path: Path, script: str, *flags: str, steps: bool = True) -> dict[str, Any]:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *(("--steps", "4") if steps else ()), *flags, "--json", str(record)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(record.read_text())


def test_overhead_smoke(tmp_path: Path) -> None:
    figures = run_small(tmp_path, "overhead.py", *TINY)
    assert figures["median_ratio"] > 0 and figures["options"]["steps"] == 4


def test_split_cost_smoke(tmp_path: Path) -> None:
    small = ("--width", "16", "--layers", "2", "--seq-len", "16", "--rows", "1", "--micro-batches", "2", "--warmup", "1")
    figures = run_small(tmp_path, "split_cost.py", *small, "--plan-steps", "16")
    assert figures["cost_of_splitting"] == pytest.approx(figures["split_over_ours"]["median"] - 1, abs=1e-4)
    assert len(figures["batch_s"]) == 6 and all(0 < row["lower"] <= row["upper"] for row in figures["batch_s"].values())
    assert all(0 <= ratio <= 0.6 for ratio in figures["mean_freeze_ratio"].values())


def test_savings_smoke(tmp_path: Path) -> None:
    """Bytes are exact, whatever the machine: what is frozen is not reduced."""
    for job, engines in run_small(tmp_path, "savings.py", *TINY, "--rows", "8")["figures"].items():
        reduced = {name: figures["mib_reduced"] for name, figures in engines.items()}
        # Under ZeRO the criterion sums two numbers per unit over the replicas.
        assert 0 <= reduced["ratio 0.0"] - reduced["stock"] <= 0.002 and reduced["stock"] > 0, job
        assert reduced["ratio 0.8"] < 0.5 * reduced["stock"] and reduced["ratio 0.5"] < 0.8 * reduced["stock"], job


def test_emulated_pipeline_smoke(tmp_path: Path) -> None:
    schedule = one_f_one_b(2, 4)
    seconds = {"F": Duration(0.1, 0.1), "B": Duration(0.3, 0.1)}
    write_profile(tmp_path / "profile.csv", schedule, Costs({i: seconds[i.kind] for i in schedule.instructions}))
    record = run_small(
        tmp_path, "emulated_pipeline.py", "--profile", str(tmp_path / "profile.csv"), "--scale", "0.1", "--ratios", "0.8",
        "--blocks", "1", "--schedule", "stock", "zb-h1", "planned:3",
    )  # fmt: skip
    names = ("stock", "stock, ratio 0.8", "zb-h1, ratio 0.8", "planned:3, ratio 0.8")
    stock, *ours = (record["figures"][name] for name in names)
    assert [record["figures"][name]["most_micro_batches_held"] for name in names[:3]] == [2, 2, 2]
    assert record["figures"][names[3]]["most_micro_batches_held"] <= 3
    assert record["emulated"] and str(tmp_path) not in json.dumps(record)
    # (micro-batches + stages - 1) * (F + B)
    assert stock["where_the_seconds_go"]["dag_of_profile_and_masks_s"] == pytest.approx(5 * 0.04)
    assert stock["freeze_ratio_of_seconds"] == 0
    assert all(0 < figures["freeze_ratio_of_seconds"] <= 0.8 for figures in ours)
    for figures in (stock, *ours):
        parts = figures["where_the_seconds_go"]
        # Nothing is skipped that the masks do not skip, and what they skip (W takes 0.02 s) is not slept.
        assert figures["batch_s"]["median"] >= 0.98 * parts["dag_of_profile_and_masks_s"]
        assert -0.001 < parts["backward_beyond_profile_s"]["median"] < 0.01


def test_planner_scale_smoke(tmp_path: Path) -> None:
    figures = run_small(tmp_path, "planner_scale.py", "--sizes", "1", "--repeats", "1", "--full", steps=False)["figures"]
    assert figures["4 x 8"]["makespan_over_full"] == 1.0 and figures["4 x 8"]["speedup"] > 1


def test_uneven_stages_smoke(tmp_path: Path) -> None:
    small = ("--width", "16", "--seq-len", "16", "--rows", "1", "--plan-steps", "20")
    figures = run_small(tmp_path, "uneven_stages.py", *small)
    assert figures["predicted_s"] > 0 and len(figures["stage_freeze_ratio"]) == 2


def test_threshold_policies_smoke(tmp_path: Path) -> None:
    small = ("--width", "16", "--layers", "2", "--seq-len", "16", "--rows", "1", "--micro-batches", "2", "--interval", "5")
    few = ("--policies", "never", "fixed_2_1", "pretrained")
    figures = run_small(tmp_path, "threshold_policies.py", "--steps", "40", *small, *few, steps=False)
    policies = figures["policies"]
    assert figures["oracle"] in ("never", "fixed_2_1") and policies["stock"]["loss_per_second_gain"] == 1.0
    assert policies["pretrained"]["windows"] == len(policies["pretrained"]["thresholds"]) > 2
    # All train on the same batches from the same weights, and nothing is frozen before the plan.
    assert len({losses[0] for losses in figures["val_loss"].values()}) == 1


def test_simulator_calibration_smoke(tmp_path: Path) -> None:
    small = ("--width", "16", "--layers", "2", "--seq-len", "16", "--jobs", "4")
    figures = run_small(tmp_path, "simulator_calibration.py", "--steps", "40", *small, steps=False)
    row = figures["table"]["never"]["1.0"]["gradient_50%"]
    assert row["5%"] <= row["50%"] <= row["95%"] and row["real"] == figures["curves"]["never"]["gradient"][-1][1]
    assert 0 <= figures["inside"] <= figures["compared"] <= 2 * 5 * 11


def test_policy_server_load_smoke(tmp_path: Path) -> None:
    pytest.importorskip("ray.rllib", reason="needs the server extra: ray[rllib]")
    figures = run_small(tmp_path, "policy_server_load.py", "--num-jobs", "10", "--seconds", "4", steps=False)
    assert figures["answers_ms"]["num"] == 40 and figures["code"] == 0
