"""FreezeThreshold-v0 keeps its contract."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlfreeze_ds.errors import ConfigError
from rlfreeze_ds.policy.env import ENV_ID, START, FreezeThresholdEnv
from rlfreeze_ds.policy.job_traits import HELD_OUT_JOBS
from rlfreeze_ds.policy.observation import HIGH, LOW, NAMES, SIZE, STEP_FACTOR, Thresholds

ROOT = Path(__file__).parents[2]


def episode(env: gymnasium.Env, seed: int, num_windows: int = 6) -> list[tuple[list[float], float]]:
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    seen = [(observation.tolist(), 0.0)]
    for _ in range(num_windows):
        observation, reward, *_ = env.step(env.action_space.sample())
        seen.append((observation.tolist(), reward))
    return seen


def test_gymnasium_s_checker_has_nothing_to_say() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ENV_ID).unwrapped, skip_render_check=True)
        check_env(FreezeThresholdEnv(HELD_OUT_JOBS, num_windows=3), skip_render_check=True)


def test_the_spaces_are_the_contract_s() -> None:
    env = gymnasium.make(ENV_ID)
    assert env.observation_space == gymnasium.spaces.Box(LOW, HIGH, dtype=np.float32)
    assert env.action_space == gymnasium.spaces.Box(-1, 1, (2,), dtype=np.float32)


def test_the_docstring_s_table_is_that_of_the_observation() -> None:
    text = FreezeThresholdEnv.__doc__.split("## Observation space")[1].split("## Reward")[0]
    rows = re.findall(r"\| (\d+) +\|.*\| (-?[\d.]+) +\| (-?[\d.]+) +\|", text)
    assert [int(row[0]) for row in rows] == list(range(SIZE)) and len(NAMES) == SIZE
    assert [float(row[1]) for row in rows] == pytest.approx(LOW.tolist(), abs=0.01)
    assert [float(row[2]) for row in rows] == pytest.approx(HIGH.tolist(), abs=0.01)


def test_equal_seeds_give_equal_episodes() -> None:
    assert episode(FreezeThresholdEnv(), 3) == episode(FreezeThresholdEnv(), 3)
    assert episode(FreezeThresholdEnv(), 3) != episode(FreezeThresholdEnv(), 4)
    env = FreezeThresholdEnv()
    assert episode(env, 3) == episode(env, 3), "an episode leaves something behind for the next one"


def test_jobs_come_from_the_range() -> None:
    env = FreezeThresholdEnv((7, 10))
    assert {env.reset(seed=seed)[1]["job"] for seed in range(30)} == {7, 8, 9}
    assert env.reset(options={"job": 3})[1]["job"] == 3


def test_a_run_ends_after_its_windows() -> None:
    env = FreezeThresholdEnv(num_windows=4)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(np.zeros(2))
    observation, _ = env.reset(seed=0)
    assert observation[NAMES.index("progress")] == 0
    ends = []
    for window in range(4):
        observation, _, terminated, truncated, info = env.step(np.zeros(2, dtype=np.float32))
        assert observation[NAMES.index("progress")] == pytest.approx((window + 1) / 4)
        assert info["seconds"] > 0 and info["loss"] > 0 and not truncated
        ends.append(terminated)
    assert ends == [False, False, False, True]
    with pytest.raises(RuntimeError, match="reset"):
        env.step(np.zeros(2))


def test_actions_move_the_thresholds_and_reset_restores_them() -> None:
    env = FreezeThresholdEnv()
    env.reset(seed=0)
    observation, *_ = env.step(np.array([1.0, -1.0], dtype=np.float32))
    expected = np.log([START.gradient * STEP_FACTOR, START.variation / STEP_FACTOR])
    assert observation[-2:] == pytest.approx(expected, rel=1e-6)
    observation, _ = env.reset(seed=0)
    assert observation[-2:] == pytest.approx(np.log([START.gradient, START.variation]))
    observation, _ = env.reset(seed=0, options={"thresholds": Thresholds(0.5, 0.25)})
    assert observation[-2:] == pytest.approx(np.log([0.5, 0.25]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FreezeThresholdEnv((5, 5)), r"jobs = \(5, 5\)"),
        (lambda: FreezeThresholdEnv(num_windows=0), "num_windows = 0"),
        (lambda: FreezeThresholdEnv().reset(options={"jobs": 1}), "'jobs'"),
        (lambda: FreezeThresholdEnv().reset(options={"thresholds": Thresholds(0.0, 1.0)}), "gradient threshold = 0.0"),
    ],
)
def test_what_is_wrong_is_named(build, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_neither_torch_nor_ray_is_needed() -> None:
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "deepspeed", "ray"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
try:
    import torch
except ImportError:
    print("blocked")
from rlfreeze_ds.policy.baselines import NEVER, episode_reward
from rlfreeze_ds.policy.env import FreezeThresholdEnv
print(abs(episode_reward(FreezeThresholdEnv(num_windows=2), 0, NEVER)) < 1)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["blocked", "True"], result.stderr
