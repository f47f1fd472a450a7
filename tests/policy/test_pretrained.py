"""The policy that ships with the package, and the script that makes it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlfreeze_ds.policy
from rlfreeze_ds.config import PolicyConfig
from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.policy.auto_server import AutoServer
from rlfreeze_ds.policy.baselines import NEVER, Fixed, Policy, Random, episode_reward, grid_rewards
from rlfreeze_ds.policy.env import START, FreezeThresholdEnv
from rlfreeze_ds.policy.network import Network
from rlfreeze_ds.policy.observation import HIGH, LOW, NUM_ACTIONS, SIZE, Thresholds
from rlfreeze_ds.policy.policies import make_policy

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


@pytest.mark.parametrize("which", ["shipped", "steep", "relu"])
def test_acts_as_rllibs_own_module_does_to_the_bit(which: str) -> None:
    """Both in float64 and rounded at the end; in float32, where sums depend on the order that a BLAS adds in, nearly."""
    pytest.importorskip("ray.rllib", reason="needs the server extra: ray[rllib]")
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space, unsquash_action

    from rlfreeze_ds.policy.job_runner import ACTION_SPACE, OBSERVATION_SPACE

    network, draw = Network.load(SHIPPED), np.random.default_rng(5)
    if which != "shipped":
        widths = [SIZE, 64, 64, NUM_ACTIONS]
        weights = [draw.normal(0, 0.4, (outputs, inputs)) for inputs, outputs in itertools.pairwise(widths)]
        network = Network(weights, [draw.normal(0, 0.4, outputs) for outputs in widths[1:]], which.replace("steep", "tanh"))
    hidden = [len(bias) for bias in network.biases[:-1]]
    config = PPOConfig().rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=hidden, fcnet_activation=network.activation, vf_share_layers=False)
    )
    spec = config.get_rl_module_spec(spaces={"default_policy": (OBSERVATION_SPACE, ACTION_SPACE)}, inference_only=True)
    module = spec.build()
    state = {name: np.asarray(value) for name, value in module.get_state().items()}
    for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        layer = f"encoder.actor_encoder.net.mlp.{2 * i}" if i < len(hidden) else "pi.net.mlp.0"
        log_stds = i == len(hidden)  # which the head has too
        state[f"{layer}.weight"] = np.concatenate([weight, weight]) if log_stds else weight
        state[f"{layer}.bias"] = np.concatenate([bias, bias]) if log_stds else bias
    module.set_state(state)
    observations = draw.uniform(LOW, HIGH, (5000, SIZE)).astype(np.float32)
    corners = np.where(draw.random((200, SIZE)) < 0.5, LOW, HIGH).astype(np.float32)
    observations = np.concatenate([observations, corners, [LOW, HIGH, np.zeros(SIZE, dtype=np.float32)]])

    def theirs(dtype: torch.dtype) -> np.ndarray:
        with torch.no_grad():
            out = module.to(dtype).forward_inference({Columns.OBS: torch.from_numpy(observations).to(dtype)})
            distribution = module.get_inference_action_dist_cls().from_logits(out[Columns.ACTION_DIST_INPUTS])
            actions = distribution.to_deterministic().sample().numpy()
        assert actions.dtype == np.dtype(str(dtype).removeprefix("torch."))
        return np.stack([unsquash_action(one, get_base_struct_from_space(ACTION_SPACE)) for one in actions]).astype(np.float32)

    ours = np.stack([network.act(one) for one in observations])
    assert np.abs(ours - theirs(torch.float32)).max() < 5e-5
    assert ours.tobytes() == theirs(torch.float64).tobytes()
    assert (np.abs(ours) < 1).any() and (which == "shipped" or (np.abs(ours) == 1).any())


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


def test_a_file_for_a_server_to_begin_with_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoServer, "start", lambda self: pytest.fail("a server was started"))
    (tmp_path / "prose.json").write_text("no policy")
    for name, says in (("nothing.json", "cannot read the policy file"), ("prose.json", "is no policy file")):
        with pytest.raises(RLFreezeError, match=says):
            make_policy(PolicyConfig(type="rllib", file=str(tmp_path / name)), 0)
