"""The policy that ships with the package: learnt on simulated jobs, judged on jobs it never saw.

What it does: trains RLlib's PPO on ``FreezeThreshold-v0``, writes the mean of the learnt policy to a small policy file, then
compares it on held-out jobs with never freezing, random thresholds, the fixed pair that is best on the training jobs, and each
job's own best fixed pair. In training, each reward is less that of the same job under the default thresholds: the two share
their luck, which takes most of the noise off and changes nothing about which policy is best.

How to run: ``python scripts/pretrain_policy.py`` in an environment with the ``server`` extra; ``--evaluate`` only judges the
file that is there.

What to expect: two processes that play jobs and one that learns from them, in turn, on two cores; ``--minutes`` of training with
a line a few times a minute, then some minutes of evaluation, most of them the search for fixed thresholds; at the end a table,
which the record keeps with the learning curve.
Where training ends depends on the machine's speed, so a second run gives a policy as good, not the same one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rlfreeze_ds.policy.baselines import GRID, NEVER, Fixed, Policy, Random, episode_reward  # noqa: E402
from rlfreeze_ds.policy.env import NUM_WINDOWS, START, FreezeThresholdEnv  # noqa: E402
from rlfreeze_ds.policy.job_traits import TRAINING_JOBS, draw_job  # noqa: E402
from rlfreeze_ds.policy.network import Network  # noqa: E402
from rlfreeze_ds.policy.observation import Thresholds  # noqa: E402
from rlfreeze_ds.policy.simulated_job import SimulatedJob  # noqa: E402

FIRST_HELD_OUT = 7_000_000
"""A seed. Nothing about jobs, policy or training was chosen by looking at jobs from here on."""
HIDDEN = (64, 64)
NUM_PROCESSES = 2
NUM_ENVS = 8
"""In each process."""
BATCH = 5_120  # eight episodes of every environment
PPO_SETTINGS: dict[str, Any] = {
    "train_batch_size_per_learner": BATCH, "minibatch_size": 512, "num_epochs": 8, "lr": 5e-4, "gamma": 0.97, "lambda_": 0.95,
    "grad_clip": 0.5, "entropy_coeff": 0.0, "vf_clip_param": 100.0, "clip_param": 0.2, "use_kl_loss": False,
}  # fmt: skip
START_LOG_STD = -0.7
"""Of the actions at the start, about half a step; their means start near 0, so that the first policy holds the thresholds."""
START_RANGE = (0.02, 4.0)
"""Of both thresholds at the start of a run to learn from."""
AVERAGED_SHARE = 0.25
"""The policy is the mean of its weights over this last share of the training time."""
NUM_RESAMPLES = 10_000
EVALUATION_SEED = 0  # of the random policy and the resampling, whatever seed trained
LINE_S = 15.0


@dataclass(frozen=True)
class Scaling:
    """Observations to learn from have mean 0 and standard deviation 1 on training jobs. As jobs report them, what decides whether
    freezing pays (kept progress, throughput: a tenth up or down) would drown in what moves by whole units."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def measured(cls, seed: int, num_episodes: int = 100) -> Scaling:
        """Of training jobs under random thresholds."""
        env, policy, seen = AgainstDefault(None), Random(seed), []
        for episode in range(num_episodes):
            observation, _ = env.reset(seed=seed + episode)
            done = False
            while not done:
                seen.append(observation)
                observation, _, done, _, _ = env.step(policy.act(observation))
        return cls(np.mean(seen, axis=0), np.maximum(np.std(seen, axis=0), 1e-3))

    def scaled(self, observation: np.ndarray) -> np.ndarray:
        """float32 [SIZE]."""
        return ((observation - self.mean) / self.deviation).astype(np.float32)

    def folded_into(self, network: Network) -> Network:
        """``network``, which was learnt on scaled observations, for plain ones."""
        weights, biases = list(network.weights), list(network.biases)
        weights[0] = weights[0] / self.deviation
        biases[0] = biases[0] - weights[0] @ self.mean
        return Network(weights, biases, network.activation)


