"""Kept progress, and the plans that make the most of it per second."""

import math

import numpy as np
import pytest

from rlfreeze_ds.errors import ConfigError
from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.progress import (
    StageGradients,
    StageProgress,
    equal_stages,
    kept_by,
    kept_progress,
    measured_stages,
)
from rlfreeze_ds.planning.solver import Limits, available_solvers, solve


@pytest.mark.parametrize("noise_scale", [0.0, 1.7, 14.4, None])
def test_kept_progress_is_concave_from_0_to_1(noise_scale: float | None) -> None:
    shares = np.linspace(0, 1, 41)
    kept = np.array([kept_progress(share, 8, noise_scale) for share in shares])
    assert kept[0] == 0 and kept[-1] == 1
    assert (np.diff(kept, n=2) <= 1e-12).all()


def test_kept_progress_by_hand() -> None:
    assert kept_progress(0.25, 8, None) == 0.5
    # s = 2, sigma^2 = 6: squared norms 2 + 6 / 8 of the whole mean and 2 + 6 / 4 of half of it.
    assert kept_progress(0.5, 8, 3.0) == pytest.approx(math.sqrt(2.75 / 3.5))
    assert kept_progress(0.5, 8, 1e12) == pytest.approx(math.sqrt(0.5))


def test_measured_ratios_of_a_mean_over_few_micro_batches() -> None:
    """The formula against what it stands for: the step of a normalised mean gradient along the true one, drawn at random."""
    rng = np.random.default_rng(0)
    signal, noise = rng.normal(size=4000), 2.5
    draws = signal + noise * rng.normal(size=(200, 8, 4000))
    scale = noise**2 * 4000 / float(signal @ signal)

    def along(mean: np.ndarray) -> float:
        return float(np.mean(mean @ signal / np.linalg.norm(mean, axis=1)))

    whole = along(draws.mean(axis=1))
    for live in (2, 4, 6):
        found = along(draws[:, :live].mean(axis=1)) / whole
        assert found == pytest.approx(kept_progress(live / 8, 8, scale), rel=0.01)


@pytest.mark.parametrize(("noise_scale", "gain", "mean"), [(14.0, 1.19, 0.37), (3.0, 1.31, 0.49), (None, 1.125, 0.28)])
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_the_published_profile(published, solver: str, noise_scale: float | None, gain: float, mean: float) -> None:
    """Figures of an independent solver, which swept the makespan (DESIGN.md, section 5)."""
    if solver not in available_solvers():
        pytest.skip(f"{solver} is not installed")
    dag, costs = published
    progress = equal_stages(4, 8, noise_scale)
    plan = solve(dag, costs, Limits(0.8), objective="progress", progress=progress, solver=solver)
    assert gain <= plan.expected_loss_per_second_gain < gain + 0.02
    assert plan.mean_freeze_ratio == pytest.approx(mean, abs=0.02)
    kept = sum(kept_progress(1 - ratio, 8, noise_scale) / 4 for ratio in plan.stage_freeze_ratio)
    assert plan.expected_kept_progress == pytest.approx(kept)
    planned_s = dag.simulate(costs.seconds(plan.ratios)).makespan
    assert plan.expected_loss_per_second_gain == pytest.approx(kept * 0.675 / planned_s)


def by_hand(forward, backward):
    """The makespan of 1F1B with 2 stages and 2 micro-batches."""
    (f00, f01), (f10, f11) = forward
    (b00, b01), (b10, b11) = backward
    b10_end = f00 + f10 + b10
    b11_end = np.maximum(b10_end, f00 + f01) + f11 + b11
    return np.maximum(np.maximum(f00 + f01, b10_end) + b00, b11_end) + b01


@pytest.mark.parametrize("noise_scales", [(2.0, 2.0), (0.5, 20.0), (None, None)])
@pytest.mark.parametrize("cap", [0.5, 1.0])
def test_two_by_two_equals_brute_force(cap: float, noise_scales: tuple[float | None, float | None]) -> None:
    forward = [[1.0, 2.0], [2.0, 1.0]]
    unfrozen, saving = [[4.0, 3.0], [5.0, 4.0]], 2.5
    schedule = one_f_one_b(2, 2)
    durations = {
        i: Duration(forward[i.stage_id][i.micro_batch_id], forward[i.stage_id][i.micro_batch_id])
        if i.is_forward
        else Duration(unfrozen[i.stage_id][i.micro_batch_id], unfrozen[i.stage_id][i.micro_batch_id] - saving)
        for i in schedule.instructions
    }
    weights = (0.3, 0.7)
    progress = {s: StageProgress(((weights[s], noise_scales[s]),), 2) for s in range(2)}
    step = 1 / 40
    grid = np.meshgrid(*[np.arange(0, 1 + step / 2, step)] * 4, indexing="ij", sparse=True)
    seconds = by_hand(forward, [[unfrozen[s][m] - grid[2 * s + m] * saving for m in range(2)] for s in range(2)])
    kept = sum(
        np.vectorize(lambda r, s=s: weights[s] * kept_progress(1 - r, 2, noise_scales[s]))((grid[2 * s] + grid[2 * s + 1]) / 2)
        for s in range(2)
    )
    rate = np.where(
        ((grid[0] + grid[1]) / 2 <= cap + 1e-9) & ((grid[2] + grid[3]) / 2 <= cap + 1e-9), kept / seconds, 0.0
    )
    unfrozen_s = float(seconds[0, 0, 0, 0])
    plan = solve(PipelineDag(schedule), Costs(durations), Limits(cap), objective="progress", progress=progress)
    best = float(rate.max()) * unfrozen_s
    assert best - 1e-9 <= plan.expected_loss_per_second_gain * (1 + 1e-3)
    assert plan.expected_loss_per_second_gain <= best * (1 + 0.01)  # the grid is coarse


