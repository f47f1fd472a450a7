"""V-trace as APPO's learner computes it on what jobs report, against its definition written out."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ray.rllib", reason="needs the server extra: ray[rllib]")

from ray.rllib.algorithms.appo.torch import appo_torch_learner  # noqa: E402

from rlfreeze_ds.policy.fragment import Fragment  # noqa: E402
from rlfreeze_ds.policy.job_runner import ACTION_SPACE, OBSERVATION_SPACE, _episode  # noqa: E402
from rlfreeze_ds.policy.learner import algorithm_config  # noqa: E402
from rlfreeze_ds.policy.learner_settings import LearnerSettings  # noqa: E402
from rlfreeze_ds.policy.observation import HIGH, LOW, NUM_ACTIONS, SIZE  # noqa: E402

LENGTHS = (7, 1, 60, 12)
TERMINATED = (False, True, False, True)
GAMMA = 0.95


def _fragments() -> list[Fragment]:
    draw = np.random.default_rng(0)
    return [
        Fragment(
            run_id=f"job-{i}", session_id=str(i), first_window=0,
            observations=draw.uniform(LOW, HIGH, (num + 1, SIZE)).astype(np.float32),
            actions=draw.normal(0, 1, (num, NUM_ACTIONS)).astype(np.float32),
            rewards=draw.normal(1, 1, num).astype(np.float32),
            extras={
                "action_logp": draw.normal(-2.5, 0.5, num).astype(np.float32),
                "action_dist_inputs": np.zeros((num, 2 * NUM_ACTIONS), dtype=np.float32),
            },
            updates=np.zeros(num, dtype=np.int64), terminated=terminated, truncated=False,
        )
        for i, (num, terminated) in enumerate(zip(LENGTHS, TERMINATED, strict=True))
    ]  # fmt: skip


def _value_targets(
    rewards: np.ndarray, values: np.ndarray, weights: np.ndarray, terminated: bool, rows: np.ndarray
) -> np.ndarray:
    """Espeholt et al. 2018, equation 1, with the values of the one observation more at the end; no further than a row of time."""
    num = len(rewards)
    following = np.append(values[1:num], 0.0 if terminated else values[num])
    temporal = np.minimum(weights, 1) * (rewards + GAMMA * following - values[:num])
    targets = np.empty(num)
    for start in range(num):
        last = max(i for i in range(start, num) if rows[i] == rows[start])
        discounts = np.cumprod([1.0, *(GAMMA * np.minimum(weights[start:last], 1))])
        targets[start] = values[start] + (discounts * temporal[start : last + 1]).sum()
    return targets


def test_trajectories_that_go_on_end_with_the_value_of_what_they_saw_last(monkeypatch: pytest.MonkeyPatch) -> None:
    config = algorithm_config(LearnerSettings(algorithm="APPO", train_batch=64, seed=1))
    learner = config.build_learner(spaces={"__all__": (OBSERVATION_SPACE, ACTION_SPACE)})
    seen: list[tuple[dict[str, np.ndarray], np.ndarray]] = []
    vtrace = appo_torch_learner.vtrace_torch

    def look(**tensors: object) -> object:
        found = vtrace(**tensors)
        flat = {name: one.T.reshape(-1).detach().numpy() for name, one in tensors.items() if getattr(one, "ndim", 0) == 2}
        seen.append((flat, found[0].T.reshape(-1).numpy()))
        return found

    monkeypatch.setattr(appo_torch_learner, "vtrace_torch", look)
    fragments = _fragments()
    learner.update(episodes=[_episode(one) for one in fragments], timesteps={}, num_epochs=2)
    learner.shutdown()
    assert len(seen) == 2  # two passes, each over the whole
    for flat, targets in seen:
        start = 0
        for fragment in fragments:
            num = len(fragment)
            here = slice(start, start + num)
            np.testing.assert_array_equal(flat["rewards"][here], fragment.rewards)
            weights = np.exp(flat["target_action_log_probs"][here] - fragment.extras["action_logp"])
            rows = np.arange(start, start + num) // config.get_rollout_fragment_length()
            expected = _value_targets(
                fragment.rewards, flat["values"][start : start + num + 1], weights, fragment.terminated, rows
            )
            np.testing.assert_allclose(targets[here], expected, rtol=1e-4, atol=1e-4)
            start += num + 1
