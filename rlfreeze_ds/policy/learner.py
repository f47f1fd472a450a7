"""The RLlib side of the policy server: acts on single observations, learns from what live jobs report."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.sac import SAC, SACConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.log import logger
from rlfreeze_ds.policy.checkpoint_folder import CheckpointFolder
from rlfreeze_ds.policy.network import Network
from rlfreeze_ds.policy.observation import HIGH, LOW, NUM_ACTIONS, SIZE

OBSERVATION_SPACE = gymnasium.spaces.Box(LOW, HIGH, dtype=np.float32)
ACTION_SPACE = gymnasium.spaces.Box(-1.0, 1.0, (NUM_ACTIONS,), dtype=np.float32)

ALGORITHMS = ("PPO", "SAC")
HIDDEN = (64, 64)

WAIT_S = 0.5
"""The longest that a training step waits for transitions before it returns without an update."""

POLL_S = 0.05
STOP_S = 10.0
"""How long an update in progress may take when the server ends."""

CHECKPOINT_S = 60.0
"""Between checkpoints while the policy is updated; there is one more at the end."""

RETRY_S = 5.0
"""After an update that failed."""


class Fragment(Protocol):
    """Consecutive transitions of one episode, none of which was handed out before.

    Attributes:
        observations: float32 [n + 1, SIZE]
        actions: float32 [n, NUM_ACTIONS], as the policy drew them (not clipped)
        rewards: float [n]
        extras: ``action_logp`` [n], ``action_dist_inputs`` [n, k]
        terminated: the episode is over, nothing follows
        truncated: the episode stopped, though more might have followed
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    extras: Mapping[str, np.ndarray]
    terminated: bool
    truncated: bool


Drain = Callable[[int], list[Fragment]]
"""``drain(min_transitions)``: fragments with at least that many transitions together, or none yet; never waits."""


@dataclass(frozen=True)
class LearnerSettings:
    """
    Attributes:
        algorithm: one of :data:`ALGORITHMS`.
        train_batch: transitions of an update.
        seed: of weights and exploration; None draws one.
        num_env_runners: processes that roll out simulated jobs, whose transitions fill up what live jobs did not bring.
        num_learners: processes that compute the update; 0 computes it in the server's.
    """

    algorithm: str = "PPO"
    train_batch: int = 256
    seed: int | None = None
    num_env_runners: int = 0
    num_learners: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise RLFreezeError(f"algorithm {self.algorithm!r}: must be one of {', '.join(ALGORITHMS)}.")
        for name, least in (("train_batch", 8), ("num_env_runners", 0), ("num_learners", 0)):
            if getattr(self, name) < least:
                raise RLFreezeError(f"{name} = {getattr(self, name)}: must be at least {least}.")

    @property
    def num_cpus(self) -> int:
        """That Ray must have: one each, and one for the server itself."""
        return 1 + self.num_env_runners + self.num_learners


