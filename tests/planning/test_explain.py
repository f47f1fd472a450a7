"""Sentences on batches whose truth is known by hand, and every claim about the published profile tried by simulation."""

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rlfreeze_ds.errors import ProfileError, RLFreezeError
from rlfreeze_ds.planning.builders import gpipe, one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.explain import explain
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import Plan, mean_ratios
from rlfreeze_ds.planning.schedule import Schedule
from rlfreeze_ds.planning.solver import Limits, solve


def batch(schedule: Schedule, seconds: Mapping[str, tuple[float, float]]) -> tuple[PipelineDag, Costs]:
    """Unfrozen and frozen seconds by stage and kind, such as {"0B": (2, 1)}."""
    return PipelineDag(schedule), Costs(
        {i: Duration(*seconds[f"{i.stage_id}{i.kind}"]) for i in schedule.instructions}
    )


def by_hand(*ranks: str) -> Schedule:
    return Schedule(tuple(tuple(Instruction.parse(text) for text in rank.split()) for rank in ranks))


def plan_of(dag: PipelineDag, costs: Costs, ratios: Mapping[str, float], max_freeze_ratio: float = 1.0) -> Plan:
    """A plan with these ratios and 0 elsewhere."""
    every = {i: ratios.get(str(i), 0.0) for i in costs.freezable}
    mean, stages = mean_ratios(every, dag.schedule.num_stages)
    unfrozen, planned = (dag.simulate(costs.seconds(r), costs.transfer_s) for r in ({}, every))
    return Plan(
        every, dag.schedule.num_stages, dag.schedule.num_micro_batches, unfrozen.makespan, planned.makespan, 0.0,
        mean, stages, planned.bubble_ratio, unfrozen.bubble_ratio, "none", "makespan", max_freeze_ratio, 0.0, 1.0, 1.0,
    )  # fmt: skip


HEAVY = batch(one_f_one_b(2, 4), {"0F": (1, 1), "0B": (2, 1), "1F": (3, 3), "1B": (6, 2)})
"""Stage 1 never waits after 1 s: 1 + 4 * (3 + 6) + 2 = 39 s unfrozen."""


def test_one_heavy_stage() -> None:
    plan = plan_of(*HEAVY, {f"1B{m}": 0.5 for m in range(4)}, max_freeze_ratio=0.5)
    assert plan.planned_makespan_s == 1 + 4 * (3 + 4) + 2
    # Only stage 0's last backward is on the path: the others have stage 1's next one beside them.
    assert explain(*HEAVY, plan) == [
        "stage 0: nothing is frozen, its weight gradients are off the critical path in micro-batches 0 to 2, "
        "and the planned makespan is reached without the others",
        "stage 1 is the bottleneck (busy 36 s of 39 s unfrozen): 50 % of its weight-gradient time is skipped "
        "(its mean ratio is at the limit, 0.5); thawed, the batch would take 8 s longer",
    ]


@pytest.mark.parametrize(
    ("micro_batches", "words"),
    [
        ((0,), "12 % of its weight-gradient time is skipped, all of it in micro-batch 0; "),
        ((3,), "12 % of its weight-gradient time is skipped, all of it in micro-batch 3, in the drain; "),
        ((0, 3), "25 % of its weight-gradient time is skipped, all of it in micro-batches 0 and 3; "),
        ((2, 3), "25 % of its weight-gradient time is skipped, all of it in micro-batches 2 and 3; "),
        ((0, 1, 3), "38 % of its weight-gradient time is skipped, none of it in micro-batch 2; "),
        ((0, 1, 2, 3), "50 % of its weight-gradient time is skipped; "),
    ],
)
def test_where_it_is_skipped(micro_batches: tuple[int, ...], words: str) -> None:
    # Stage 1 runs F0 B0 F1 B1 F2 B2 F3 B3: its drain is B3. Each ratio of a half saves 2 s.
    line = explain(*HEAVY, plan_of(*HEAVY, {f"1B{m}": 0.5 for m in micro_batches}))[1]
    assert line.endswith(f": {words}thawed, the batch would take {2 * len(micro_batches)} s longer")