def test_nothing_is_frozen_where_nothing_pays() -> None:
    """One stage has no bubble, and its weight gradient is a tenth of the time: half of it frozen saves 5 % and costs more."""
    schedule = one_f_one_b(1, 4)
    durations = {i: Duration(1.0, 1.0) if i.is_forward else Duration(2.0, 1.7) for i in schedule.instructions}
    for noise_scale in (None, 5.0):
        plan = solve(
            PipelineDag(schedule), Costs(durations), Limits(), objective="progress", progress=equal_stages(1, 4, noise_scale)
        )
        assert set(plan.ratios.values()) == {0.0}
        assert plan.verdict == "not worth freezing: no plan is expected to gain 2% in loss per second"
        assert plan.expected_loss_per_second_gain == plan.expected_kept_progress == 1.0
    # Without noise every micro-batch tells all, and whatever is saved is won.
    plan = solve(PipelineDag(schedule), Costs(durations), Limits(), objective="progress", progress=equal_stages(1, 4, 0.0))
    assert plan.mean_freeze_ratio == pytest.approx(0.5)


def test_a_stage_that_matters_more_is_frozen_less() -> None:
    schedule = one_f_one_b(2, 1)  # all in a row, so that a second saved is worth the same on both stages
    durations = {i: Duration(1.0, 1.0) if i.is_forward else Duration(2.0, 0.5) for i in schedule.instructions}
    dag, costs = PipelineDag(schedule), Costs(durations)

    def ratios(share: float) -> tuple[float, ...]:
        progress = {0: StageProgress(((share, 4.0),), 8), 1: StageProgress(((1 - share, 4.0),), 8)}
        return solve(dag, costs, Limits(1.0), objective="progress", progress=progress).stage_freeze_ratio

    assert ratios(0.9)[0] < ratios(0.9)[1] - 0.05
    assert ratios(0.1)[1] < ratios(0.1)[0] - 0.05


def test_parts_of_a_stage() -> None:
    stage = StageProgress(((0.2, None), (0.1, 0.0)), 8, eligible_share=0.5, fixed=0.3)
    assert stage.kept(0.0) == pytest.approx(0.6)
    # A mean ratio of 0.25 of the stage is half of what may freeze: sqrt(1/2), and all that is live is kept without noise.
    assert stage.kept(0.25) == pytest.approx(0.3 + 0.2 * math.sqrt(0.5) + 0.1)
    assert stage.kept(0.5) == pytest.approx(0.3)
    whole = StageProgress(((0.4, 3.0),), 8, whole_step=True)
    assert whole.kept(0.25) == pytest.approx(0.3)
    assert kept_by({0: whole, 1: stage}, {0: 0.25}) == pytest.approx(0.9)
    assert [x for x, _ in stage.curve()][-1] == 0.5


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_noise_scale_that_is_none(bad: float) -> None:
    with pytest.raises(ConfigError, match="noise_scale = .*must be a number >= 0"):
        equal_stages(2, 4, bad)


NAN = math.nan


def test_contributions_and_noise_from_what_was_seen() -> None:
    # sqrt(4) * 3 = 6 and sqrt(9) * 2 = 6 on stage 0; sqrt(16) * 1 = 4 and nothing known on stage 1: the median of 4, 6, 6.
    stages = [
        StageGradients((3.0, 2.0), (1.0, NAN), (5.0, NAN), (4, 9)),
        StageGradients((1.0, NAN), (NAN, NAN), (NAN, NAN), (16, 1)),
    ]
    found = measured_stages(stages, [(0, 1), (0,)], [1.0, 0.4], 8, normalised=True)
    total = 6 + 6 + 4 + 6
    # Noise scale 5 where it was seen, and on the others of that stage and of all stages.
    assert found[0] == StageProgress(((6 / total, 5.0), (6 / total, 5.0)), 8)
    assert found[1] == StageProgress(((4 / total, 5.0),), 8, eligible_share=0.4, fixed=6 / total)
    assert kept_by(found, {}) == pytest.approx(1)
    squares = measured_stages(stages, [(0, 1), (0,)], [1.0, 0.4], 8, normalised=False)
    assert squares[0].units[0][0] == pytest.approx(9 / (9 + 4 + 1 + 4))


def test_where_nothing_was_seen_the_worst_is_assumed() -> None:
    nothing = StageGradients((NAN,), (NAN,), (NAN,), (10,))
    found = measured_stages([nothing, nothing], [(0,), (0,)], [1.0, 1.0], 8, normalised=True)
    assert found == equal_stages(2, 8, None)
    # A signal of nothing is all noise.
    silent = StageGradients((1.0,), (0.0,), (3.0,), (10,))
    assert measured_stages([silent], [(0,)], [1.0], 8, normalised=True)[0].units == ((1.0, None),)
    assert measured_stages([silent], [()], [0.0], 8, normalised=True)[0].kept(0.5) == 1.0
