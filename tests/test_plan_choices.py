"""What a job may ask of its plan: another objective, a target, a plan of its own; and a prediction that does not come true."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.decision import Decision, StageFacts, batch_seconds, decide
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fit import StageFit
from rlfreeze_ds.planning.progress import StageProgress, kept_progress
from rlfreeze_ds.planning.solver import Limits, solve
from tests import jobs
from tests.harness import run_ranks
from tests.test_engine import QUICK, build, slow_weight_gradients

MICRO_BATCHES = 8
UNITS = 64
DAG = PipelineDag(one_f_one_b(2, MICRO_BATCHES))


def stages(noise_scale: float | None, eligible: int = UNITS, weight_gradient_s: float = 1.0) -> list[StageFacts]:
    """Two alike, of many units, so that rounding to units hardly counts."""
    names = tuple(f"unit{u}" for u in range(UNITS))
    shapes = [StageShape(s, names, (1 / UNITS,) * UNITS, tuple(range(UNITS)), 0) for s in range(2)]
    allowed = tuple(u < eligible for u in range(UNITS))
    share = eligible / UNITS
    progress = StageProgress(((0.5 * share, noise_scale),), MICRO_BATCHES, share, 0.5 * (1 - share))
    return [StageFacts(shape, StageFit(1.0, 2.0, weight_gradient_s), allowed, progress) for shape in shapes]


def decided(facts: list[StageFacts], plan_ratios: Any = None, **planning: Any) -> Decision:
    config = FreezeConfig.model_validate({"enabled": True, "planning": planning})
    return decide(0, config, DAG, facts, 0.0, plan_ratios)


def test_the_objective_progress_expects_what_its_formula_says() -> None:
    decision = decided(stages(1.0), objective="progress", max_freeze_ratio=0.8)
    assert 0.1 < decision.mean_freeze_ratio < 0.8
    means = [sum(row) / MICRO_BATCHES for row in decision.ratios]
    kept = sum(0.5 * kept_progress(1 - mean, MICRO_BATCHES, 1.0) for mean in means)
    assert decision.expected_kept_progress == pytest.approx(kept, abs=0.01)
    gain = kept * decision.unfrozen_makespan_s / decision.predicted_makespan_s
    assert decision.expected_loss_per_second_gain == pytest.approx(gain, abs=0.02)
    # The shortest batch is shorter, and expected to learn less a second.
    shortest = decided(stages(1.0), objective="makespan", max_freeze_ratio=0.8, time_slack=0.0)
    assert shortest.predicted_makespan_s < decision.predicted_makespan_s
    assert shortest.expected_loss_per_second_gain < decision.expected_loss_per_second_gain


def test_the_objective_progress_freezes_nothing_where_nothing_pays() -> None:
    decision = decided(stages(None, weight_gradient_s=0.2), objective="progress")
    assert {ratio for row in decision.ratios for ratio in row} == {0.0}
    assert decision.verdict.startswith("not worth freezing") and decision.expected_loss_per_second_gain == 1.0


def test_units_that_may_not_freeze_keep_their_progress() -> None:
    few, many = (decided(stages(5.0, eligible), max_freeze_ratio=0.5, time_slack=0.0) for eligible in (16, UNITS))
    assert few.expected_kept_progress > many.expected_kept_progress
    frozen = {u for step in range(20) for mask in few.masks(FreezeConfig(enabled=True), stages(5.0)[1].shape, step) for u in mask}
    assert frozen and max(frozen) < 16


def test_a_target_is_met_and_one_out_of_reach_says_so_and_gets_the_shortest_batch(caplog: pytest.LogCaptureFixture) -> None:
    decision = decided(stages(1.0), target_speedup=1.15)
    assert decision.unfrozen_makespan_s / decision.predicted_makespan_s == pytest.approx(1.15, abs=0.01)
    logging.getLogger("rlfreeze_ds").addHandler(caplog.handler)
    try:
        hopeless = decided(stages(1.0), target_speedup=3.0)
    finally:
        logging.getLogger("rlfreeze_ds").removeHandler(caplog.handler)
    assert "target_speedup = 3: at most 1." in caplog.text and "shortest batch is planned instead" in caplog.text
    assert hopeless.ratios == decided(stages(1.0), time_slack=0.0).ratios


def test_the_slack_is_over_the_shortest_batch_that_real_masks_reach() -> None:
    """Of four large units no mask has quite the planned ratio: that makes the shortest batch longer as well as this one."""
    coarse = [
        replace(facts, shape=replace(facts.shape, names=tuple("abcd"), weights=(0.4, 0.3, 0.2, 0.1), starts=(0, 1, 2, 3)),
                eligible=(True,) * 4)
        for facts in stages(1.0)
    ]  # fmt: skip
    least, slack = (decided(coarse, time_slack=share) for share in (0.0, 0.05))
    assert slack.predicted_makespan_s <= 1.05 * least.predicted_makespan_s * 1.01
    assert slack.mean_freeze_ratio < least.mean_freeze_ratio


def test_what_batches_take_beyond_their_prediction_is_slack_given_up_already() -> None:
    config = FreezeConfig.model_validate({"enabled": True, "planning": {"time_slack": 0.04}})
    as_planned, longer, much_longer = (decide(0, config, DAG, stages(1.0), 0.0, None, beyond) for beyond in (0.0, 0.01, 0.5))
    half = decided(stages(1.0), time_slack=0.02)
    assert as_planned.predicted_makespan_s > longer.predicted_makespan_s > much_longer.predicted_makespan_s
    assert as_planned.mean_freeze_ratio < longer.mean_freeze_ratio < much_longer.mean_freeze_ratio
    # Half of the slack is left, however long the batches are; ``half`` gave up some of its own for rounding.
    assert much_longer.mean_freeze_ratio <= half.mean_freeze_ratio + 0.01


def test_measured_shares_choose_the_masks_and_their_seconds() -> None:
    """The first unit is a tenth of the elements and half of the time."""
    shape = StageShape(0, tuple("abc"), (0.1, 0.5, 0.4), (0, 1, 2), 0)
    fit = StageFit(1.0, 2.0, 1.0, 0.0, (0.5, 0.3, 0.2))
    facts = StageFacts(shape, fit, (True,) * 3, StageProgress(((1.0, None),), 4))
    assert facts.share((0,)) == 0.5 and facts.seconds("B", (0, 2), 1) == pytest.approx(1.3)
    dag = PipelineDag(one_f_one_b(1, 4))
    assert batch_seconds(dag, [facts], [[(0,), (), (), ()]], 0.0) == pytest.approx(4 * 3 - 0.5)
    config = FreezeConfig.model_validate({"enabled": True, "selection": "spread"})
    decision = decide(0, config, dag, [facts], 0.0, [[0.5] * 4])
    shares = [facts.share(mask) for step in range(400) for mask in decision.masks(config, shape, step)]
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.02)


def progress_job(max_freeze_ratio: float) -> dict[str, Any]:
    planning = QUICK["planning"] | {"objective": "progress", "max_freeze_ratio": max_freeze_ratio, "drift_tolerance": 1e9}
    engine = build(2, jobs.ds_config(8, rlfreeze=QUICK | {"replan_interval": 25, "planning": planning}))
    slow_weight_gradients(engine, 0.002)
    for step in range(60):
        engine.train_batch(jobs.batches(step, 8))
    controller = engine.freeze_controller
    return {"decision": controller.decision, "gradients": controller._gradients(), "masks": engine._step_masks.masks}


def test_a_job_plans_for_progress_with_what_its_gradients_showed() -> None:
    results = run_ranks(progress_job, 2, 0.8)
    decisions = [result["decision"] for result in results]
    assert decisions[0] == decisions[1] and decisions[0].step > 50
    assert all(norm > 0 for result in results for norm in result["gradients"].norm)
    decision = decisions[0]
    if decision.mean_freeze_ratio > 0:
        assert decision.expected_loss_per_second_gain > 1.0 and 0 < decision.expected_kept_progress < 1
    else:
        assert not any(any(result["masks"]) for result in results)


# -- a plan of the user's -----------------------------------------------------------------------------------------------


def plan_file(folder: Path, num_stages: int, num_micro_batches: int, limit: float = 0.5) -> Path:
    dag = PipelineDag(one_f_one_b(num_stages, num_micro_batches))
    durations = {i: Duration(1.0, 1.0) if i.is_forward else Duration(2.0, 1.0) for i in dag.order}
    solve(dag, Costs(durations), Limits(limit)).save(folder / "plan.json")
    return folder / "plan.json"


def plan_file_job(path: str, max_freeze_ratio: float) -> Any:
    from rlfreeze_ds.errors import ConfigError

    planning = QUICK["planning"] | {"plan_file": path, "max_freeze_ratio": max_freeze_ratio}
    try:
        engine = build(2, jobs.ds_config(4, rlfreeze=QUICK | {"planning": planning}))
    except ConfigError as error:
        return str(error)
    for step in range(14):
        engine.train_batch(jobs.batches(step, 4))
    decision = engine.freeze_controller.decision
    return decision.ratios if decision else None, any(engine._step_masks.masks)


def test_a_plan_file_is_followed(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 2, 4)
    rows = json.loads(path.read_text())["freeze_ratio"]
    expected = tuple(tuple(row["ratio"] for row in rows if row["stage_id"] == s) for s in range(2))
    results = run_ranks(plan_file_job, 2, str(path), 0.5)
    assert [ratios for ratios, _ in results] == [expected, expected]
    assert any(frozen for _, frozen in results)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "cannot be read"),
        ("other stages", "a plan for 3 stages, this job has 2"),
        ("too much", "above max_freeze_ratio 0.3"),
    ],
)
def test_a_wrong_plan_file_is_one_error_on_every_rank(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "plan.json"
    if kind != "missing":
        plan_file(tmp_path, 3 if kind == "other stages" else 2, 4)
    for found in run_ranks(plan_file_job, 2, str(path), 0.3):
        assert found.startswith("rlfreeze.planning.plan_file: ") and message in found


def other_batch_job(path: str, folder: str) -> tuple[bool, list[str]]:
    from tests.test_planner import collected_warnings

    warnings = collected_warnings()
    os.environ["RLFREEZE_RUN_DIR"] = folder
    engine = build(2, jobs.ds_config(4, rlfreeze=QUICK | {"planning": QUICK["planning"] | {"plan_file": path}}))
    for step in range(9):
        engine.train_batch(jobs.batches(step, 4))
    return any(engine._step_masks.masks), warnings


def test_a_plan_file_for_another_batch_freezes_nothing_and_says_why(tmp_path: Path) -> None:
    results = run_ranks(other_batch_job, 2, str(plan_file(tmp_path, 2, 8)), str(tmp_path))
    assert not any(frozen for frozen, _ in results)
    assert "is for 8 micro-batches, a batch has 4" in results[0][1][0] and "nothing is frozen without one" in results[0][1][0]


# -- predictions that do not come true ----------------------------------------------------------------------------------


def drifting_job(folder: str) -> list[tuple[int, float]]:
    os.environ["RLFREEZE_RUN_DIR"] = folder
    block = QUICK | {"replan_interval": 1000, "planning": QUICK["planning"] | {"drift_tolerance": 1.5}}
    engine = build(2, jobs.ds_config(4, rlfreeze=block))
    slow_weight_gradients(engine, 0.004)
    seen = []
    for step in range(64):
        if step == 30:
            for parameter in engine.module.parameters():
                parameter.register_hook(lambda grad: time.sleep(0.02))
        engine.train_batch(jobs.batches(step, 4))
        decision = engine.freeze_controller.decision
        seen.append((decision.step, decision.predicted_makespan_s) if decision else (-1, 0.0))
    return seen


def test_a_machine_that_becomes_slower_is_planned_for_anew_once_and_the_reason_is_told(tmp_path: Path) -> None:
    first, second = run_ranks(drifting_job, 2, str(tmp_path))
    assert first == second
    plans = sorted(set(first) - {(-1, 0.0)})
    assert len(plans) == 2 and plans[0][0] == 7 and plans[1][0] > 30
    assert plans[1][1] > 1.2 * plans[0][1]
    events = [json.loads(line) for line in (tmp_path / "rlfreeze.jsonl").read_text().splitlines()]
    (drift,) = [event for event in events if event["event"] == "drift"]
    assert drift["step"] == plans[1][0] and "against the plan's" in drift["message"]
