"""The RLlib side without HTTP: what it answers, learns, keeps and exports."""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.rllib", reason="needs the server extra: ray[rllib]")

import tree  # noqa: E402
from ray._private.authentication_test_utils import reset_auth_token_state  # noqa: E402

from rlfreeze_ds.errors import RLFreezeError  # noqa: E402
from rlfreeze_ds.log import logger  # noqa: E402
from rlfreeze_ds.policy import learner as learner_module  # noqa: E402
from rlfreeze_ds.policy import local_ray  # noqa: E402
from rlfreeze_ds.policy.checkpoint_folder import CheckpointFolder  # noqa: E402
from rlfreeze_ds.policy.learner import Learner, network_of  # noqa: E402
from rlfreeze_ds.policy.learner_settings import ALGORITHMS, LearnerSettings  # noqa: E402
from rlfreeze_ds.policy.messages import Close, Open, Window  # noqa: E402
from rlfreeze_ds.policy.network import PRETRAINED, Network  # noqa: E402
from rlfreeze_ds.policy.observation import HIGH, LOW, NUM_ACTIONS, SIZE  # noqa: E402
from rlfreeze_ds.policy.session import Sessions  # noqa: E402

SETTINGS = LearnerSettings(train_batch=32, seed=3)
OBSERVATIONS = np.random.default_rng(0).uniform(LOW, HIGH, (500, SIZE)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="rlf-"))  # short: sockets lie in it
    local_ray.prepare(folder)
    reset_auth_token_state()  # Ray was imported above, and looked when there was no token yet
    local_ray.start(folder, num_cpus=2)
    yield
    local_ray.stop()
    shutil.rmtree(folder)


class _Jobs:
    """Jobs in one thread: a window each in turn, rewarded for raising the first threshold."""

    def __init__(self, learner: Learner, num_jobs: int = 4, num_windows: int = 11) -> None:
        self.book, self.learner = Sessions(), learner
        self.num_posted, self.last_rewards = 0, []
        self._num_jobs, self._num_windows = num_jobs, num_windows
        learner.start(self.book.drain)

    def round(self) -> None:
        """One whole episode of every job."""
        ids = [self.book.open(Open(run_id=f"job-{i}")).session_id for i in range(self._num_jobs)]
        rewards: dict[str, float | None] = dict.fromkeys(ids)
        for window in range(self._num_windows):
            for one in ids:
                observation = [0.5 * value for value in HIGH.tolist()]
                answer = self.book.act(one, Window(window=window, observation=observation, reward=rewards[one]), self.learner.act)
                rewards[one] = answer.action[0]
        for one in ids:
            self.book.close(one, Close(window=self._num_windows, observation=HIGH.tolist(), reward=rewards[one]))
        self.last_rewards = [*rewards.values()]
        self.num_posted += self._num_jobs * self._num_windows

    def until(self, updates: int) -> None:
        end = time.monotonic() + 30
        while self.learner.updates < updates:
            if time.monotonic() > end:
                self.end()
                pytest.fail(f"{self.learner.updates} updates after 30 s")
            self.round()

    def end(self) -> None:
        self.book.stop()
        self.learner.stop()


