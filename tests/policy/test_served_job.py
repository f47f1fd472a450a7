"""Training jobs with a policy server: one that learns, one that is not there, and what a job says of a wrong block."""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from rlfreeze_ds.config import parse_block
from rlfreeze_ds.errors import ConfigError
from tests import jobs
from tests.harness import run_ranks
from tests.test_engine import QUICK, build, slow_weight_gradients

PLANNING = QUICK["planning"] | {"drift_tolerance": 1e9}


def engine_with(policy: dict[str, Any]) -> Any:
    block = QUICK | {"policy": policy, "planning": PLANNING, "selection": "strict"}
    engine = build(2, jobs.ds_config(4, rlfreeze=block))
    slow_weight_gradients(engine, 0.002)
    return engine


def learning_job(seconds: float, kept: str) -> dict[str, Any]:
    engine = engine_with({"type": "rllib", "interval": 3, "patience_steps": 5, "train_batch": 8, "checkpoint_dir": kept})
    tuner, group = engine.freeze_controller.thresholds.tuner, engine.freeze_controller.group
    until, losses, thresholds, updates = time.monotonic() + seconds, [], set(), 0
    while not group.broadcast(updates >= 1 and len(thresholds) > 3 or time.monotonic() > until):
        losses.append(float(engine.train_batch(jobs.batches(engine.global_steps, 4))))
        if tuner is not None:
            thresholds.add(tuner.thresholds)
            updates = tuner.policy.updates
    pid = tuner.policy._server.pid if tuner is not None else None
    started = time.monotonic()
    engine.destroy()
    return {"losses": losses, "thresholds": len(thresholds), "updates": updates, "pid": pid, "end_s": time.monotonic() - started}


@pytest.mark.timeout(280)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the server extra is not installed")
def test_a_job_with_a_server_of_its_own_is_learned_from(tmp_path: Path) -> None:
    first, second = run_ranks(learning_job, 2, 150.0, str(tmp_path / "not" / "there"), timeout_s=250)
    assert list((tmp_path / "not" / "there").glob("checkpoint-*"))
    assert first["updates"] >= 1 and first["thresholds"] > 3
    assert first["losses"] == second["losses"] and all(loss == loss for loss in first["losses"])
    assert first["end_s"] < 10
    with pytest.raises(ProcessLookupError):
        import os

        os.kill(first["pid"], 0)


def absent_job(token_file: str) -> dict[str, Any]:
    policy = {"type": "rllib", "server": "http://127.0.0.1:9", "token_file": token_file, "interval": 4, "patience_steps": 2}
    engine = engine_with(policy)
    seconds, thresholds = [], set()
    for step in range(60):
        started = time.perf_counter()
        engine.train_batch(jobs.batches(step, 4))
        seconds.append(time.perf_counter() - started)
        if engine.freeze_controller.thresholds.tuner is not None:
            thresholds.add(engine.freeze_controller.thresholds.tuner.thresholds)
    engine.destroy()
    return {"seconds": seconds, "thresholds": thresholds, "decision": engine.freeze_controller.decision}


def test_a_job_whose_server_is_absent_trains_on_with_its_thresholds(tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    first, second = run_ranks(absent_job, 2, str(token))
    assert len(first["thresholds"]) == 1 and first["decision"] == second["decision"] is not None
    assert max(first["seconds"][10:]) < statistics.median(first["seconds"]) + 0.5


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"type": "rllib", "server": "http://h:1"}, "policy: server other than"),
        ({"type": "learned"}, "policy.type = 'learned'"),
        ({"type": "random", "interval": 0}, "policy.interval = 0"),
        ({"servr": "auto"}, 'did you mean "server"'),
    ],
)
def test_a_wrong_policy_block_says_what_is_wrong(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_block({"rlfreeze": {"enabled": True, "policy": policy}})


def unreadable_job(policy: dict[str, Any]) -> str:
    try:
        engine_with(policy)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"type": "pretrained", "file": "/nowhere/policy.json"}, "cannot read the policy file"),
        ({"type": "rllib", "server": "http://127.0.0.1:9", "token_file": "/nowhere/token"}, "token_file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_error_on_every_rank(policy: dict[str, Any], message: str) -> None:
    errors = run_ranks(unreadable_job, 2, policy)
    assert errors[0] == errors[1] and message in errors[0]