class AgainstDefault(FreezeThresholdEnv):
    """Rewards are less those of the same job, with the same luck, under the default thresholds. Half of the runs begin with
    thresholds from anywhere: from the default ones, under which nearly all units may freeze, chance alone would seldom come to
    where thresholds matter. ``scaling``: of the observations, None for plain ones."""

    def __init__(self, scaling: Scaling | None) -> None:
        super().__init__(TRAINING_JOBS)
        self._other = FreezeThresholdEnv(TRAINING_JOBS)
        self._scaling = scaling
        if scaling is not None:
            low, high = self.observation_space.low, self.observation_space.high
            self.observation_space = Box(scaling.scaled(low), scaling.scaled(high), dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)  # seeds the draws that follow
        anywhere = Thresholds(*np.exp(self.np_random.uniform(np.log(START_RANGE[0]), np.log(START_RANGE[1]), 2)).tolist())
        observation, info = super().reset(options={"thresholds": anywhere if self.np_random.random() < 0.5 else START})
        self._other.reset(options={"job": info["job"]})
        return self._seen(observation), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        _, other, *_ = self._other.step(np.zeros_like(action))
        return self._seen(observation), reward - other, terminated, truncated, info

    def _seen(self, observation: np.ndarray) -> np.ndarray:
        return observation if self._scaling is None else self._scaling.scaled(observation)


@dataclass(frozen=True)
class Pretrained:
    """The policy file's, from the default thresholds on."""

    network: Network
    start: Thresholds = START

    def act(self, observation: np.ndarray) -> np.ndarray:
        """The mean; nothing is drawn."""
        return self.network.act(observation)


def _algorithm(seed: int, scaling: Scaling) -> Any:
    """PPO, which learns in this process."""
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.tune import register_env

    class Calm(DefaultPPOTorchRLModule):
        """Begins by holding the thresholds."""

        def setup(self) -> None:
            super().setup()
            head = self.pi.net.mlp[-1]
            with torch.no_grad():
                head.weight.mul_(0.05)
                head.bias.zero_()
                head.bias[head.bias.numel() // 2 :] = START_LOG_STD

    torch.set_num_threads(1)
    register_env("against-default", lambda _: AgainstDefault(scaling))
    model = DefaultModelConfig(fcnet_hiddens=list(HIDDEN), fcnet_activation="tanh", vf_share_layers=False)
    config = PPOConfig().environment("against-default").training(**PPO_SETTINGS)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Calm, model_config=model))
    config.env_runners(
        num_env_runners=NUM_PROCESSES, num_envs_per_env_runner=NUM_ENVS,
        rollout_fragment_length=BATCH // (NUM_PROCESSES * NUM_ENVS),
    )  # fmt: skip
    config.learners(num_learners=0, num_gpus_per_learner=0).debugging(seed=seed, log_level="ERROR")
    config.reporting(min_time_s_per_iteration=None)
    return config.build_algo()


def train(seed: int, seconds: float) -> tuple[Network, dict[str, Any]]:
    """Train for so long. Ray runs already."""
    from rlfreeze_ds.policy.learner import network_of

    begin = time.monotonic()
    scaling = Scaling.measured(seed)
    algorithm = _algorithm(seed, scaling)
    curve: list[dict[str, float]] = []
    states: list[dict[str, np.ndarray]] = []
    steps, printed = 0, begin
    try:
        while not curve or time.monotonic() - begin < seconds:
            found = algorithm.train()["env_runners"]
            steps += int(found["num_env_steps_sampled"])
            passed = time.monotonic() - begin
            gain = float(found["episode_return_mean"])
            curve.append({"seconds": round(passed, 1), "env_steps": steps, "episode_gain_over_default": round(gain, 4)})
            state = algorithm.get_module().get_state()
            if passed >= (1 - AVERAGED_SHARE) * seconds:
                states.append({name: np.array(value, dtype=np.float64) for name, value in state.items()})
            if time.monotonic() - printed > LINE_S:
                printed = time.monotonic()
                print(f"{passed:5.0f} of {seconds:.0f} s, {steps} windows: {gain:+.3f} an episode over default", flush=True)
    finally:
        shutil.rmtree(algorithm.logdir, ignore_errors=True)
        algorithm.stop()
    mean = {name: np.mean([state[name] for state in states], axis=0) for name in states[0]} if states else state
    figures = {"env_steps": steps, "updates": len(curve), "seconds": round(time.monotonic() - begin, 1), "learning_curve": curve}
    return scaling.folded_into(network_of(mean, "tanh")), figures


