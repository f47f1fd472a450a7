"""A plan in words, a line a stage. Every claim is read off the simulator, none is guessed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.dag import PipelineDag, Timeline
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.planning.solver import TOLERANCE


def explain(dag: PipelineDag, costs: Costs, plan: Plan) -> list[str]:
    """Per stage: how much is skipped and where, what thawing it would cost, or why nothing is frozen.

    The bottleneck is the rank with the most busy seconds in the unfrozen batch; no stage is called so where ranks tie.
    "Off the critical path" means: it could end later without a longer planned batch, so skipping more of it gains nothing.

    Args:
        dag: the batch that was planned.
        costs: what it was planned with.
        plan: its ratios.

    Raises:
        RLFreezeError: the plan was made for another batch or for other costs.
        ProfileError: the costs do not fit the batch.
    """
    costs.check(dag.schedule.instructions)
    if set(plan.ratios) != set(costs.freezable):
        wrong = min(set(plan.ratios) ^ set(costs.freezable))
        where = "the plan but not in" if wrong in plan.ratios else "the profile but not in"
        other = "the profile" if wrong in plan.ratios else "the plan"
        raise RLFreezeError(f"{wrong} can be frozen in {where} {other}: explain a plan with the profile it was made for.")
    unfrozen = dag.simulate(costs.seconds({}), costs.transfer_s, costs.tail_s)
    planned = dag.simulate(costs.seconds(plan.ratios), costs.transfer_s, costs.tail_s)
    bottleneck = _bottleneck(unfrozen)
    lines = []
    for stage_id in range(dag.schedule.num_stages):
        freezable = [i for i in costs.freezable if i.stage_id == stage_id]
        skipped = [i for i in freezable if plan.ratios[i] > TOLERANCE]
        if not freezable:
            text = "nothing can be frozen, its backward is no shorter when frozen"
        elif skipped:
            text = _what_is_skipped(dag, costs, plan, planned, freezable, skipped)
        elif plan.max_freeze_ratio == 0:
            text = "nothing is frozen, max_freeze_ratio is 0"
        else:
            text = "nothing is frozen, " + _why_nothing(unfrozen, planned, freezable)
        is_bottleneck = dag.schedule.rank_of(stage_id) == bottleneck
        lines.append(f"stage {stage_id}{_bottleneck_words(unfrozen, bottleneck) if is_bottleneck else ''}: {text}")
    return lines


def _what_is_skipped(
    dag: PipelineDag,
    costs: Costs,
    plan: Plan,
    planned: Timeline,
    freezable: Sequence[Instruction],
    skipped: Sequence[Instruction],
) -> str:
    stage_id = freezable[0].stage_id
    saving_s = {i: costs.durations[i].saving_s for i in freezable}
    share = math.fsum(plan.ratios[i] * saving_s[i] for i in freezable) / math.fsum(saving_s.values())
    text = f"{_percent(share)} of its weight-gradient time is skipped"
    if plan.max_freeze_ratio - TOLERANCE <= plan.stage_freeze_ratio[stage_id] < 1:
        # The limit is on the mean of the ratios, which is not the share of time where backwards differ.
        text += f" (its mean ratio is at the limit, {plan.max_freeze_ratio:g})"
    live = [i for i in freezable if i not in skipped]
    off_path = not _critical(planned).intersection(live)
    if live and len(live) < len(skipped):
        text += f", none of it in {_micro_batches(live, len(freezable))}" + (" (off the critical path)" if off_path else "")
    elif live:
        text += f", all of it in {_micro_batches(skipped, len(freezable))}"
        drain = _drain(dag.schedule.ranks[dag.schedule.rank_of(stage_id)])
        if drain.issuperset(skipped) and not drain.issuperset(freezable):
            text += ", in the drain"
        text += " (the others are off the critical path)" if off_path else ""
    thawed = {i: ratio for i, ratio in plan.ratios.items() if i.stage_id != stage_id}
    longer_s = dag.simulate(costs.seconds(thawed), costs.transfer_s, costs.tail_s).makespan - planned.makespan
    if longer_s > TOLERANCE * planned.makespan:
        return f"{text}; thawed, the batch would take {longer_s:.3g} s longer"
    return f"{text}; thawed, the batch would be no longer"


def _why_nothing(unfrozen: Timeline, planned: Timeline, freezable: Sequence[Instruction]) -> str:
    critical = _critical(planned)
    off = [i for i in freezable if i not in critical]
    if not off:
        return "the planned makespan is reached without it"
    text = "its weight gradients are off the critical path"
    if len(off) < len(freezable):
        return f"{text} in {_micro_batches(off, len(freezable))}, and the planned makespan is reached without the others"
    # Nothing of this stage changed, so it is the other stages that took it off the path.
    return text + (" once other stages are shorter" if _critical(unfrozen).intersection(freezable) else "")


def _critical(timeline: Timeline) -> set[Instruction]:
    """Instructions that could not end later without a longer batch."""
    limit_s = TOLERANCE * timeline.makespan
    return {i for i, slack_s in timeline.slack().items() if slack_s <= limit_s}


def _busy_s(timeline: Timeline) -> list[float]:
    """Seconds that each rank computes."""
    return [math.fsum(timeline.end[i] - timeline.start[i] for i in rank) for rank in timeline.dag.schedule.ranks]


def _bottleneck(unfrozen: Timeline) -> int | None:
    """The rank that computes longest; None where two do, or where there is only one."""
    busy_s = _busy_s(unfrozen)
    if len(busy_s) < 2:
        return None
    second_s, longest_s = sorted(busy_s)[-2:]
    return busy_s.index(longest_s) if longest_s > second_s * (1 + TOLERANCE) else None


def _bottleneck_words(unfrozen: Timeline, rank: int) -> str:
    schedule = unfrozen.dag.schedule
    what = "is the bottleneck"
    if len({i.stage_id for i in schedule.ranks[rank]}) > 1:
        what = f"is on rank {rank}, the bottleneck"
    return f" {what} (busy {_busy_s(unfrozen)[rank]:.3g} s of {unfrozen.makespan:.3g} s unfrozen)"


def _percent(share: float) -> str:
    """Whole percents, but never 0 for something nor 100 for less than all."""
    if share < 0.01:
        return "less than 1 %"
    return "more than 99 %" if 0.99 < share < 1 - TOLERANCE else f"{100 * share:.0f} %"


def _drain(rank: Sequence[Instruction]) -> set[Instruction]:
    """What a rank runs after its last forward."""
    last_forward = max(index for index, i in enumerate(rank) if i.is_forward)
    return set(rank[last_forward + 1 :])


def _micro_batches(instructions: Collection[Instruction], total: int) -> str:
    """Which micro-batches, such as "micro-batches 0 and 5 to 7"; how many where a list would be long."""
    runs: list[list[int]] = []
    for micro_batch_id in sorted(i.micro_batch_id for i in instructions):
        if runs and micro_batch_id == runs[-1][1] + 1:
            runs[-1][1] = micro_batch_id
        else:
            runs.append([micro_batch_id, micro_batch_id])
    if len(runs) > 3:
        return f"{len(instructions)} of {total} micro-batches"
    parts: list[str] = []
    for first, last in runs:
        parts += [f"{first} to {last}"] if last > first + 1 else [str(m) for m in range(first, last + 1)]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"micro-batch{'es' if len(instructions) > 1 else ''} {listed}"