def _actions(learner: Learner, num: int = 20) -> np.ndarray:
    return np.stack([learner.act(one, explore=False).actions_for_env for one in OBSERVATIONS[:num]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_learns_once_from_every_transition_and_goes_on_after_a_restart(algorithm: str, tmp_path: Path) -> None:
    learner = Learner(LearnerSettings(algorithm, train_batch=32, seed=3), CheckpointFolder(tmp_path / "kept"))
    before = _actions(learner)
    jobs = _Jobs(learner)
    jobs.until(updates=3)
    jobs.end()
    rest = learner._runner.num_waiting + sum(len(fragment) for fragment in jobs.book.drain(1))
    assert learner.transitions + rest == jobs.num_posted
    after = _actions(learner)
    assert not np.array_equal(before, after) and np.isfinite(after).all()
    learner.close()

    again = Learner(LearnerSettings(algorithm, train_batch=64, seed=4), CheckpointFolder(tmp_path / "kept"))
    assert not np.array_equal(_actions(again), after)
    again.restore()
    assert np.array_equal(_actions(again), after)
    assert again.updates == learner.updates >= 3
    jobs = _Jobs(again)
    jobs.until(updates=again.updates + 1)
    jobs.end()
    again.close()
    assert len(CheckpointFolder(tmp_path / "kept").all()) == 2


def test_a_full_disk_is_one_line_and_learning_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(learner_module, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(CheckpointFolder, "save", full)
    learner = Learner(SETTINGS, CheckpointFolder(tmp_path))
    jobs = _Jobs(learner)
    jobs.until(updates=3)
    jobs.end()
    learner.close()
    assert len(lines) == 1 and "No space left" in lines[0]


def test_a_failing_update_stops_neither_answers_nor_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(SETTINGS)
    monkeypatch.setattr(learner_module, "RETRY_S", 0.05)
    update, num = learner._algorithm.learner_group.update, [0]

    def fails_once(*arguments: object, **named: object) -> object:
        num[0] += 1
        if num[0] == 1:
            raise RuntimeError("a learner died")
        return update(*arguments, **named)

    monkeypatch.setattr(learner._algorithm.learner_group, "update", fails_once)
    jobs = _Jobs(learner)
    jobs.until(updates=1)
    jobs.end()
    learner.close()
    assert num[0] >= 2


def test_numpy_acts_as_rllib_does(tmp_path: Path) -> None:
    learner = Learner(SETTINGS)
    learner.export(tmp_path / "policy.json", "a test")
    network = Network.load(tmp_path / "policy.json")
    theirs = _actions(learner, len(OBSERVATIONS))
    ours = np.stack([network.act(one) for one in OBSERVATIONS])
    assert np.abs(ours - theirs).max() < 1e-6
    assert np.abs(theirs).max() > 0.1

    module = learner._algorithm.env_runner.module
    state = {**module.get_state()}
    with pytest.raises(RLFreezeError, match="log_std"):
        network_of({**state, "pi.log_std": np.zeros(NUM_ACTIONS)}, "tanh")
    state.pop("pi.net.mlp.0.bias")
    with pytest.raises(RLFreezeError, match="pi.net.mlp.0.bias"):
        network_of(state, "tanh")
    learner.stop()
    learner.close()


def test_what_jobs_are_told_is_in_bounds_and_what_is_learned_is_as_drawn() -> None:
    learner = Learner(SETTINGS)
    decisions = [learner.act(OBSERVATIONS[0]) for _ in range(200)]
    drawn, told = (np.stack([getattr(one, name) for one in decisions]) for name in ("actions", "actions_for_env"))
    assert np.abs(told).max() == 1.0 < np.abs(drawn).max()
    np.testing.assert_allclose(told, np.clip(drawn, -1, 1), atol=1e-6)
    inputs = decisions[0].extras["action_dist_inputs"]
    mean, log_std = inputs[:NUM_ACTIONS], inputs[NUM_ACTIONS:]
    for one in decisions[:20]:
        deviation = (one.actions - mean) / np.exp(log_std)
        expected = (-0.5 * deviation**2 - log_std - 0.5 * np.log(2 * np.pi)).sum()
        assert one.extras["action_logp"] == pytest.approx(expected, abs=1e-4)
    learner.stop()
    learner.close()


@pytest.mark.parametrize(("algorithm", "rise"), [("PPO", 0.3), ("APPO", 0.3), ("SAC", 0.15)])
def test_it_learns_what_jobs_are_rewarded_for(algorithm: str, rise: float) -> None:
    """Its mean first action, which is the reward, rises. SAC's less: what it is paid for staying random holds it back. No further
    than is certain: how much a busy machine's jobs bring to one update, and so how many it takes, differs."""
    learner = Learner(LearnerSettings(algorithm, train_batch=32, seed=3))
    observation = (0.5 * HIGH).astype(np.float32)

    def mean() -> float:
        return float(learner.act(observation, explore=False).actions_for_env[0])

    first = mean()
    goal, jobs, end = min(first + rise, 1.0), _Jobs(learner), time.monotonic() + 90
    while (learned := mean()) < goal and time.monotonic() < end:
        jobs.round()
    jobs.end()
    learner.close()
    assert learned >= goal, f"{first} became {learned} in {learner.updates} updates"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_may_be_computed_in_another_process_and_go_on_without_it(algorithm: str, tmp_path: Path) -> None:
    learner = Learner(LearnerSettings(algorithm, train_batch=32, seed=3, num_learners=1), CheckpointFolder(tmp_path))
    before = _actions(learner)
    jobs = _Jobs(learner)
    jobs.until(updates=1)
    jobs.end()
    after = _actions(learner)
    assert not np.array_equal(before, after)
    optimizers = _optimizers(learner)
    learner.close()
    alone = Learner(LearnerSettings(algorithm, train_batch=32, seed=4), CheckpointFolder(tmp_path))  # with a CPU less
    alone.restore()
    assert np.array_equal(_actions(alone), after) and alone.updates == learner.updates
    assert len(optimizers) > 10 and _optimizers(alone) == optimizers
    jobs = _Jobs(alone)
    jobs.until(updates=alone.updates + 1)
    jobs.end()
    assert not np.array_equal(_actions(alone), after)
    alone.close()


def _optimizers(learner: Learner) -> list[bytes]:
    """Their moments and settings, bit for bit."""
    state = learner._algorithm.learner_group.get_state()["learner"]["optimizer"]
    return [np.asarray(one).tobytes() for one in tree.flatten(state) if one is not None]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RLFreezeError, match="--algorithm DQN: must be one of PPO, SAC, APPO"):
        LearnerSettings(algorithm="DQN")
    with pytest.raises(RLFreezeError, match="--train-batch 1: must be at least 8"):
        LearnerSettings(train_batch=1)


@pytest.mark.parametrize("algorithm", ["PPO", "APPO"])
def test_it_begins_as_the_policy_of_a_file_and_goes_on_from_there(algorithm: str) -> None:
    network = Network.load(PRETRAINED)
    learner = Learner(LearnerSettings(algorithm, train_batch=32, seed=3, policy_file=PRETRAINED))
    wanted = np.array([network.act(observation) for observation in OBSERVATIONS])

    def means() -> np.ndarray:
        return np.array([learner.act(observation, explore=False).actions_for_env for observation in OBSERVATIONS])

    assert learner.updates == 0 and means() == pytest.approx(wanted, abs=1e-5)
    inside = next(observation for observation, action in zip(OBSERVATIONS, wanted, strict=True) if abs(action).max() < 0.5)
    drawn = np.array([learner.act(inside).actions for _ in range(500)])
    assert drawn.std(axis=0) == pytest.approx(np.full(2, np.exp(learner_module.START_LOG_STD)), rel=0.15)
    jobs = _Jobs(learner)
    jobs.until(updates=1)
    jobs.end()
    # The learner had begun there too: one update moves it a little. Another start would be far away.
    moved = np.abs(means() - wanted)
    learner.close()
    assert 0 < moved.mean() < 0.2 * np.abs(wanted).mean()


def test_a_policy_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    small = Network([np.zeros((4, SIZE)), np.zeros((NUM_ACTIONS, 4))], [np.zeros(4), np.zeros(NUM_ACTIONS)], "tanh")
    small.save(tmp_path / "small.json")
    with pytest.raises(RLFreezeError, match=r"hidden layers \(4,\)"):
        Learner(LearnerSettings(policy_file=tmp_path / "small.json"))
    with pytest.raises(RLFreezeError, match="SAC"):
        LearnerSettings("SAC", policy_file=PRETRAINED)