def train_with_ray(seed: int, seconds: float) -> tuple[Network, dict[str, Any]]:
    """:func:`train` on a Ray of its own."""
    from rlfreeze_ds.policy import local_ray

    folder = Path(tempfile.mkdtemp(prefix="rlf-"))  # short: sockets lie in it
    try:
        local_ray.prepare(folder)
        local_ray.start(folder, num_cpus=NUM_PROCESSES)
        return train(seed, seconds)
    finally:
        local_ray.stop()
        shutil.rmtree(folder, ignore_errors=True)


def search_job(job: int, num_windows: int = NUM_WINDOWS) -> np.ndarray:
    """Episode rewards of all fixed pairs, [pairs], as ``baselines.grid_rewards`` finds them. Pairs that let the same units freeze
    share one run until they differ: thresholds act through the eligible units alone."""
    traits = draw_job(job, num_windows)
    rewards = np.zeros(len(GRID))
    runs = [(SimulatedJob(traits, num_windows), list(range(len(GRID))))]
    for _ in range(num_windows):
        split: list[tuple[SimulatedJob, list[int]]] = []
        for run, pairs in runs:
            alike: dict[bytes, list[int]] = {}
            for pair in pairs:
                alike.setdefault(run.statistics.eligible(GRID[pair]).tobytes(), []).append(pair)
            copies = [copy.deepcopy(run, {id(traits): traits}) for _ in range(len(alike) - 1)]
            split += zip([run, *copies], alike.values(), strict=True)
        for run, pairs in split:
            rewards[pairs] += run.run_window(GRID[pairs[0]]).reward
        runs = split
    return rewards


def search(jobs: Sequence[int], name: str) -> np.ndarray:
    """Rewards of all fixed pairs, [pairs, jobs]."""
    columns, printed = [], time.monotonic()
    for i, job in enumerate(jobs):
        columns.append(search_job(job))
        if time.monotonic() - printed > LINE_S:
            printed = time.monotonic()
            print(f"fixed pairs on {i + 1} of {len(jobs)} {name} jobs", flush=True)
    return np.array(columns).T


def share_of_gap(rewards: dict[str, np.ndarray]) -> dict[str, Any]:
    """(pretrained - best fixed) / (oracle - never) with a 95 % interval, jobs drawn anew."""
    gain = rewards["pretrained"] - rewards["best_fixed"]
    gap = rewards["oracle"] - rewards["never"]
    drawn = np.random.default_rng(EVALUATION_SEED).integers(len(gain), size=(NUM_RESAMPLES, len(gain)))
    low, high = np.quantile(gain[drawn].mean(axis=1) / gap[drawn].mean(axis=1), (0.025, 0.975)).tolist()
    against_random = rewards["pretrained"] - rewards["random"]
    return {
        "share_of_gap": round(float(gain.mean() / gap.mean()), 4), "interval_95": [round(low, 4), round(high, 4)],
        "gain_over_random": round(float(against_random.mean()), 4),
        "gain_over_random_interval_95": np.quantile(against_random[drawn].mean(axis=1), (0.025, 0.975)).round(4).tolist(),
        "jobs_better_than_best_fixed": int((gain > 0).sum()), "jobs_worse_than_best_fixed": int((gain < 0).sum()),
    }  # fmt: skip