def test_lists_and_runs_of_micro_batches() -> None:
    dag, costs = batch(one_f_one_b(1, 16), {"0F": (1, 1), "0B": (2, 1)})
    for chosen, words in (
        ((1, 2, 3, 7), "all of it in micro-batches 1 to 3 and 7;"),
        ((0, 2, 3, 5), "all of it in micro-batches 0, 2, 3 and 5;"),
        ((0, 2, 4, 6), "all of it in 4 of 16 micro-batches;"),
        (tuple(range(3, 16)), "none of it in micro-batches 0 to 2;"),
    ):
        assert words in explain(dag, costs, plan_of(dag, costs, {f"0B{m}": 1.0 for m in chosen}))[0]


def test_what_is_not_skipped_because_it_gains_nothing() -> None:
    # Stage 1 runs F0 B0 F1 B1 from 1 s to 7 s; stage 0's first backward, 4 s to 6 s, ends before the second can begin.
    dag, costs = batch(one_f_one_b(2, 2), {"0F": (1, 1), "0B": (2, 1), "1F": (1, 1), "1B": (2, 1)})
    line = explain(dag, costs, plan_of(dag, costs, {"0B1": 1.0}))[0]
    assert line == (
        "stage 0: 50 % of its weight-gradient time is skipped, all of it in micro-batch 1 (the others are off the critical "
        "path); thawed, the batch would take 1 s longer"
    )
    dag, costs = batch(one_f_one_b(2, 4), {"0F": (1, 1), "0B": (2, 1), "1F": (1, 1), "1B": (4, 2)})
    line = explain(dag, costs, plan_of(dag, costs, {f"0B{m}": 1.0 for m in (1, 2, 3)}))[0]
    assert "75 % of its weight-gradient time is skipped, none of it in micro-batch 0 (off the critical path);" in line


def test_the_drain_is_not_named_where_every_backward_is_in_it() -> None:
    dag, costs = batch(gpipe(1, 2), {"0F": (1, 1), "0B": (2, 1)})
    assert "drain" not in explain(dag, costs, plan_of(dag, costs, {"0B1": 1.0}))[0]


def test_the_share_is_of_time_not_of_instructions() -> None:
    schedule = one_f_one_b(1, 2)
    saving = {"0B0": 1.0, "0B1": 3.0}
    costs = Costs({i: Duration(4.0, 4.0 - saving.get(str(i), 0.0)) for i in schedule.instructions})
    dag = PipelineDag(schedule)
    for ratio, words in ((1.0, "75 %"), (0.5, "38 %"), (0.0067, "less than 1 %")):
        line = explain(dag, costs, plan_of(dag, costs, {"0B1": ratio}))[0]
        assert line.startswith(f"stage 0: {words} of its weight-gradient time is skipped")
    line = explain(dag, costs, plan_of(dag, costs, {"0B0": 1.0, "0B1": 0.999}))[0]
    assert line.startswith("stage 0: more than 99 % of its")


def test_a_stage_off_the_critical_path() -> None:
    # 0F0 0-1, 1F0 1-2, 1I0 2-3, then 0B0 3-7 beside 1W0 3-5.
    dag, costs = batch(
        by_hand("0F0 0B0", "1F0 1I0 1W0"), {"0F": (1, 1), "0B": (4, 2), "1F": (1, 1), "1I": (1, 1), "1W": (2, 0)}
    )
    lines = explain(dag, costs, plan_of(dag, costs, {"0B0": 0.5}))
    assert lines == [
        "stage 0 is the bottleneck (busy 5 s of 7 s unfrozen): 50 % of its weight-gradient time is skipped; "
        "thawed, the batch would take 1 s longer",
        "stage 1: nothing is frozen, its weight gradients are off the critical path",
    ]
    # Freezing what gains nothing is called so: 1W0 ends at 5 s, the batch at 7 s.
    assert explain(dag, costs, plan_of(dag, costs, {"1W0": 0.5}))[1].endswith("; thawed, the batch would be no longer")


