"""From fits to masks: what a whole decision hands out over many steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.decision import Decision, StageFacts, decide
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fit import StageFit
from rlfreeze_ds.planning.progress import equal_stages

UNITS = 8
MICRO_BATCHES = 4


def shapes(barrier: int = UNITS) -> list[StageShape]:
    names = tuple(f"unit{u}" for u in range(UNITS))
    weights = (0.3, 0.02, 0.1, 0.08, 0.2, 0.1, 0.15, 0.05)
    return [StageShape(stage, names, weights, tuple(range(UNITS)), barrier) for stage in range(2)]


def decided(barrier: int = UNITS, input_gradient_s: float = 1.0, **block: object) -> tuple[FreezeConfig, Decision]:
    config = FreezeConfig.model_validate({"enabled": True, "planning": {"time_slack": 0.0}, **block})
    fits = [StageFit(1.0, 2.0, 1.0, input_gradient_s), StageFit(1.0, 2.0, 1.0)]
    progress = equal_stages(2, MICRO_BATCHES)
    triples = zip(shapes(barrier), fits, progress.values(), strict=True)
    stages = [StageFacts(shape, fit, (True,) * UNITS, kept) for shape, fit, kept in triples]
    return config, decide(0, config, PipelineDag(one_f_one_b(2, MICRO_BATCHES)), stages, 0.0)


def test_a_mask_for_the_whole_step_is_the_same_for_all_micro_batches_and_keeps_its_share_over_steps() -> None:
    config, decision = decided(mask_scope="step", planning={"max_freeze_ratio": 0.4, "time_slack": 0.0})
    steps = range(2000)
    for shape in shapes():
        ratios = decision.ratios[shape.stage_id]
        assert len(set(ratios)) == 1 and 0 < ratios[0] <= 0.4 + 1e-9
        masks = [decision.masks(config, shape, step) for step in steps]
        assert all(len(row) == MICRO_BATCHES and len(set(row)) == 1 for row in masks)
        frozen = np.array([[unit in row[0] for unit in range(UNITS)] for row in masks])
        # Each unit is frozen in its share of the steps, within 4 standard deviations of a fair coin.
        assert frozen.mean(axis=0) == pytest.approx([ratios[0]] * UNITS, abs=4 * (ratios[0] / len(steps)) ** 0.5)


def test_no_unit_is_frozen_in_more_than_its_limit_of_a_steps_micro_batches() -> None:
    config, decision = decided(planning={"max_freeze_ratio": 0.5, "time_slack": 0.0})
    for shape in shapes():
        for step in range(50):
            masks = decision.masks(config, shape, step)
            assert max(sum(unit in mask for mask in masks) for unit in range(UNITS)) <= 0.5 * MICRO_BATCHES


def test_a_first_stage_freezes_whole_only_where_a_prefix_saves_input_gradients() -> None:
    for barrier, input_gradient_s, whole in ((UNITS, 1.0, True), (0, 1.0, False), (UNITS, 0.1, False)):
        config, decision = decided(barrier, input_gradient_s)
        decision = replace(decision, ratios=((0.4,) * MICRO_BATCHES,) * 2)
        sizes = {len(mask) for step in range(50) for mask in decision.masks(config, shapes(barrier)[0], step)}
        assert (sizes <= {0, UNITS}) == whole


@pytest.mark.parametrize(("has_others", "whole", "expected"), [(False, True, True), (True, True, False), (False, False, False)])
def test_a_first_stage_counts_as_frozen_only_with_nothing_of_it_live(has_others: bool, whole: bool, expected: bool) -> None:
    import torch

    from rlfreeze_ds.controller import FreezeController
    from rlfreeze_ds.freezing.units import find_units, shape_of
    from rlfreeze_ds.telemetry.run_log import RunLog

    units, barrier = find_units(torch.nn.Linear(2, 2).named_parameters(), "parameter", [])
    shape = shape_of(0, units, barrier, has_others=has_others)
    controller = FreezeController(FreezeConfig(enabled=True), units, shape, torch.device("cpu"), RunLog(None))
    masks = ((0, 1), (0, 1)) if whole else ((0, 1), (0,))
    controller.phase = "profile"
    controller._masks = lambda shape, num_micro_batches: masks  # type: ignore[method-assign]
    assert controller.first_stage_frozen(2) is expected
    controller.phase = "warmup"  # nothing is frozen then, whatever is asked
    assert controller.first_stage_frozen(2) is False