def evaluate(network: Network, num_jobs: int, num_search_jobs: int) -> dict[str, Any]:
    """The comparison on held-out jobs."""
    begin, env = time.monotonic(), FreezeThresholdEnv()
    held_out = range(FIRST_HELD_OUT, FIRST_HELD_OUT + num_jobs)
    on_training = search(range(num_search_jobs), "training").mean(axis=1)
    best = GRID[int(on_training.argmax())]
    policies: dict[str, Policy] = {
        "never": NEVER, "random": Random(EVALUATION_SEED), "best_fixed": Fixed(best), "pretrained": Pretrained(network)
    }  # fmt: skip
    rewards = {name: np.array([episode_reward(env, job, policy) for job in held_out]) for name, policy in policies.items()}
    rewards["oracle"] = search(held_out, "held-out").max(axis=0)
    table = {
        name: {
            "mean_episode_reward": round(float(values.mean()), 4),
            "standard_error": round(float(values.std(ddof=1) / np.sqrt(num_jobs)), 4),
        }
        for name, values in rewards.items()
    }
    return {
        "held_out_jobs": [held_out.start, held_out.stop], "search_jobs": [0, num_search_jobs], "grid_pairs": len(GRID),
        "best_fixed": vars(best), "rewards": table, **share_of_gap(rewards), "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def write_json(path: Path, document: dict[str, Any]) -> None:
    """An old file stays whole until the new one is."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train unless told not to, judge, keep the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, exploration and drawn jobs (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=200, metavar="JOBS", help="to judge by (default: %(default)s)")
    parser.add_argument(
        "--search", type=int, default=100, metavar="JOBS", help="training jobs to search the fixed pair on (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "rlfreeze_ds/policy/pretrained.json", help="policy file")
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks/records/pretrained_policy.json")
    parser.add_argument("--evaluate", action="store_true", help="judge the policy file that is there, no training")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.held_out < 2 or options.search < 1:
        parser.error("--minutes must be positive, --held-out at least 2, --search at least 1.")

    record: dict[str, Any] = {
        "claim": "on jobs it never saw, the pretrained policy earns more than the best fixed pair of thresholds",
        "script": "scripts/pretrain_policy.py",
    }
    if options.evaluate:
        network = Network.load(options.output)
        before = json.loads(options.record.read_text(encoding="utf-8")) if options.record.exists() else {}
        record |= {key: before[key] for key in ("options", "ppo", "training_jobs", "training", "versions") if key in before}
    else:
        network, training = train_with_ray(options.seed, 60 * options.minutes)
        network.save(
            options.output, f"PPO on simulated jobs, {training['env_steps']} windows, seed {options.seed}; pretrain_policy.py"
        )
        network = Network.load(options.output)
        record |= {
            "options": {"minutes": options.minutes, "seed": options.seed},
            "ppo": PPO_SETTINGS | {"hidden": HIDDEN, "envs": NUM_PROCESSES * NUM_ENVS, "averaged_share": AVERAGED_SHARE},
            "training_jobs": TRAINING_JOBS,
            "training": training,
            "versions": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in ("ray", "torch", "gymnasium", "numpy")},
        }
        write_json(options.record, record)  # kept should the evaluation be broken off
    record["options"] = record.get("options", {}) | {"held_out": options.held_out, "search": options.search}
    record["evaluation"] = evaluate(network, options.held_out, options.search)
    record["hardware"] = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    write_json(options.record, record)

    result = record["evaluation"]
    for name, row in result["rewards"].items():
        print(f"{name:>12}  {row['mean_episode_reward']:8.3f} an episode  (standard error {row['standard_error']:.3f})")
    low, high = result["interval_95"]
    print(f"pretrained - best fixed: {result['share_of_gap']:.1%} of oracle - never, 95 % interval {low:.1%} to {high:.1%}")


if __name__ == "__main__":
    main()
