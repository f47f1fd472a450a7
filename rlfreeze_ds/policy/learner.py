"""The RLlib side of the policy server: acts on single observations, learns from what live jobs report."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.sac import SAC, SACConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.log import logger
from rlfreeze_ds.policy.appo import InStepAPPO, InStepLearner
from rlfreeze_ds.policy.checkpoint_folder import CheckpointFolder
from rlfreeze_ds.policy.fragment import Decision
from rlfreeze_ds.policy.job_runner import ACTION_SPACE, OBSERVATION_SPACE, Drain, JobRunner
from rlfreeze_ds.policy.learner_settings import LearnerSettings
from rlfreeze_ds.policy.network import Network
from rlfreeze_ds.policy.observation import NUM_ACTIONS, SIZE

logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # it warns of its own plans

HIDDEN = (64, 64)

SAC_TRANSITIONS_A_STEP = 8
"""New transitions for each gradient step of SAC, which replays old ones too."""

APPO_PASSES = 20
"""Over the whole batch of an update; RLlib advises so many for continuous actions."""

START_LOG_STD = -1.0
"""Of the actions of a server that begins with a policy file: a third of a step, which explores and does not stray."""

WAIT_S = 0.5
"""The longest that a training step waits for transitions before it returns without an update."""

STOP_S = 10.0
"""How long an update in progress may take when the server ends."""

CHECKPOINT_S = 60.0
"""Between checkpoints while the policy is updated; there is one more at the end."""

RETRY_S = 5.0
"""After an update that failed."""


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
            runner.collect(runner.num_waiting + 1, 0.0)  # fewer will do: the rest is simulated
            # Asks those that wait, and takes what others had been asked for.
            rounds = self.simulated.foreach_env_runner_async_fetch_ready(
                func="sample", tag="sample", timeout_seconds=WAIT_S, return_obj_refs=False
            )
            runner.add([episode for episodes in rounds for episode in episodes])
            if runner.num_waiting < num or runner.stopping.is_set():
                return
        super().training_step()
        if self.simulated is not None:
            self.simulated.sync_weights(from_worker_or_learner_group=self.learner_group, inference_only=True)

    def simulate(self, num: int) -> None:
        """Start ``num`` processes that roll out simulated jobs.

        Raises:
            RLFreezeError: this installation has no simulated job.
        """
        try:
            import rlfreeze_ds.policy.env  # noqa: F401
        except ImportError as error:
            raise RLFreezeError(f"--num-env-runners needs simulated jobs, rlfreeze_ds.policy.env: {error}.") from None
        ray.tune.register_env("rlfreeze-simulated-job", simulated_job)
        config = self.config.copy(copy_frozen=False)
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
    """SAC that learns from live jobs."""


class JobAPPO(_FromJobs, InStepAPPO):
    """APPO that learns from live jobs."""


def algorithm_config(settings: LearnerSettings) -> AlgorithmConfig:
    """Everything that does not depend on where the server runs."""
    batch = max(8, settings.train_batch // max(1, settings.num_learners))
    if settings.algorithm == "SAC":
        config = SACConfig(algo_class=JobSAC).training(
            train_batch_size_per_learner=settings.train_batch, num_steps_sampled_before_learning_starts=settings.train_batch,
            training_intensity=max(1, settings.train_batch // SAC_TRANSITIONS_A_STEP),
        )  # fmt: skip
        config.env_runners(rollout_fragment_length=settings.train_batch)  # what training_intensity is counted against
    elif settings.algorithm == "APPO":
        config = APPOConfig(algo_class=JobAPPO).training(
            train_batch_size_per_learner=batch, num_epochs=APPO_PASSES, lr=3e-4, gamma=0.95, grad_clip=0.5, entropy_coeff=0.003,
            target_network_update_freq=0,  # after every update
            use_circular_buffer=False,
        )  # fmt: skip
        config.learners(learner_class=InStepLearner)
    else:
        config = PPOConfig(algo_class=JobPPO).training(
            train_batch_size_per_learner=batch, minibatch_size=min(64, settings.train_batch), num_epochs=8, lr=3e-4, gamma=0.95,
            lambda_=0.9, grad_clip=0.5, entropy_coeff=0.003, vf_clip_param=100.0,
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
        self._saved_updates, self._saved_at, self._disk_full = 0, time.monotonic(), False
        self._algorithm = algorithm_config(settings).build_algo()
        self._runner: JobRunner = self._algorithm.env_runner
        if settings.policy_file is not None:
            self._begin_as(Network.load(settings.policy_file))
        if settings.num_env_runners:
            self._algorithm.simulate(settings.num_env_runners)
        self._thread = threading.Thread(target=self._learn, name="learn", daemon=True)

    @property
    def updates(self) -> int:
        """How often the policy was updated."""
        return self._runner.updates

    @property
    def transitions(self) -> int:
        """How many were learned from since the start, simulated ones included."""
        return self._runner.num_learned

    def act(self, observation: np.ndarray, explore: bool = True) -> Decision:
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

    def _begin_as(self, network: Network) -> None:
        """Take on its mean, and draw from :data:`START_LOG_STD` around it; what the value function says is still to be learned.

        Raises:
            RLFreezeError: its layers are others.
        """
        layers = ["encoder.actor_encoder.net.mlp.0", "encoder.actor_encoder.net.mlp.2", "pi.net.mlp.0"]
        widths = tuple(weight.shape[0] for weight in network.weights[:-1])
        if widths != HIDDEN or network.activation != "tanh":
            raise RLFreezeError(
                f"--policy-file {self.settings.policy_file}: hidden layers {widths} with {network.activation}; a server begins "
                f"with {HIDDEN} and tanh only."
            )
        weights = self._algorithm.learner_group.get_weights()
        state = dict(weights[DEFAULT_MODULE_ID])
        for i, layer in enumerate(layers):
            weight, bias = network.weights[i], network.biases[i]
            if layer == layers[-1]:
                weight = np.concatenate([weight, np.zeros_like(weight)])
                bias = np.concatenate([bias, np.full_like(bias, START_LOG_STD)])
            for prefix in ("", "_old_"):  # APPO's target network
                if f"{prefix}{layer}.weight" in state:
                    state[f"{prefix}{layer}.weight"], state[f"{prefix}{layer}.bias"] = weight, bias
        self._algorithm.learner_group.set_weights({DEFAULT_MODULE_ID: state})
        self._runner.module.set_state({name: value for name, value in state.items() if not name.startswith("_old_")})

    def _learn(self) -> None:
        while not self._runner.stopping.is_set():
            try:
                self._algorithm.train()
            except Exception as error:
                logger.warning(
                    "an update of the policy failed (%s: %s); jobs are answered as before", type(error).__name__, error
                )
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
            f"no default Gaussian policy: it has {sorted(found - wanted)} too many and {sorted(wanted - found)} too few. "
            "Build it with vf_share_layers=False, free_log_std=False and no head_fcnet_hiddens."
        )
    head = "pi.net.mlp.0"
    if arrays[f"{head}.weight"].shape[0] != 2 * NUM_ACTIONS:
        raise RLFreezeError(
            f"the head has {arrays[f'{head}.weight'].shape[0]} outputs: must be {2 * NUM_ACTIONS}, means and log-stds."
        )
    weights = [arrays[f"{layer}.weight"] for layer in hidden] + [arrays[f"{head}.weight"][:NUM_ACTIONS]]
    biases = [arrays[f"{layer}.bias"] for layer in hidden] + [arrays[f"{head}.bias"][:NUM_ACTIONS]]
    return Network(weights, biases, activation)
