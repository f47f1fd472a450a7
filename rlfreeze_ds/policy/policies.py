"""Who answers a window with an action, seen from a training job: at once, or later from a server. Neither ray nor torch."""

from __future__ import annotations

import atexit
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from rlfreeze_ds.config import PolicyConfig
from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.log import logger
from rlfreeze_ds.policy.auto_server import AutoServer
from rlfreeze_ds.policy.client import PolicyClient
from rlfreeze_ds.policy.connection import read_token
from rlfreeze_ds.policy.network import PRETRAINED, Network
from rlfreeze_ds.policy.observation import NUM_ACTIONS


class Policy(Protocol):
    """Lives on rank 0. None of its methods may take longer than a millisecond, :meth:`close` excepted, or raise.

    ``updates``: how often it had learned when it gave the last action; 0 for one that does not learn.
    ``run_id``: of its episode at a server, which a resumed run goes on with; None where there is no server.
    """

    updates: int
    run_id: str | None

    def offer(self, window: int, observation: np.ndarray, reward: float | None) -> None:
        """Take window number ``window``: float32 [SIZE], and the reward of the answer before (None: there was none)."""

    def take(self) -> np.ndarray | None:
        """The action for the last window, [NUM_ACTIONS] in [-1, 1], once; None while there is none."""

    def close(self) -> None:
        """The job ends."""


def make_policy(config: PolicyConfig, seed: int) -> Policy:
    """The one that ``config.type`` names, which is not "fixed".

    Raises:
        RLFreezeError: its file or token cannot be used. That a server cannot be started or reached is none: it may come later.
    """
    if config.type == "random":
        return RandomPolicy(seed)
    if config.type == "pretrained":
        return PretrainedPolicy(Network.load(config.file or PRETRAINED))
    run_id = config.run_id or f"run-{uuid.uuid4().hex}"
    if config.server != "auto":
        token = read_token(config.token_file)
        return ServedPolicy(PolicyClient(config.server, token, run_id, deadline_s=config.deadline_s), None)
    if config.file is not None:
        Network.load(config.file)  # a wrong one is said at once, and not by a server that ends later
    keep = []
    if config.checkpoint_dir:
        with suppress(OSError):  # which the server explains
            Path(config.checkpoint_dir).mkdir(mode=0o700, parents=True, exist_ok=True)  # --restore wants one, be it empty
        keep = ["--checkpoint-dir", config.checkpoint_dir, "--restore"]
    start = ["--policy-file", str(config.file or PRETRAINED)]
    server = AutoServer([*keep, *start, "--train-batch", str(config.train_batch), "--seed", str(seed)])
    try:
        server.start()
    except RLFreezeError as error:
        logger.warning("%s The thresholds stay as they are.", error)
    return ServedPolicy(PolicyClient(server.url, server.token, run_id, deadline_s=config.deadline_s), server)


class _AtOnce:
    """One whose action for a window is there as soon as the window is."""

    updates = 0
    run_id = None

    def __init__(self) -> None:
        self._action: np.ndarray | None = None

    def act(self, window: int, observation: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def offer(self, window: int, observation: np.ndarray, reward: float | None) -> None:
        self._action = self.act(window, observation)

    def take(self) -> np.ndarray | None:
        action, self._action = self._action, None
        return action

    def close(self) -> None:
        pass


class RandomPolicy(_AtOnce):
    """Uniform actions, the same for the same seed and window: the baseline that any policy has to beat."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def act(self, window: int, observation: np.ndarray) -> np.ndarray:
        return np.random.default_rng([self.seed, window]).uniform(-1.0, 1.0, NUM_ACTIONS)


class PretrainedPolicy(_AtOnce):
    """A trained network's mean action."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def act(self, window: int, observation: np.ndarray) -> np.ndarray:
        return self.network.act(observation)


class ServedPolicy:
    """Asks a policy server, which also learns from it; ``server`` is this job's own, if it has one."""

    def __init__(self, client: PolicyClient, server: AutoServer | None) -> None:
        self.client = client
        self.updates = 0
        self._server = server
        atexit.register(self.close)  # few scripts end their engine

    @property
    def run_id(self) -> str:
        return self.client.run_id

    @run_id.setter
    def run_id(self, run_id: str) -> None:
        self.client.run_id = run_id

    def offer(self, window: int, observation: np.ndarray, reward: float | None) -> None:
        self.client.offer(window, observation, reward)

    def take(self) -> np.ndarray | None:
        answer = self.client.take()
        if answer is None:
            return None
        self.updates = answer.updates
        return np.array(answer.action)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.client.close()
        if self._server is not None:
            self._server.close()