def test_stages_that_share_the_bottleneck() -> None:
    schedule = by_hand("0F0 0B0", "1F0 2F0 2I0 2W0 1I0 1W0")
    seconds = {"0F": (1, 1), "0B": (3, 3), "1F": (1, 1), "1I": (1, 1), "1W": (2, 1)}
    seconds |= {"2F": (1, 1), "2I": (1, 1), "2W": (2, 0)}
    dag, costs = batch(schedule, seconds)
    plan = plan_of(dag, costs, {"2W0": 1.0})
    # 0B0 runs 7-10 and 1W0 7-9; both two seconds earlier as planned.
    assert (plan.unfrozen_makespan_s, plan.planned_makespan_s) == (10, 8)
    assert explain(dag, costs, plan) == [
        "stage 0: nothing can be frozen, its backward is no shorter when frozen",
        "stage 1 is on rank 1, the bottleneck (busy 8 s of 10 s unfrozen): nothing is frozen, its weight gradients are off "
        "the critical path",
        "stage 2 is on rank 1, the bottleneck (busy 8 s of 10 s unfrozen): 100 % of its weight-gradient time is skipped; "
        "thawed, the batch would take 2 s longer",
    ]


def test_a_stage_that_others_took_off_the_critical_path() -> None:
    schedule = by_hand("0F0 0B0", "1F0 2F0 2I0 1I0 2W0 1W0")
    seconds = {"0F": (1, 1), "0B": (3, 2), "1F": (1, 1), "1I": (1, 1), "1W": (2, 1)}
    seconds |= {"2F": (1, 1), "2I": (1, 1), "2W": (2, 0)}
    dag, costs = batch(schedule, seconds)
    plan = plan_of(dag, costs, {"2W0": 1.0})
    # From 5 s on: 0B0 till 8 s; beside it 2W0 and 1W0, till 9 s unfrozen and till 7 s as planned.
    assert (plan.unfrozen_makespan_s, plan.planned_makespan_s) == (9, 8)
    lines = explain(dag, costs, plan)
    assert lines[0] == "stage 0: nothing is frozen, the planned makespan is reached without it"
    assert lines[1].endswith(
        "nothing is frozen, its weight gradients are off the critical path once other stages are shorter"
    )
    assert lines[2].endswith("100 % of its weight-gradient time is skipped; thawed, the batch would take 1 s longer")


def test_why_nothing_is_frozen() -> None:
    dag, costs = HEAVY
    assert explain(dag, costs, plan_of(dag, costs, {}))[1].endswith(
        "unfrozen): nothing is frozen, the planned makespan is reached without it"
    )
    assert explain(dag, costs, plan_of(dag, costs, {}, max_freeze_ratio=0.0)) == [
        "stage 0: nothing is frozen, max_freeze_ratio is 0",
        "stage 1 is the bottleneck (busy 36 s of 39 s unfrozen): nothing is frozen, max_freeze_ratio is 0",
    ]
    fixed = Costs({i: Duration(d.unfrozen_s, d.unfrozen_s) for i, d in costs.durations.items()})
    assert explain(dag, fixed, plan_of(dag, fixed, {}))[0] == (
        "stage 0: nothing can be frozen, its backward is no shorter when frozen"
    )


def test_equal_ranks_have_no_bottleneck() -> None:
    dag, costs = batch(one_f_one_b(2, 2), {"0F": (1, 1), "0B": (2, 1), "1F": (1, 1), "1B": (2, 1)})
    assert "bottleneck" not in " ".join(explain(dag, costs, plan_of(dag, costs, {})))


