"""The policy that ships with the package, and the script that makes it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlfreeze_ds.policy
from rlfreeze_ds.policy.baselines import NEVER, Fixed, Policy, Random, episode_reward, grid_rewards
from rlfreeze_ds.policy.env import START, FreezeThresholdEnv
from rlfreeze_ds.policy.network import Network
from rlfreeze_ds.policy.observation import HIGH, LOW, SIZE, Thresholds

ROOT = Path(__file__).parent.parent.parent
SHIPPED = Path(rlfreeze_ds.policy.__file__).parent / "pretrained.json"
HELD_OUT = range(6_000_000, 6_000_020)
"""Neither trained on nor in the record."""


class Shipped:
    """The policy file's, from the default thresholds on."""

    start: Thresholds = START

    def __init__(self) -> None:
        self.act = Network.load(SHIPPED).act


def test_actions_are_finite_and_within_bounds() -> None:
    act = Network.load(SHIPPED).act
    observations = np.random.default_rng(0).uniform(LOW, HIGH, (500, SIZE)).astype(np.float32)
    actions = np.array([act(one) for one in [*observations, LOW, HIGH, np.zeros(SIZE)]])
    assert actions.dtype == np.float32 and np.isfinite(actions).all() and np.abs(actions).max() <= 1
    assert actions.std(axis=0).min() > 0.01  # it does look


def test_earns_more_than_never_random_and_default_thresholds() -> None:
    env = FreezeThresholdEnv()

    def mean(policy: Policy) -> float:
        return float(np.mean([episode_reward(env, job, policy) for job in HELD_OUT]))

    shipped = mean(Shipped())
    assert shipped > mean(NEVER) + 1.0
    assert shipped > mean(Random(0))
    assert shipped > mean(Fixed(START))


def test_record_is_of_the_shipped_policy() -> None:
    """And says what is claimed of it."""
    record = json.loads((ROOT / "benchmarks/records/pretrained_policy.json").read_text())
    first, after_last = record["evaluation"]["held_out_jobs"]
    assert record["training_jobs"][1] <= first and after_last - first >= 200
    assert record["training"]["seconds"] < 30 * 60
    low, high = record["evaluation"]["interval_95"]
    assert 0 < low < record["evaluation"]["share_of_gap"] < high
    about = json.loads(SHIPPED.read_text())["about"]
    assert f"{record['training']['env_steps']} windows" in about


def test_search_finds_what_running_every_pair_finds() -> None:
    spec = importlib.util.spec_from_file_location("scripts_pretrain_policy", ROOT / "scripts/pretrain_policy.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up by name
    spec.loader.exec_module(script)
    env = FreezeThresholdEnv(num_windows=10)
    for job in (1, HELD_OUT[0]):
        assert script.search_job(job, num_windows=10).tolist() == grid_rewards(env, [job])[:, 0].tolist()


def test_script_smoke(tmp_path: Path) -> None:
    pytest.importorskip("ray.rllib", reason="needs the server extra: ray[rllib]")
    policy, record = tmp_path / "policy.json", tmp_path / "record.json"
    places = [f"--output={policy}", f"--record={record}"]
    command = [sys.executable, "scripts/pretrain_policy.py", *places, "--held-out=2", "--search=1"]

    def run(*flags: str) -> dict[str, Any]:
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
            timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(record.read_text())

    trained = run("--minutes=0.05", "--seed=3")
    assert trained["training"]["updates"] >= 1 and trained["options"]["seed"] == 3
    written = policy.read_bytes()
    again = run("--evaluate")
    assert policy.read_bytes() == written and again["training"] == trained["training"]
    assert again["evaluation"]["rewards"] == trained["evaluation"]["rewards"]
    assert not list(tmp_path.glob("*.tmp")) and str(tmp_path) not in record.read_text()
