"""What users of such tools run into, on a job that walks through every phase."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from rlfreeze_ds.history import FIT_STEPS
from tests import jobs
from tests.harness import run_ranks
from tests.test_engine import LAYERS, QUICK, build, slow_weight_gradients
from tests.test_planner import NO_SOLVER, worker

MICRO_BATCHES = 4


def user_frozen_job() -> dict[str, Any]:
    import rlfreeze_ds

    module = jobs.pipeline(2, LAYERS)
    # As a LoRA job does: everything of the stage's first layer, and one bias, is not to be trained.
    names = [name for name, _ in module.named_parameters()]
    frozen = {names[0], names[1], names[3]}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine = rlfreeze_ds.initialize(
        model=module, model_parameters=trainable, config=jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK)
    )[0]
    before = jobs.weights(engine)
    for step in range(18):
        for parameter in trainable:
            if not hasattr(parameter, "slowed"):
                parameter.slowed = parameter.register_hook(lambda grad: time.sleep(0.002))
        engine.train_batch(jobs.batches(step, MICRO_BATCHES))
    after = jobs.weights(engine)
    return {
        "frozen": frozen,
        "moved": {name for name in names if not torch.equal(before[name], after[name])},
        "needs gradient": {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad},
        "units": {unit.name for unit in engine.freeze_controller.units},
        "planned": engine.freeze_controller.decision.mean_freeze_ratio,
    }


def test_what_the_user_froze_is_never_thawed_nor_counted() -> None:
    for result in run_ranks(user_frozen_job, 2):
        assert result["planned"] > 0
        for what in ("moved", "needs gradient", "units"):
            assert result[what] and not result[what] & result["frozen"], what
        assert result["moved"] == result["units"]


def nothing_trainable_job(stage: int) -> dict[str, Any]:
    import rlfreeze_ds
    from rlfreeze_ds.errors import RLFreezeError

    def module() -> Any:
        module = jobs.pipeline(2, LAYERS)
        module.requires_grad_(module.stage_id != stage)
        return module

    config = jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK)
    listed = module()
    try:
        rlfreeze_ds.initialize(
            model=listed, model_parameters=[p for p in listed.parameters() if p.requires_grad], config=config
        )
        message = "no error"
    except RLFreezeError as error:
        message = str(error)
    engine = rlfreeze_ds.initialize(model=module(), config=config)[0]
    before = jobs.weights(engine)
    for step in range(14):
        engine.train_batch(jobs.batches(step, MICRO_BATCHES))
    after = jobs.weights(engine)
    moved = [not torch.equal(before[name], after[name]) for name in before]
    return {"message": message, "moved": moved, "frozen": engine.module.stage_id == stage}


@pytest.mark.parametrize("stage", [0, 1], ids=["first", "last"])
def test_a_stage_with_nothing_to_train(stage: int) -> None:
    """It trains where an optimizer can be made; else one error names the stage on every rank."""
    for result in run_ranks(nothing_trainable_job, 2, stage):
        assert f"stage {stage}" in result["message"] and "requires_grad" in result["message"]
        assert not any(result["moved"]) if result["frozen"] else all(result["moved"])


def soak_job() -> dict[str, Any]:
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK | {"replan_interval": 25, "planning": {}}))

    def count() -> dict[str, int]:
        parameters, state = list(engine.module.parameters()), engine.freeze_controller.state_dict()
        return {
            "hooks": sum(len(p._backward_hooks or ()) for p in parameters)
            + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules()),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "recent steps": len(state.pop("recent")),  # a window, emptied when batches drift from the plan
            "state": len(str(state)),
            "in flight": len(engine.freeze_controller._in_flight),
        }

    counts, evaluations_left_no_trace = {}, []
    for step in range(500):
        if step < 40:
            slow_weight_gradients(engine, 0.001)
        engine.train_batch(jobs.batches(step, MICRO_BATCHES))
        if step % 50 == 0:
            controller = engine.freeze_controller
            before = (controller.step, controller.phase, controller.phase_step, controller.begin_step(MICRO_BATCHES))
            engine.eval_batch(jobs.batches(10_000, MICRO_BATCHES))
            after = (controller.step, controller.phase, controller.phase_step, controller.begin_step(MICRO_BATCHES))
            evaluations_left_no_trace.append(before == after)
        if step + 1 in (100, 500):
            counts[step + 1] = count()
    return {"counts": counts, "evaluations": evaluations_left_no_trace, "decided": engine.freeze_controller.decision.step}


def test_five_hundred_steps_grow_nothing_and_evaluations_leave_no_trace() -> None:
    for result in run_ranks(soak_job, 2):
        early, late = result["counts"][100], result["counts"][500]
        assert max(early.pop("recent steps"), late.pop("recent steps")) <= FIT_STEPS
        assert late.pop("state") < 1.2 * early.pop("state")  # numbers of other lengths, and a plan or none
        assert early == late
        assert all(result["evaluations"])
        assert result["decided"] > 450


def no_solver_job(failure: str) -> dict[str, Any]:
    from rlfreeze_ds import plan_process

    bug = "worker.answer = lambda request: {}['a bug']"
    plan_process.worker_command = worker(NO_SOLVER if failure == "no solver" else bug)
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK))
    live = []
    for step in range(14):
        slow_weight_gradients(engine, 0.001)
        engine.train_batch(jobs.batches(step, MICRO_BATCHES))
        live.append(not any(engine._step_masks.masks))
    return {"live": live, "phase": engine.freeze_controller.phase, "decision": engine.freeze_controller.decision}


@pytest.mark.parametrize("failure", ["no solver", "a bug of the planner"])
def test_without_a_plan_the_job_trains_on_unfrozen(failure: str) -> None:
    for result in run_ranks(no_solver_job, 2, failure):
        assert all(result["live"][7:]) and result["decision"] is None and result["phase"] == "steady"


def batch_size_job() -> list[tuple[int, int, int, float]]:
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK | {"replan_interval": 1000}))
    seen = []
    for step in range(24):
        slow_weight_gradients(engine, 0.002)
        if step == 12:
            engine.set_train_batch_size(2 * 8)
        engine.train_batch(jobs.batches(step, engine.micro_batches))
        decision = engine.freeze_controller.decision
        planned = decision.num_micro_batches if decision else 0
        seen.append((engine.micro_batches, len(engine._step_masks.masks), planned, sum(map(len, engine._step_masks.masks))))
    return seen


def test_a_changed_batch_size_is_planned_anew() -> None:
    for seen in run_ranks(batch_size_job, 2):
        assert all(micro_batches == masks for micro_batches, masks, _, _ in seen)
        assert seen[11][:3] == (4, 4, 4) and seen[12] == (8, 8, 8, 0)  # one step unfrozen, then the new plan
        assert seen[-1][2] == 8 and seen[-1][3] > 0


def killed_job() -> None:
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK))
    for step in range(20):
        if step == 9 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch(jobs.batches(step, MICRO_BATCHES))


def test_a_killed_rank_ends_the_others_with_an_error() -> None:
    with pytest.raises(AssertionError, match="rank 0 failed first|exit codes .*-9"):
        run_ranks(killed_job, 2, timeout_s=60)


def loss_jump_job() -> dict[str, Any]:
    guard = {"tolerance": 0.5, "patience": 2, "cooldown_steps": 4}
    engine = build(2, jobs.ds_config(MICRO_BATCHES, rlfreeze=QUICK | {"guard": guard}))
    phases, frozen = [], []
    for step in range(30):
        slow_weight_gradients(engine, 0.001)
        phases.append(engine.freeze_controller.phase)
        scale = 50.0 if 16 <= step < 20 else 1.0
        engine.train_batch(iter([(x, scale * y) for x, y in jobs.batches(step, MICRO_BATCHES)]))
        frozen.append(any(engine._step_masks.masks))
    return {"phases": phases, "frozen": frozen}


def test_a_loss_that_leaves_its_trend_thaws_every_rank_for_a_while() -> None:
    results = run_ranks(loss_jump_job, 2)
    assert results[0]["phases"] == results[1]["phases"]
    phases = results[0]["phases"]
    # Jumps at 16 and 17 are two in a row; the guard knows a loss one step late, so the step after 18 is the first in peace.
    assert phases[18] == "steady" and phases[19:23] == ["cooldown"] * 4 and phases[23] == "ramp"
    assert phases[-1] == "steady"
    for result in results:
        assert not any(result["frozen"][19:23])
    assert any(any(result["frozen"][10:19]) for result in results) and any(any(r["frozen"][24:]) for r in results)