def test_a_plan_for_other_costs_is_refused() -> None:
    dag, costs = HEAVY
    plan = plan_of(dag, costs, {})
    with pytest.raises(RLFreezeError, match="0B0 can be frozen in the profile but not in the plan"):
        explain(dag, costs, replace(plan, ratios={i: r for i, r in plan.ratios.items() if i.stage_id > 0}))
    with pytest.raises(RLFreezeError, match="0B9 can be frozen in the plan but not in the profile"):
        explain(dag, costs, replace(plan, ratios={**plan.ratios, Instruction.parse("0B9"): 0.0}))
    with pytest.raises(ProfileError):
        explain(PipelineDag(one_f_one_b(2, 5)), costs, plan)


def listed(words: str) -> set[int]:
    """The inverse of "0, 2 and 5 to 7"."""
    found: set[int] = set()
    for part in re.split(r", | and ", words):
        first, _, last = part.partition(" to ")
        found |= set(range(int(first), int(last or first) + 1))
    return found


MADE = {
    **{f"solved {limits}": lambda *batch, limits=limits: solve(*batch, limits) for limits in (
        Limits(0.8, 0.0), Limits(0.8, 0.02), Limits(0.5, 0.05), Limits(0.3, 0.0)
    )},
    "stage 3 alone": lambda *batch: plan_of(*batch, {f"3B{m}": 0.5 for m in range(8)}),
    "stage 3 too much": lambda *batch: plan_of(*batch, {f"3B{m}": 1.0 for m in range(8)}),
    "drains alone": lambda *batch: plan_of(*batch, {"0B6": 1.0, "0B7": 1.0, "1B7": 0.5, "2B7": 0.5}),
    "nothing": lambda *batch: plan_of(*batch, {}),
}  # fmt: skip


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_every_claim_about_the_published_profile_holds(published: tuple[PipelineDag, Costs], make) -> None:
    dag, costs = published
    plan = make(dag, costs)
    seconds = costs.seconds(plan.ratios)
    makespan = dag.simulate(seconds).makespan
    lines = explain(dag, costs, plan)
    busy = [sum(costs.durations[i].unfrozen_s for i in rank) for rank in dag.schedule.ranks]
    assert [" is the bottleneck" in line for line in lines] == [b == max(busy) for b in busy]
    for stage_id, line in enumerate(lines):
        freezable = [i for i in plan.ratios if i.stage_id == stage_id]
        every = {i.micro_batch_id for i in freezable}
        live = {i.micro_batch_id for i in freezable if plan.ratios[i] <= 1e-6}
        # Critical by trial: a little longer, and the batch is longer.
        critical = {
            i.micro_batch_id
            for i in freezable
            if dag.simulate({**seconds, i: seconds[i] + 1e-5}).makespan > makespan + 5e-6
        }
        assert ("nothing is frozen" in line) == (live == every)
        match = re.search(r"(all of it|none of it|path) in micro-batch(?:es)? ([0-9]+(?:(?:, | and | to )[0-9]+)*)", line)
        if match is not None:
            expected = {"all of it": every - live, "none of it": live, "path": every - critical}
            assert listed(match[2]) == expected[match[1]]
        if live == every:
            assert ("off the critical path" in line) == bool(every - critical)
            assert ("the planned makespan is reached without " in line) == bool(critical)
            continue
        mean = sum(plan.ratios[i] for i in freezable) / len(freezable)
        assert ("at the limit" in line) == (plan.max_freeze_ratio - 1e-6 < mean < 1)
        assert (" of it in " in line) == bool(live)
        assert ("off the critical path" in line) == (bool(live) and not live & critical)
        match = re.search(r"(\d+) % of its", line)
        saved = sum(costs.durations[i].unfrozen_s - seconds[i] for i in freezable)
        most = sum(costs.durations[i].saving_s for i in freezable)
        assert match is not None and int(match[1]) == round(100 * saved / most)
        match = re.search(r"would take ([0-9.e-]+) s longer", line)
        thawed = dag.simulate({**seconds, **{i: costs.durations[i].unfrozen_s for i in freezable}}).makespan
        assert float(match[1] if match else 0) == pytest.approx(thawed - makespan, rel=5e-3, abs=1e-6)