class JobRunner(SingleAgentEnvRunner):
    """RLlib's local EnvRunner without an environment: jobs ask it to act, and :meth:`sample` returns what came of it.

    :meth:`act` may run in any thread; everything else belongs to the training thread.
    """

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        self._module_lock = threading.Lock()  # before super(), which sets a state
        self._waiting: list[SingleAgentEpisode] = []
        self.num_waiting = 0
        self.num_learned = 0
        self.drain: Drain | None = None
        self.stopping = threading.Event()
        super().__init__(config=config, **kwargs)

    def make_env(self) -> None:
        """There is none: the environments are jobs elsewhere."""
        self.env, self.num_envs = None, 0

    def get_spaces(self) -> dict[str, Any]:
        spaces = (OBSERVATION_SPACE, ACTION_SPACE)
        return {INPUT_ENV_SPACES: spaces, INPUT_ENV_SINGLE_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    def assert_healthy(self) -> None:
        assert self.module is not None

    def set_state(self, state: dict[str, Any]) -> None:
        with self._module_lock:
            super().set_state(state)

    @property
    def updates(self) -> int:
        """How often the policy was updated, over restores too."""
        return self._weights_seq_no

    def act(self, observation: np.ndarray, explore: bool = True) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """An action for one observation, through RLlib's connectors.

        Args:
            observation: float32 [SIZE], finite.
            explore: draw from the policy; False takes its mean, which must not be learned from.

        Returns:
            The action for the job, float32 [NUM_ACTIONS] in [-1, 1], and what a :class:`Fragment` must hold of it: ``actions``
            as drawn, ``action_logp``, ``action_dist_inputs``.
        """
        episode = SingleAgentEpisode(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
        episode.add_env_reset(observation=observation)
        shared = {"episodes": [episode], "explore": explore, "shared_data": {}}
        with self._module_lock, torch.no_grad():
            batch = self._env_to_module(rl_module=self.module, batch={}, **shared)
            out = self.module.forward_exploration(batch) if explore else self.module.forward_inference(batch)
            out = self._module_to_env(rl_module=self.module, batch=out, **shared)
        names = (Columns.ACTIONS, Columns.ACTION_LOGP, Columns.ACTION_DIST_INPUTS)
        extras = {name: np.asarray(out[name][0], dtype=np.float32) for name in names if name in out}
        return np.asarray(out.get(Columns.ACTIONS_FOR_ENV, out[Columns.ACTIONS])[0], dtype=np.float32), extras

    def add(self, episodes: list[SingleAgentEpisode]) -> None:
        """Have the next :meth:`sample` return these too."""
        self._waiting += episodes
        self.num_waiting += sum(len(episode) for episode in episodes)

    def collect(self, num_transitions: int, wait_s: float) -> bool:
        """Whether :meth:`sample` would return that many; waits for them, but no longer than ``wait_s``."""
        end = time.monotonic() + wait_s
        while not self.stopping.is_set():
            if self.drain is not None and self.num_waiting < num_transitions:
                self.add([_episode(fragment) for fragment in self.drain(num_transitions - self.num_waiting)])
            if self.num_waiting >= num_transitions:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.stopping.wait(min(left, POLL_S))
        return False

    def sample(self, **_: Any) -> list[SingleAgentEpisode]:
        """What was collected, each transition once."""
        episodes, self._waiting, num = self._waiting, [], self.num_waiting
        self.num_waiting = 0
        self.num_learned += num
        self._increase_sampled_metrics(num, sum(episode.is_done for episode in episodes))
        return episodes

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics.reduce()

    def stop(self) -> None:
        self.stopping.set()


def _episode(fragment: Fragment) -> SingleAgentEpisode:
    """As RLlib's learners want it. Each fragment is an episode of its own: a policy without memory needs no more."""
    names = (Columns.ACTION_LOGP, Columns.ACTION_DIST_INPUTS)
    return SingleAgentEpisode(
        observations=list(np.asarray(fragment.observations, dtype=np.float32)),
        observation_space=OBSERVATION_SPACE,
        actions=list(np.asarray(fragment.actions, dtype=np.float32)),
        action_space=ACTION_SPACE,
        rewards=[float(reward) for reward in fragment.rewards],
        extra_model_outputs={
            name: list(np.asarray(fragment.extras[name], dtype=np.float32)) for name in names if name in fragment.extras
        },
        terminated=fragment.terminated,
        truncated=fragment.truncated,
        len_lookback_buffer=0,
    ).to_numpy()


class _FromJobs:
    """Makes an Algorithm's training step wait for jobs, and not for ever; simulated jobs fill up its batch if there are any."""

    simulated: EnvRunnerGroup | None = None

    def _setup_logdir(self) -> None:
        """A folder that goes with the algorithm; RLlib's own would stay in the user's home."""
        self._logdir = tempfile.mkdtemp(prefix="rlfreeze-rllib-")

    def training_step(self) -> None:
        runner: JobRunner = self.env_runner
        num = self.config.total_train_batch_size
        if self.simulated is None:
            if not runner.collect(num, WAIT_S):
                return
        elif not runner.collect(num, 0.0):
            while runner.num_waiting < num and not runner.stopping.is_set():
                rounds = self.simulated.foreach_env_runner(lambda one: one.sample(), local_env_runner=False, timeout_seconds=WAIT_S)
                runner.add([episode for episodes in rounds for episode in episodes])
            if runner.stopping.is_set():
                return
        super().training_step()
        if self.simulated is not None:
            self.simulated.sync_weights(from_worker_or_learner_group=self.learner_group, inference_only=True)

    def simulate(self) -> None:
        """Start the processes that roll out simulated jobs.

        Raises:
            RLFreezeError: this installation has no simulated job.
        """
        try:
            import rlfreeze_ds.policy.env  # noqa: F401
        except ImportError as error:
            raise RLFreezeError(f"--num-env-runners needs simulated jobs, rlfreeze_ds.policy.env: {error}.") from None
        ray.tune.register_env("rlfreeze-simulated-job", simulated_job)
        config = self.config.copy(copy_frozen=False)
        num = config.num_simulated
        config.environment(env="rlfreeze-simulated-job").env_runners(
            env_runner_cls=SingleAgentEnvRunner, num_env_runners=num,
            rollout_fragment_length=max(1, config.total_train_batch_size // num),
        )  # fmt: skip
        self.simulated = EnvRunnerGroup(config=config, env_creator=simulated_job, local_env_runner=False)
        self.simulated.sync_weights(from_worker_or_learner_group=self.learner_group, inference_only=True)

    def cleanup(self) -> None:
        if self.simulated is not None:
            self.simulated.stop()
        super().cleanup()
        shutil.rmtree(self._logdir, ignore_errors=True)


def simulated_job(_: Mapping[str, Any] | None = None) -> gymnasium.Env:
    """One simulated job for a rollout process."""
    import rlfreeze_ds.policy.env  # noqa: F401  (registers it)

    return gymnasium.make("FreezeThreshold-v0")


class JobPPO(_FromJobs, PPO):
    """PPO that learns from live jobs."""


class JobSAC(_FromJobs, SAC):
    """SAC that learns from live jobs; a batch of transitions brings as many gradient steps as it has hundreds."""


def _config(settings: LearnerSettings) -> AlgorithmConfig:
    """Everything that does not depend on where the server runs."""
    if settings.algorithm == "SAC":
        config = SACConfig(algo_class=JobSAC).training(
            train_batch_size_per_learner=settings.train_batch, num_steps_sampled_before_learning_starts=settings.train_batch,
        )  # fmt: skip
    else:
        config = PPOConfig(algo_class=JobPPO).training(
            train_batch_size_per_learner=max(8, settings.train_batch // max(1, settings.num_learners)),
            minibatch_size=min(64, settings.train_batch), num_epochs=8, lr=3e-4, gamma=0.95, lambda_=0.9, grad_clip=0.5,
            entropy_coeff=0.003, vf_clip_param=100.0,
        )  # fmt: skip
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=list(HIDDEN), fcnet_activation="tanh", vf_share_layers=False))
    config.environment(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
    config.env_runners(env_runner_cls=JobRunner, num_env_runners=0)
    config.learners(num_learners=settings.num_learners, num_gpus_per_learner=0)
    config.debugging(seed=settings.seed, log_level="ERROR")
    config.reporting(min_time_s_per_iteration=None, min_sample_timesteps_per_iteration=None)
    return config


class Learner:
    """An RLlib Algorithm that acts for jobs, and a thread in which it learns. Ray runs already.

    Args:
        settings: the algorithm's.
        checkpoints: where the policy is kept; None keeps it nowhere.
    """

    def __init__(self, settings: LearnerSettings, checkpoints: CheckpointFolder | None = None) -> None:
        torch.set_num_threads(1)  # more would take the cores that answer
        self.settings = settings
        self._checkpoints = checkpoints
        self._about = {"algorithm": settings.algorithm, "observation_size": SIZE, "hidden": list(HIDDEN)}
        self._saved_updates, self._saved_at, self._disk_full = -1, time.monotonic(), False
        self._algorithm = _config(settings).build_algo()
        self._runner: JobRunner = self._algorithm.env_runner
        if settings.num_env_runners:
            self._algorithm.config.num_simulated = settings.num_env_runners
            self._algorithm.simulate()
        self._thread = threading.Thread(target=self._learn, name="learn", daemon=True)

    @property
    def updates(self) -> int:
        """How often the policy was updated."""
        return self._runner.updates

    @property
    def transitions(self) -> int:
        """How many were learned from since the start, simulated ones included."""
        return self._runner.num_learned

    def act(self, observation: np.ndarray, explore: bool = True) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """:meth:`JobRunner.act`."""
        return self._runner.act(observation, explore)

    def start(self, drain: Drain) -> None:
        """Learn from what ``drain`` returns, in a thread, until :meth:`stop`."""
        self._runner.drain = drain
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the update in progress; acting goes on."""
        self._runner.stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def close(self) -> None:
        """A last checkpoint, and the end of RLlib's processes. :meth:`stop` comes first."""
        if not self._thread.is_alive():
            self.save()
        self._algorithm.stop()

    def save(self) -> None:
        """A checkpoint if the policy changed since the last; a full disk is said once and costs nothing else."""
        if self._checkpoints is None or self.updates == self._saved_updates:
            return
        self._saved_at = time.monotonic()
        try:
            self._checkpoints.save(self.updates, self._about, lambda path: self._algorithm.save_to_path(str(path)))
        except Exception as error:  # whatever a disk does, training goes on
            if not self._disk_full:
                logger.warning("no checkpoint in %s: %s. Learning goes on.", self._checkpoints.path, error)
            self._disk_full = True
            return
        self._saved_updates, self._disk_full = self.updates, False

    def restore(self) -> None:
        """Go on from the newest checkpoint, if there is one.

        Raises:
            RLFreezeError: it is not ours, or does not fit the settings.
        """
        assert self._checkpoints is not None
        path = self._checkpoints.newest(self._about)
        if path is None:
            logger.info("no checkpoint in %s yet: the policy starts anew", self._checkpoints.path)
            return
        try:
            self._algorithm.restore_from_path(str(path))
        except Exception as error:
            raise RLFreezeError(f"{path} cannot be restored: {type(error).__name__}: {error}") from None
        self._saved_updates = self.updates
        logger.info("policy restored from %s, %d updates", path, self.updates)

    def export(self, path: str | Path, about: str = "") -> None:
        """Write the policy file of :class:`Network`; see :func:`network_of`."""
        module = self._runner.module
        network_of(module.get_state(), str(module.model_config["fcnet_activation"])).save(path, about)

    def _learn(self) -> None:
        while not self._runner.stopping.is_set():
            try:
                self._algorithm.train()
            except Exception as error:
                logger.warning("an update of the policy failed (%s: %s); jobs are answered as before", type(error).__name__, error)
                logger.debug("%s", traceback.format_exc())
                self._runner.stopping.wait(RETRY_S)
            if time.monotonic() - self._saved_at > CHECKPOINT_S:
                self.save()


def network_of(state: Mapping[str, Any], activation: str) -> Network:
    """The mean of RLlib's default Gaussian policy.

    Args:
        state: of the RLModule, with or without the value function.
        activation: of its hidden layers.

    Raises:
        RLFreezeError: the module is built otherwise, so that the numbers would mean something else.
    """
    arrays = {name: np.asarray(value) for name, value in state.items()}
    num_hidden = sum(name.startswith("encoder.actor_encoder.net.mlp.") and name.endswith(".weight") for name in arrays)
    hidden = [f"encoder.actor_encoder.net.mlp.{2 * i}" for i in range(num_hidden)]
    layers = [*hidden, "pi.net.mlp.0"]
    wanted = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    # The clip is of log-stds, which a mean does not have.
    found = {name for name in arrays if not name.startswith(("vf.", "encoder.critic_encoder.", "pi.log_std_clip_param"))}
    if found != wanted or not hidden:
        raise RLFreezeError(
            f"no default Gaussian policy: it has {sorted(found - wanted)} too many and {sorted(wanted - found)} too few. Build it "
            "with vf_share_layers=False, free_log_std=False and no head_fcnet_hiddens."
        )
    head = "pi.net.mlp.0"
    if arrays[f"{head}.weight"].shape[0] != 2 * NUM_ACTIONS:
        raise RLFreezeError(f"the head has {arrays[f'{head}.weight'].shape[0]} outputs: must be {2 * NUM_ACTIONS}, means and log-stds.")
    weights = [arrays[f"{layer}.weight"] for layer in hidden] + [arrays[f"{head}.weight"][:NUM_ACTIONS]]
    biases = [arrays[f"{layer}.bias"] for layer in hidden] + [arrays[f"{head}.bias"][:NUM_ACTIONS]]
    return Network(weights, biases, activation)
