"""What rank 0 decides and every rank acts on: eligible units and ratios of all stages, as bytes that are the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.freezing.masks import Mask, step_masks
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fit import StageFit
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.planning.solver import Limits, solve

# Below this predicted gain freezing is not worth the progress it costs: the engine leaves the job alone.
WORTHWHILE_GAIN = 0.02
# The prediction is the mean over the real masks of this many steps, since masks differ from step to step.
PREDICTED_STEPS = 8


@dataclass(frozen=True)
class Decision:
    """``ratios[stage][micro_batch]``, ``eligible[stage][unit]``; seconds for one batch."""

    step: int
    ratios: tuple[tuple[float, ...], ...]
    eligible: tuple[tuple[bool, ...], ...]
    unfrozen_makespan_s: float
    predicted_makespan_s: float
    mean_freeze_ratio: float
    verdict: str

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
        for key in ("ratios", "eligible"):
            fields[key] = tuple(tuple(row) for row in fields[key])
        return cls(**fields)

    def masks(self, config: FreezeConfig, shape: StageShape, step: int, scale: float = 1.0) -> tuple[Mask, ...]:
        """The masks of one stage in one step. ``scale`` in [0, 1] is the ramp."""
        ratios = [scale * ratio for ratio in self.ratios[shape.stage_id]]
        one_for_all = config.mask_scope == "step"
        masks = step_masks(
            ratios[:1] if one_for_all else ratios,
            shape.weights,
            self.eligible[shape.stage_id],
            selection=config.selection,
            whole=shape.stage_id == 0 and shape.barrier > 0,
            seed=config.seed,
            step=step,
            stage_id=shape.stage_id,
        )
        return masks * len(ratios) if one_for_all else masks


def decide(
    step: int,
    config: FreezeConfig,
    dag: PipelineDag,
    shapes: Sequence[StageShape],
    fits: Sequence[StageFit],
    eligible: Sequence[Sequence[bool]],
    transfer_s: float,
) -> Decision:
    """Solve for the ratios of every (stage, micro-batch).

    Raises:
        SolverError: no solver gave an answer that holds; the caller keeps its last decision.
    """
    num_micro_batches = dag.schedule.num_micro_batches
    caps = _strict_caps(config, shapes, eligible, num_micro_batches)
    durations = {}
    for instruction in dag.schedule.instructions:
        fit, shape = fits[instruction.stage_id], shapes[instruction.stage_id]
        if instruction.is_forward:
            durations[instruction] = Duration(fit.forward_s, fit.forward_s)
        else:
            durations[instruction] = _backward_duration(config, fit, shape, eligible[instruction.stage_id])
    costs = Costs(durations, transfer_s)
    limits = Limits(
        config.planning.max_freeze_ratio,
        config.planning.time_slack,
        stage_ratio_cap={stage: share for stage, (share, _) in caps.items()},
        stage_mean_cap={stage: mean for stage, (_, mean) in caps.items()},
        equal_in_stage=config.mask_scope == "step",
    )
    plan = solve(dag, costs, limits, solver=config.planning.solver, time_limit_s=config.planning.time_limit_s)
    ratios = tuple(tuple(plan.ratio(shape.stage_id, m) for m in range(num_micro_batches)) for shape in shapes)
    decision = _predicted(step, config, dag, shapes, fits, eligible, transfer_s, plan, ratios)
    if decision.predicted_makespan_s <= (1 - WORTHWHILE_GAIN) * decision.unfrozen_makespan_s:
        return decision
    nothing = tuple((0.0,) * num_micro_batches for _ in shapes)
    return _predicted(step, config, dag, shapes, fits, eligible, transfer_s, plan, nothing)


def _strict_caps(
    config: FreezeConfig, shapes: Sequence[StageShape], eligible: Sequence[Sequence[bool]], num_micro_batches: int
) -> Mapping[int, tuple[float, float]]:
    """Per stage: the most one micro-batch may skip, and the most a stage may skip on average."""
    limit = config.planning.max_freeze_ratio
    if config.selection != "strict":
        return {shape.stage_id: (1.0, limit) for shape in shapes}
    # No unit is frozen in more than max_freeze_ratio of a step's micro-batches, so only whole micro-batches count. With too
    # few micro-batches for even one, or one mask for the whole step, the limit holds over the steps instead.
    whole = int(limit * num_micro_batches + 1e-9) / num_micro_batches
    limit = whole if whole > 0 and config.mask_scope == "micro_batch" else limit
    caps = {}
    for shape in shapes:
        share = shape.share(unit for unit, allowed in enumerate(eligible[shape.stage_id]) if allowed)
        caps[shape.stage_id] = (share, limit * share)
    return caps


def _backward_duration(config: FreezeConfig, fit: StageFit, shape: StageShape, eligible: Sequence[bool]) -> Duration:
    """Linear in the ratio and right at the largest mask that the selection allows."""
    pool = [u for u in range(len(shape.weights)) if config.selection != "strict" or eligible[u]]
    share = shape.share(pool)
    if share <= 0:
        return Duration(fit.backward_s, fit.backward_s)
    saved = fit.backward_s - fit.backward(share, shape.prefix_share(pool))
    return Duration(fit.backward_s, max(0.0, fit.backward_s - saved / share))


def batch_seconds(
    dag: PipelineDag,
    shapes: Sequence[StageShape],
    fits: Sequence[StageFit],
    masks: Sequence[Sequence[Mask]],
    transfer_s: float,
) -> float:
    """The simulated makespan of a batch that runs with exactly these masks (``masks[stage][micro_batch]``)."""
    seconds = {}
    for instruction in dag.schedule.instructions:
        fit, shape = fits[instruction.stage_id], shapes[instruction.stage_id]
        if instruction.is_forward:
            seconds[instruction] = fit.forward_s
        else:
            mask = masks[instruction.stage_id][instruction.micro_batch_id]
            seconds[instruction] = fit.backward(shape.share(mask), shape.prefix_share(mask))
    return dag.simulate(seconds, transfer_s).makespan


def _predicted(
    step: int,
    config: FreezeConfig,
    dag: PipelineDag,
    shapes: Sequence[StageShape],
    fits: Sequence[StageFit],
    eligible: Sequence[Sequence[bool]],
    transfer_s: float,
    plan: Plan,
    ratios: tuple[tuple[float, ...], ...],
) -> Decision:
    num_micro_batches = dag.schedule.num_micro_batches
    unmasked = [((),) * num_micro_batches for _ in shapes]
    unfrozen = batch_seconds(dag, shapes, fits, unmasked, transfer_s)
    draft = Decision(step, ratios, tuple(tuple(map(bool, row)) for row in eligible), unfrozen, unfrozen, 0.0, "")
    makespans, shares = [], []
    # One mask a step is one draw a step, so its mean needs more of them.
    for ahead in range(PREDICTED_STEPS * (num_micro_batches if config.mask_scope == "step" else 1)):
        masks = [draft.masks(config, shape, step + ahead) for shape in shapes]
        makespans.append(batch_seconds(dag, shapes, fits, masks, transfer_s))
        shares += [shape.share(mask) for shape in shapes for mask in masks[shape.stage_id]]
    predicted, mean = sum(makespans) / len(makespans), sum(shares) / len(shares)
    if mean > 0:
        verdict = (
            f"{unfrozen / predicted:.2f}x: {unfrozen:.4f} s -> {predicted:.4f} s at a mean freeze ratio of {mean:.2f}"
        )
    else:
        verdict = f"not worth freezing: the best plan saves less than {WORTHWHILE_GAIN:.0%} of {unfrozen:.4f} s ({plan.verdict})"
    return Decision(step, ratios, draft.eligible, unfrozen, predicted, mean, verdict)
