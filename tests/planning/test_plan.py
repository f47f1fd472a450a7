import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.planning.profile import read_profile
from rlfreeze_ds.planning.solver import Limits, solve

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "profiles" / "llama8b_h200_pp4_1f1b.csv"

PLAN = Plan(
    ratios={
        Instruction.parse(text): ratio for text, ratio in (("0B0", 0.0), ("0B1", 0.0), ("1W0", 0.25), ("1B1", 1.0))
    },
    num_stages=3,
    num_micro_batches=2,
    unfrozen_makespan_s=0.675,
    planned_makespan_s=0.474,
    all_frozen_makespan_s=0.385,
    mean_freeze_ratio=0.3125,
    stage_freeze_ratio=(0.0, 0.625, 0.0),
    bubble_ratio=0.2,
    unfrozen_bubble_ratio=0.3,
    solver="highs",
    objective="makespan",
    max_freeze_ratio=0.8,
    time_slack=0.02,
    expected_kept_progress=0.8,
    expected_loss_per_second_gain=1.139,
    critical_stages=(1,),
)


def changed(**values: object) -> dict[str, object]:
    return {**PLAN.to_json(), **values}


def test_ratio_of_a_stage_and_micro_batch() -> None:
    assert [PLAN.ratio(0, 0), PLAN.ratio(1, 0), PLAN.ratio(1, 1), PLAN.ratio(2, 0)] == [0, 0.25, 1, 0]


def test_json_names_and_ratio_rows() -> None:
    data = PLAN.to_json()
    assert data["unfrozen_makespan_s"] == 0.675
    assert data["stage_freeze_ratio"] == [0.0, 0.625, 0.0]
    assert data["verdict"] == PLAN.verdict
    assert {"stage_id": 1, "micro_batch_id": 0, "kind": "W", "ratio": 0.25} in data["freeze_ratio"]
    assert len(data["freeze_ratio"]) == 4


def test_round_trip_is_exact(tmp_path: Path) -> None:
    schedule, costs = read_profile(PUBLISHED)
    for plan in (PLAN, solve(PipelineDag(schedule), costs, Limits(0.8, 0.02))):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    # A frontier may stand beside a plan in its file.
    assert Plan.from_json(PLAN.to_json() | {"frontier": {}}) == PLAN


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the plan = .*: must be a JSON object"),
        ({k: v for k, v in PLAN.to_json().items() if k != "solver"}, "the plan misses solver: the keys are"),
        (changed(colour="red"), "the plan has the unknown colour: the keys are"),
        (changed(planned_makespan_s="fast"), "planned_makespan_s = 'fast': must be a finite number"),
        (changed(planned_makespan_s=math.nan), "planned_makespan_s = nan"),
        (changed(planned_makespan_s=True), "planned_makespan_s = True"),
        (changed(bubble_ratio=1.5), "bubble_ratio = 1.5: must be a number from 0 to 1"),
        (changed(objective="speed"), 'objective = .speed.: must be "makespan" or "progress"'),
        (changed(expected_kept_progress=1.5), "expected_kept_progress = 1.5: must be a number from 0 to 1"),
        (changed(num_stages=3.0), "num_stages = 3.0: must be a whole number"),
        (changed(stage_freeze_ratio=[0.0]), "stage_freeze_ratio = .*: must be a number per stage"),
        (changed(critical_stages=[3]), "critical_stages = .*: must be a list of stage ids"),
        (changed(mean_freeze_ratio=0.5), r"mean_freeze_ratio = \[0.5\]: must be \[0.3125\], the mean"),
        (changed(stage_freeze_ratio=[0.1, 0.625, 0.0]), "stage_freeze_ratio = .* the mean of the ratios"),
        (changed(freeze_ratio=[{"stage_id": 0}]), r"freeze_ratio\[0\] misses kind, micro_batch_id, ratio"),
        (changed(freeze_ratio=2 * PLAN.to_json()["freeze_ratio"]), "each instruction once"),
        (changed(freeze_ratio=[{"stage_id": 3, "micro_batch_id": 0, "kind": "B", "ratio": 0}]), "must be 0 to 2"),
        (changed(freeze_ratio=[{"stage_id": 0, "micro_batch_id": 0, "kind": "F", "ratio": 0}]), 'must be "B" or "W"'),
        (changed(freeze_ratio=[{"stage_id": 0, "micro_batch_id": 0, "kind": "B", "ratio": 2}]), "from 0 to 1"),
    ],
)
def test_a_broken_plan_is_refused(data: object, message: str) -> None:
    with pytest.raises(RLFreezeError, match=message):
        Plan.from_json(data)


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(RLFreezeError, match=r"plan.json: cannot be read"):
        Plan.load(path)
    path.write_text("{")
    with pytest.raises(RLFreezeError, match=r"plan.json: is not JSON"):
        Plan.load(path)
    path.write_text("{}")
    with pytest.raises(RLFreezeError, match=r"plan.json: the plan misses"):
        Plan.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(RLFreezeError, match="cannot write .*plan.json: No space left on device. Nothing was changed"):
        PLAN.save(path)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("place", ["absent/plan.json", "."])
def test_an_impossible_place_is_one_error(tmp_path: Path, place: str) -> None:
    with pytest.raises(RLFreezeError, match="cannot write"):
        PLAN.save(tmp_path / place)
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    PLAN.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.load(tmp_path / "real.json") == PLAN


@pytest.mark.parametrize(
    ("plan", "verdict"),
    [
        (
            PLAN,
            "1.42x: 0.675 s -> 0.474 s at a mean freeze ratio of 0.31"
            ", expected to keep 0.80 of a batch's progress: 1.14x the loss per second",
        ),
        (
            replace(PLAN, planned_makespan_s=0.668),
            "not worth freezing: 1.01x: 0.675 s -> 0.668 s at a mean freeze ratio of 0.31"
            ", expected to keep 0.80 of a batch's progress: 1.14x the loss per second, a gain below 2%",
        ),
        (
            replace(PLAN, planned_makespan_s=0.675, ratios={}),
            "not worth freezing: no instruction is shorter when it is frozen",
        ),
        (
            replace(PLAN, planned_makespan_s=0.675, max_freeze_ratio=0.0),
            "not worth freezing: max_freeze_ratio is 0, nothing may be frozen",
        ),
    ],
)
def test_verdict(plan: Plan, verdict: str) -> None:
    assert plan.verdict == verdict


def test_grid() -> None:
    assert PLAN.grid().splitlines() == [
        "stage  mb 0  mb 1  mean",
        "    0  0.00  0.00  0.00",
        "    1  0.25  1.00  0.62",
        "    2     -     -  0.00",
    ]
