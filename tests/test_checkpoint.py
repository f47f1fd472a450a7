"""Save and resume: the uninterrupted run is the reference; stock's checkpoints are ours and the reverse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlfreeze_ds.checkpoint import FILE_NAME
from tests import jobs
from tests.harness import run_ranks
from tests.test_engine import build, slow_weight_gradients

# One plan only, at step 7: later plans depend on timings, which no two runs share.
BLOCK = {
    "enabled": True, "warmup_steps": 3, "profile_steps": 4, "ramp_steps": 3, "replan_interval": 1000,
    "criterion": {"gradient_threshold": 100, "variation_threshold": 100}, "planning": {"background": False},
}  # fmt: skip
MICRO_BATCHES = 4


def train(engine: Any, steps: range) -> tuple[list[torch.Tensor], list[Any]]:
    losses, masks = [], []
    for step in steps:
        slow_weight_gradients(engine, 0.002)
        losses.append(engine.train_batch(jobs.batches(step, MICRO_BATCHES)).clone())
        if hasattr(engine, "freeze_controller"):
            masks.append((engine.freeze_controller.phase, engine._step_masks))
    return losses, masks


def resume_job(folder: str, save_at: int, last: int) -> dict[str, Any]:
    config = jobs.ds_config(MICRO_BATCHES, rlfreeze=BLOCK)
    engine = build(2, config)
    train(engine, range(save_at))
    engine.save_checkpoint(folder)
    uninterrupted = train(engine, range(save_at, last))
    resumed = build(2, config)
    resumed.load_checkpoint(folder)
    after_resume = train(resumed, range(save_at, last))
    return {
        "uninterrupted": uninterrupted, "resumed": after_resume,
        "weights": jobs.weights(engine), "resumed weights": jobs.weights(resumed),
        "froze": sum(len(mask) for _, step in uninterrupted[1] for mask in step.masks),
    }  # fmt: skip


@pytest.mark.parametrize("save_at", [5, 9, 12], ids=["profiling", "ramp", "steady"])
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, save_at: int) -> None:
    # While profiling, the plan is still to come and would differ: stop before it.
    results = run_ranks(resume_job, 2, str(tmp_path), save_at, 7 if save_at == 5 else 16)
    assert sum(result["froze"] for result in results) > 0
    for result in results:
        (losses, masks), (resumed_losses, resumed_masks) = result["uninterrupted"], result["resumed"]
        assert masks == resumed_masks
        assert all(torch.equal(a, b) for a, b in zip(losses, resumed_losses, strict=True))
        assert all(torch.equal(value, result["resumed weights"][name]) for name, value in result["weights"].items())


def misfit_job(folder: str) -> dict[str, Any]:
    config = jobs.ds_config(MICRO_BATCHES, rlfreeze=BLOCK)
    stock, ours = build(2, jobs.ds_config(MICRO_BATCHES)), build(2, config)
    train(stock, range(3))
    train(ours, range(9))
    stock.save_checkpoint(folder, tag="stock")
    for tag in ("ours", "damaged", "newer", "warm start"):
        ours.save_checkpoint(folder, tag=tag)
    if torch.distributed.get_rank() == 0:
        Path(folder, "damaged", FILE_NAME).write_text('{"format": 1, "sta')
        state = json.loads(Path(folder, "newer", FILE_NAME).read_text())
        Path(folder, "newer", FILE_NAME).write_text(json.dumps(state | {"format": 2}))
    torch.distributed.barrier()

    found: dict[str, Any] = {}

    def load(name: str, tag: str, **changes: Any) -> None:
        engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=BLOCK | changes))
        engine.load_checkpoint(folder, tag=tag)
        controller = engine.freeze_controller
        found[name] = (controller.phase, controller.step, controller.decision is not None)
        train(engine, range(controller.step, controller.step + 1))

    load("same", "ours")
    load("another limit", "ours", planning={"max_freeze_ratio": 0.25, "background": False})
    load("other units", "ours", unit="layer")
    for tag in ("stock", "damaged", "newer"):
        load(tag, tag)
    warm = build(2, config)
    warm.load_checkpoint(folder, tag="ours", load_module_only=True)
    found["warm start"] = (warm.freeze_controller.phase, warm.freeze_controller.step, False)
    back = build(2, jobs.ds_config(MICRO_BATCHES))
    back.load_checkpoint(folder, tag="ours")
    found["stock loads ours"] = type(back).__name__
    expected = jobs.weights(ours)
    found["weights"] = all(torch.equal(value, expected[name]) for name, value in jobs.weights(back).items())
    # A disk that refuses our file is a warning: the checkpoint itself is DeepSpeed's business.
    if torch.distributed.get_rank() == 0:
        Path(folder, "refused", FILE_NAME).mkdir(parents=True)
    torch.distributed.barrier()
    ours.save_checkpoint(folder, tag="refused")
    return found


def test_a_state_that_does_not_fit_means_a_fresh_start_on_every_rank(tmp_path: Path) -> None:
    for found in run_ranks(misfit_job, 2, str(tmp_path)):
        assert found["same"] == ("ramp", 9, True)
        assert found["another limit"] == ("ramp", 9, False)
        for name in ("other units", "damaged", "newer"):
            assert found[name] == ("warmup", 9, False), name
        assert found["stock"] == ("warmup", 3, False)
        assert found["warm start"] == ("warmup", 0, False)
        assert found["stock loads ours"] == "PipelineEngine" and found["weights"]
