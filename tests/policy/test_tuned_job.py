"""A training job whose thresholds move: all ranks act on them, in the same step, and a resumed run goes on alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlfreeze_ds import thresholds
from rlfreeze_ds.policy.policies import RandomPolicy
from tests import jobs
from tests.harness import run_ranks
from tests.test_engine import QUICK, build, slow_weight_gradients

INTERVAL = 5


def job(folder: str, steps: int, resume: str | None = None, save_at: int | None = None) -> dict[str, Any]:
    import os

    os.environ["RLFREEZE_RUN_DIR"] = folder
    policy = {"type": "random", "interval": INTERVAL}
    planning = QUICK["planning"] | {"background": False, "drift_tolerance": 1e9}
    block = QUICK | {"policy": policy, "planning": planning, "selection": "strict", "profile_steps": 4}
    engine = build(2, jobs.ds_config(8, rlfreeze=block))
    slow_weight_gradients(engine, 0.002)
    if resume:
        engine.load_checkpoint(resume)
    thresholds = []
    for step in range(engine.global_steps, steps):
        engine.train_batch(jobs.batches(step, 8))
        if save_at == step + 1:
            engine.save_checkpoint(str(Path(folder) / "saved"))
        controller = engine.freeze_controller
        thresholds.append(controller.thresholds.tuner.thresholds if controller.thresholds.tuner is not None else None)
    return {"thresholds": thresholds, "decision": engine.freeze_controller.decision, "masks": engine._step_masks.masks}


class Constant(RandomPolicy):
    """The same action for ever."""

    def __init__(self, action: float) -> None:
        super().__init__(0)
        self.action = action

    def take(self) -> np.ndarray:
        return np.full(2, self.action)


def constant_job(action: float) -> list[int]:
    thresholds.make_policy = lambda config, seed: Constant(action)
    policy = {"type": "random", "interval": 2}
    engine = build(2, jobs.ds_config(8, rlfreeze=QUICK | {"policy": policy, "selection": "strict"}))
    for step in range(50):
        engine.train_batch(jobs.batches(step, 8))
    engine.destroy()
    return [sum(row) for row in engine.freeze_controller.decision.eligible]


def test_what_may_freeze_is_what_the_thresholds_say() -> None:
    assert run_ranks(constant_job, 2, -1.0)[1] == [0, 0]
    assert min(run_ranks(constant_job, 2, 1.0)[1]) > 0


def pretrained_job() -> list[Any]:
    engine = build(2, jobs.ds_config(8, rlfreeze=QUICK | {"policy": {"type": "pretrained", "interval": INTERVAL}}))
    found = []
    for step in range(25):
        engine.train_batch(jobs.batches(step, 8))
        tuner = engine.freeze_controller.thresholds.tuner
        found.append(tuner.thresholds if tuner is not None else None)
    engine.destroy()
    return found


def test_the_policy_that_comes_with_the_package_moves_thresholds() -> None:
    first, second = run_ranks(pretrained_job, 2)
    assert len(set(first)) > 2 and set(second) == {None}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "rlfreeze.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("tuned")
    return folder, run_ranks(job, 2, str(folder), 40, None, 25)


def test_thresholds_move_and_every_rank_acts_on_what_they_let_freeze(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, second) = whole
    moved = [t for t in dict.fromkeys(first["thresholds"])]
    assert len(moved) >= 4 and set(second["thresholds"]) == {None}  # only rank 0 has a policy
    assert first["decision"] == second["decision"]
    trace = events(folder, "policy")
    assert [event["window"] for event in trace] == list(range(len(trace)))
    assert [event["step"] for event in trace] == [trace[0]["step"] + INTERVAL * n for n in range(len(trace))]
    assert all(len(event["action"]) == 2 and -2 <= event["reward"] <= 9 for event in trace)
    # Each decision is followed by a plan in its own step, and what may freeze is what the thresholds say.
    plans = {event["used_from_step"] for event in events(folder, "plan")}
    assert {event["step"] for event in trace} <= plans


def test_a_resumed_job_has_the_same_thresholds(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, (first, _) = whole
    resumed = run_ranks(job, 2, str(tmp_path), 40, str(folder / "saved"))[0]
    assert resumed["thresholds"] == first["thresholds"][25:]
