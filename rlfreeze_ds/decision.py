"""What rank 0 decides and every rank acts on: eligible units and ratios of all stages, as bytes that are the same everywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.errors import SolverError, TargetError
from rlfreeze_ds.freezing.masks import Mask, step_masks
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag, Timeline
from rlfreeze_ds.planning.fit import StageFit
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import WORTHWHILE_GAIN, Plan
from rlfreeze_ds.planning.progress import StageProgress, kept_by
from rlfreeze_ds.planning.solver import Limits, solve

_log = logging.getLogger(__name__)

# The prediction is the mean over the real masks of this many steps, since masks differ from step to step.
PREDICTED_STEPS = 8
# Share of a first stage's backward above which the input gradients of a frozen prefix are worth freezing its pool whole. Masks of
# single units follow the plan's ratios; whole ones only on average, which lengthens a batch by some 4 %.
WORTHWHILE_PREFIX = 0.1
# A slack that differs by less is not worth another solve.
_SAME_SLACK = 5e-4


@dataclass(frozen=True)
class Decision:
    """``ratios[stage][micro_batch]``, ``eligible[stage][unit]``, ``unit_shares[stage][unit]``: a unit's share of its stage's
    weight-gradient time, as measured; seconds for one batch. The two expectations are those of :class:`planning.plan.Plan`.

    ``orders``: of the stages, in the words of :func:`planning.schedule.from_commands`; none where the order is not planned.
    ``predicted_peak_bytes``: per stage, as of :func:`planning.memory.peak_bytes`; none where memory was not measured.
    ``bubble_ratio``: share of rank-seconds spent waiting. ``whole``: the first stage freezes all of its pool or nothing, for the
    input gradients that a frozen prefix saves.
    """

    step: int
    ratios: tuple[tuple[float, ...], ...]
    eligible: tuple[tuple[bool, ...], ...]
    unit_shares: tuple[tuple[float, ...], ...]
    unfrozen_makespan_s: float
    predicted_makespan_s: float
    mean_freeze_ratio: float
    expected_kept_progress: float
    expected_loss_per_second_gain: float
    verdict: str
    solver: str
    whole: bool
    bubble_ratio: float
    orders: tuple[str, ...] = ()
    predicted_peak_bytes: tuple[int, ...] = ()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the batch that was planned."""
        return len(self.ratios[0])

    def to_json(self) -> str:
        """The bytes that are broadcast and saved."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The reverse of :meth:`to_json`, exact."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Decision:
        """Of JSON values."""
        fields = dict(fields)
        for key in ("ratios", "eligible", "unit_shares"):
            fields[key] = tuple(tuple(row) for row in fields[key])
        fields["orders"] = tuple(fields.get("orders", ()))
        fields["predicted_peak_bytes"] = tuple(fields.get("predicted_peak_bytes", ()))
        return cls(**fields)

    def masks(self, config: FreezeConfig, shape: StageShape, step: int, scale: float = 1.0) -> tuple[Mask, ...]:
        """The masks of one stage in one step. ``scale`` in [0, 1] is the ramp."""
        ratios = [scale * ratio for ratio in self.ratios[shape.stage_id]]
        one_for_all = config.mask_scope == "step"
        masks = step_masks(
            ratios[:1] if one_for_all else ratios,
            self.unit_shares[shape.stage_id],
            self.eligible[shape.stage_id],
            selection=config.selection,
            whole=self.whole and shape.stage_id == 0,
            seed=config.seed,
            step=step,
            stage_id=shape.stage_id,
        )
        return masks * len(ratios) if one_for_all else masks


@dataclass(frozen=True)
class StageFacts:
    """What a plan knows of one stage: its units, its measured seconds, which units may freeze, and what they contribute."""

    shape: StageShape
    fit: StageFit
    eligible: tuple[bool, ...]
    progress: StageProgress

    @property
    def unit_shares(self) -> tuple[float, ...]:
        """Per unit its share of the weight-gradient time; sizes stand in where nothing was measured."""
        return self.fit.unit_shares or self.shape.weights

    def share(self, mask: Mask) -> float:
        """Share of the weight-gradient time that ``mask`` skips."""
        return min(1.0, sum(self.unit_shares[unit] for unit in mask))

    def seconds(self, kind: str, mask: Mask, micro_batch_id: int) -> float:
        """Seconds of an instruction under ``mask``."""
        return self.fit.seconds(kind, self.share(mask), self.shape.prefix_share(mask), micro_batch_id)

    @property
    def whole(self) -> bool:
        """Whether it is frozen all together or not at all: only the first stage, where a frozen prefix saves input gradients."""
        return self.shape.barrier > 0 and self.fit.input_gradient_s > WORTHWHILE_PREFIX * self.fit.backward_s

    def pool(self, selection: str) -> Mask:
        """The units that a selection may freeze."""
        return tuple(unit for unit, allowed in enumerate(self.eligible) if allowed or selection != "strict")


def decide(
    step: int,
    config: FreezeConfig,
    dag: PipelineDag,
    stages: Sequence[StageFacts],
    transfer_s: float,
    plan_ratios: Sequence[Sequence[float]] | None = None,
    beyond: float = 0.0,
) -> Decision:
    """Solve for the ratios of every (stage, micro-batch).

    Args:
        beyond: share of its prediction by which a batch was seen to be longer. This, and what is lost because masks hold
            whole units, is a part of ``time_slack`` that is given up already: up to half of it.
        plan_ratios: ``[stage][micro_batch]``, to be used as they are instead.

    Raises:
        SolverError: no solver gave an answer that holds; the caller keeps its last decision.
    """
    if plan_ratios is not None:
        return _predicted(step, config, dag, stages, transfer_s, plan_ratios, "none", "ratios of the plan file")
    slack = config.planning.time_slack
    plan, decision = _solved(step, config, dag, stages, transfer_s, slack)
    if config.planning.objective == "makespan" and config.planning.target_speedup is None and plan.mean_freeze_ratio > 0:
        lost = decision.predicted_makespan_s * (1 + max(0.0, beyond)) / plan.planned_makespan_s - 1
        left = max(slack - lost, slack / 2)
        if slack - left > _SAME_SLACK:
            try:
                plan, decision = _solved(step, config, dag, stages, transfer_s, left)
            except SolverError as error:
                _log.warning("the plan for all of the slack is taken: %s", error)
    if decision.predicted_makespan_s <= (1 - WORTHWHILE_GAIN) * decision.unfrozen_makespan_s:
        return decision
    nothing = [[0.0] * plan.num_micro_batches for _ in stages]
    return _predicted(step, config, dag, stages, transfer_s, nothing, plan.solver, plan.verdict)


def _solved(
    step: int, config: FreezeConfig, dag: PipelineDag, stages: Sequence[StageFacts], transfer_s: float, time_slack: float
) -> tuple[Plan, Decision]:
    plan = _plan(config, dag, stages, transfer_s, time_slack)
    ratios = [[plan.ratio(facts.shape.stage_id, m) for m in range(plan.num_micro_batches)] for facts in stages]
    return plan, _predicted(step, config, dag, stages, transfer_s, ratios, plan.solver, plan.verdict)


def _plan(
    config: FreezeConfig, dag: PipelineDag, stages: Sequence[StageFacts], transfer_s: float, time_slack: float
) -> Plan:
    planning = config.planning
    durations = {}
    for instruction in dag.schedule.instructions:
        facts = stages[instruction.stage_id]
        if instruction.computes_weight_gradient:
            durations[instruction] = _freezable_duration(config, facts, instruction)
        else:
            seconds = facts.seconds(instruction.kind, (), instruction.micro_batch_id)
            durations[instruction] = Duration(seconds, seconds)
    costs = Costs(durations, transfer_s, _tails(stages))
    caps = _strict_caps(config, stages, dag.schedule.num_micro_batches)
    limits = Limits(
        planning.max_freeze_ratio,
        time_slack,
        stage_ratio_cap={stage: share for stage, (share, _) in caps.items()},
        stage_mean_cap={stage: mean for stage, (_, mean) in caps.items()},
        equal_in_stage=config.mask_scope == "step",
        target_speedup=planning.target_speedup,
    )
    how = {
        "objective": planning.objective,
        "progress": {facts.shape.stage_id: facts.progress for facts in stages},
        "solver": planning.solver,
        "time_limit_s": planning.time_limit_s,
    }
    try:
        return solve(dag, costs, limits, **how)
    except TargetError as error:
        _log.warning("%s The shortest batch is planned instead.", error)
        return solve(dag, costs, replace(limits, target_speedup=None, time_slack=0.0), **how)


def _strict_caps(
    config: FreezeConfig, stages: Sequence[StageFacts], num_micro_batches: int
) -> Mapping[int, tuple[float, float]]:
    """Per stage: the most one micro-batch may skip, and the most a stage may skip on average."""
    limit = config.planning.max_freeze_ratio
    if config.selection != "strict":
        return {facts.shape.stage_id: (1.0, limit) for facts in stages}
    # No unit is frozen in more than max_freeze_ratio of a step's micro-batches, so only whole micro-batches count. With too
    # few micro-batches for even one, or one mask for the whole step, the limit holds over the steps instead.
    whole = int(limit * num_micro_batches + 1e-9) / num_micro_batches
    limit = whole if whole > 0 and config.mask_scope == "micro_batch" else limit
    caps = {}
    for facts in stages:
        share = facts.share(facts.pool(config.selection))
        caps[facts.shape.stage_id] = (share, limit * share)
    return caps


def _freezable_duration(config: FreezeConfig, facts: StageFacts, instruction: Instruction) -> Duration:
    """Of a B or W: linear in the ratio and right at the largest mask that the selection allows. What freezing saves of an I is
    left to the prediction: the program has no ratio there."""
    kind, micro_batch_id = instruction.kind, instruction.micro_batch_id
    unfrozen_s = facts.fit.seconds(kind, 0.0, 0.0, micro_batch_id)
    pool = facts.pool(config.selection)
    share = facts.share(pool)
    if share <= 0:
        return Duration(unfrozen_s, unfrozen_s)
    prefix_share = facts.shape.prefix_share(pool) if facts.whole else 0.0
    saved_s = unfrozen_s - facts.fit.seconds(kind, share, prefix_share, micro_batch_id)
    return Duration(unfrozen_s, max(0.0, unfrozen_s - saved_s / share))


def batch_timeline(
    dag: PipelineDag, stages: Sequence[StageFacts], masks: Sequence[Sequence[Mask]], transfer_s: float
) -> Timeline:
    """Of a batch that runs with exactly these masks (``masks[stage][micro_batch]``), simulated."""
    seconds = {
        i: stages[i.stage_id].seconds(i.kind, masks[i.stage_id][i.micro_batch_id], i.micro_batch_id)
        for i in dag.schedule.instructions
    }
    return dag.simulate(seconds, transfer_s, _tails(stages))


def batch_seconds(
    dag: PipelineDag, stages: Sequence[StageFacts], masks: Sequence[Sequence[Mask]], transfer_s: float
) -> float:
    """Its makespan."""
    return batch_timeline(dag, stages, masks, transfer_s).makespan


def _tails(stages: Sequence[StageFacts]) -> dict[int, float]:
    """By rank, which in DeepSpeed's pipelines is the stage. The tails of all but the last rank to come also hold its waiting for
    that one, in the norm that all share: the shortest counts for all."""
    shortest = min(facts.fit.tail_s for facts in stages)
    return {facts.shape.stage_id: shortest for facts in stages}


def _predicted(
    step: int,
    config: FreezeConfig,
    dag: PipelineDag,
    stages: Sequence[StageFacts],
    transfer_s: float,
    ratios: Sequence[Sequence[float]],
    solver: str,
    why_not: str,
) -> Decision:
    """The decision for these ratios, with what the real masks of some steps will take. ``why_not``: where they are all 0."""
    num_micro_batches = dag.schedule.num_micro_batches
    unfrozen = batch_timeline(dag, stages, [((),) * num_micro_batches for _ in stages], transfer_s)
    unfrozen_s = unfrozen.makespan
    draft = Decision(
        step=step,
        ratios=tuple(tuple(row) for row in ratios),
        eligible=tuple(facts.eligible for facts in stages),
        unit_shares=tuple(facts.unit_shares for facts in stages),
        unfrozen_makespan_s=unfrozen_s,
        predicted_makespan_s=unfrozen_s,
        mean_freeze_ratio=0.0,
        expected_kept_progress=1.0,
        expected_loss_per_second_gain=1.0,
        solver=solver,
        whole=stages[0].whole,
        bubble_ratio=unfrozen.bubble_ratio,
        verdict=f"not worth freezing: the best plan gains less than {WORTHWHILE_GAIN:.0%} over {unfrozen_s:.4f} s ({why_not})",
    )
    if not any(ratio > 0 for row in ratios for ratio in row):
        return draft
    timelines: list[Timeline] = []
    shares: dict[int, list[float]] = {facts.shape.stage_id: [] for facts in stages}
    # One mask a step is one draw a step, so its mean needs more of them.
    for ahead in range(PREDICTED_STEPS * (num_micro_batches if config.mask_scope == "step" else 1)):
        masks = [draft.masks(config, facts.shape, step + ahead) for facts in stages]
        timelines.append(batch_timeline(dag, stages, masks, transfer_s))
        for facts, row in zip(stages, masks, strict=True):
            shares[facts.shape.stage_id] += [facts.share(mask) for mask in row]
    predicted_s = sum(timeline.makespan for timeline in timelines) / len(timelines)
    means = {stage_id: sum(row) / len(row) for stage_id, row in shares.items()}
    mean = sum(means.values()) / len(means)
    progress = {facts.shape.stage_id: facts.progress for facts in stages}
    kept = kept_by(progress, means) / (kept_by(progress, {}) or 1.0)
    gain = kept * unfrozen_s / predicted_s if predicted_s > 0 else 1.0
    return replace(
        draft,
        predicted_makespan_s=predicted_s,
        mean_freeze_ratio=mean,
        bubble_ratio=sum(timeline.bubble_ratio for timeline in timelines) / len(timelines),
        expected_kept_progress=kept,
        expected_loss_per_second_gain=gain,
        verdict=f"{unfrozen_s / predicted_s:.2f}x: {unfrozen_s:.4f} s -> {predicted_s:.4f} s at a mean freeze ratio of "
        f"{mean:.2f}, expected to keep {kept:.2f} of a batch's progress: {gain:.2f}x the loss per second",
    )
