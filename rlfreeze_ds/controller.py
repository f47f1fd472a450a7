"""One per rank: walks a run through its phases, asks the wings, hands masks to the engine.

Phases: warmup (nothing frozen) -> profile (frozen and unfrozen side by side) -> ramp (from zero to the plan) -> steady;
the guard sends any of the last two to cooldown (nothing frozen) -> ramp. All ranks walk in step: transitions depend only on
step counts, on the loss that every rank has, and on rank 0's broadcast decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.control_group import ControlGroup
from rlfreeze_ds.decision import Decision, batch_seconds, decide
from rlfreeze_ds.errors import MaskMismatchError
from rlfreeze_ds.freezing.criterion import MixedCriterion, eligible_units
from rlfreeze_ds.freezing.masks import Mask, masks_checksum
from rlfreeze_ds.freezing.units import FreezeUnit, StageShape
from rlfreeze_ds.guard import LossGuard
from rlfreeze_ds.log import log_rank0, logger
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fit import StageFit, fit_stage, fit_transfer
from rlfreeze_ds.planning.schedule import Schedule
from rlfreeze_ds.telemetry.late_scalar import LateScalar
from rlfreeze_ds.telemetry.profiler import StepTiming
from rlfreeze_ds.telemetry.run_log import RunLog

# Steps whose timings a fit looks at: enough for medians, few enough to follow a machine that changes.
FIT_STEPS = 64
# Steps under the present plan from which the transfer is fitted; its model of the batch then errs least where it is used.
TRANSFER_STEPS = 8


@dataclass(frozen=True)
class StepMasks:
    """The masks of one step on one stage, one per micro-batch."""

    step: int
    phase: str
    masks: tuple[Mask, ...]
    mean_freeze_ratio: float | None = None
    """Over all stages of the pipeline; None where nobody asked (only the run log of rank 0 does)."""

    def live_counts(self, num_units: int) -> list[int]:
        """Per unit, in how many micro-batches of the step it is live."""
        counts = [len(self.masks)] * num_units
        for mask in self.masks:
            for unit in mask:
                counts[unit] -= 1
        return counts


class FreezeController:
    """See the module's docstring. Not for users; the engine owns it as ``engine.freeze_controller``."""

    def __init__(
        self,
        config: FreezeConfig,
        units: Sequence[FreezeUnit],
        shape: StageShape,
        device: torch.device,
        run_log: RunLog,
    ) -> None:
        self.config = config
        self.units = units
        self.shape = shape
        self.device = device
        self.run_log = run_log
        self.group = ControlGroup()
        self.shapes = self._shapes_of_all_stages()
        self.start_afresh(0)

    def start_afresh(self, step: int) -> None:
        """As at the start of a run: nothing known, warm-up first."""
        self.criterion = MixedCriterion(len(self.units), self.config.criterion.ema, self.device)
        self.guard = LossGuard(self.config.guard)
        self.phase = "warmup"
        self.phase_step = 0
        self.step = step
        self.decision: Decision | None = None
        self.transfer_s = 0.0
        # Warm-up and profiling stay: the steady phase never shows a stage unfrozen or frozen whole, and a fit needs both.
        self._calibration: deque[tuple[StepTiming, StepMasks]] = deque(maxlen=FIT_STEPS)
        self._recent: deque[tuple[StepTiming, StepMasks]] = deque(maxlen=FIT_STEPS)
        self._in_flight: dict[int, StepMasks] = {}
        self._losses: dict[int, LateScalar] = {}

    def describe(self) -> str:
        """One line for the log at start."""
        units = sum(len(shape.names) for shape in self.shapes)
        planning = self.config.planning
        if planning.max_freeze_ratio == 0:
            return "max_freeze_ratio is 0, so nothing is ever frozen"
        return (
            f"{units} freeze units on {len(self.shapes)} stages, at most {planning.max_freeze_ratio:.0%} of a stage's "
            f"W time skipped; {self.config.warmup_steps} warm-up and {self.config.profile_steps} profiling steps first"
        )

    # -- one step -----------------------------------------------------------------------------------------------------

    def begin_step(self, num_micro_batches: int) -> StepMasks:
        """The masks of the step that starts now."""
        mean = None
        if self.run_log.active:
            shares = [shape.share(mask) for shape in self.shapes for mask in self._masks(shape, num_micro_batches)]
            mean = sum(shares) / len(shares)
        return StepMasks(self.step, self.phase, self._masks(self.shape, num_micro_batches), mean)

    def first_stage_frozen(self, num_micro_batches: int) -> bool:
        """Whether masks leave nothing of the first stage live throughout the step that began last; known on every rank."""
        first = self.shapes[0]
        return (
            bool(first.names)
            and not first.has_others
            and all(len(mask) == len(first.names) for mask in self._masks(first, num_micro_batches))
        )

    def _masks(self, shape: StageShape, num_micro_batches: int) -> tuple[Mask, ...]:
        """Of any stage, in the step that starts now."""
        if shape.weights and self.config.planning.max_freeze_ratio > 0:
            if self.phase == "profile":
                return self._profile_masks(shape, num_micro_batches)
            if self._usable(num_micro_batches):
                return self.decision.masks(self.config, shape, self.step, self._scale())
        return ((),) * num_micro_batches

    def end_step(
        self,
        step_masks: StepMasks,
        loss: torch.Tensor,
        timings: Sequence[StepTiming],
        schedule: Schedule,
        *,
        applied: bool = True,
    ) -> None:
        """Take what the step brought; re-plan and change phase where due. The guard looks at the loss of the step before:
        this one's may still be on its way from the device, and all ranks must look at the same.

        ``applied``: False where DeepSpeed skipped the update (overflow): such a step moves neither phase nor guard.
        """
        self._in_flight[step_masks.step] = step_masks
        if applied:
            self._losses[step_masks.step] = LateScalar(loss)
        for timing in timings:
            masks = self._in_flight.pop(timing.step)
            (self._calibration if masks.phase in ("warmup", "profile") else self._recent).append((timing, masks))
            self._log_step(timing, masks)
        self._losses.pop(self.step - 3, None)
        known = self._losses[self.step - 1].read() if self.step - 1 in self._losses else None
        self.step += 1
        self.phase_step += applied
        if self.config.planning.max_freeze_ratio == 0:
            return
        if known is not None and self.guard.observe(known) and self.phase in ("ramp", "steady"):
            log_rank0(
                f"step {self.step}: the loss ({known:.4f}) left its trend ({self.guard.average:.4f}); nothing is frozen "
                f"for {self.config.guard.cooldown_steps} steps"
            )
            self.run_log.write("guard", step=self.step, loss=known)
            self._enter("cooldown")
        elif applied:
            self._advance(schedule)

    def _advance(self, schedule: Schedule) -> None:
        config = self.config
        if self.phase == "warmup" and self.phase_step >= config.warmup_steps:
            self.criterion.set_reference()
            self._enter("profile")
        elif self.phase == "profile" and self.phase_step >= config.profile_steps:
            self._replan(schedule)
            self._enter("ramp")
        elif self.phase == "cooldown" and self.phase_step >= config.guard.cooldown_steps:
            self._enter("ramp")
        elif self.phase in ("ramp", "steady"):
            due = self.decision is None or self.step - self.decision.step >= config.replan_interval
            if due or not self._usable(schedule.num_micro_batches):
                self._replan(schedule)
            if self.phase == "ramp" and self.phase_step >= config.ramp_steps:
                self._enter("steady")

    def _enter(self, phase: str) -> None:
        self.phase, self.phase_step = phase, 0

    def _usable(self, num_micro_batches: int) -> bool:
        return (
            self.phase in ("ramp", "steady")
            and self.decision is not None
            and self.decision.num_micro_batches == num_micro_batches
        )

    def _scale(self) -> float:
        return self.phase_step / self.config.ramp_steps if self.phase == "ramp" and self.config.ramp_steps else 1.0

    def _profile_masks(self, shape: StageShape, num_micro_batches: int) -> tuple[Mask, ...]:
        """Freeze every unit of one stage on a random part of the micro-batches, stage by stage, so that no step is lost.

        On the first stage every other turn leaves the first unit live: that tells weight gradients from input gradients.
        """
        turn, stage = divmod(self.phase_step, len(self.shapes))
        if stage != shape.stage_id:
            return ((),) * num_micro_batches
        limit = int(self.config.planning.max_freeze_ratio * num_micro_batches + 1e-9)
        count = min(max(1, num_micro_batches // 2), max(1, limit))
        if num_micro_batches == 1 and turn % 2:
            count = 0
        everything = tuple(range(len(shape.weights)))
        mask = everything[1:] if stage == 0 and turn % 2 else everything
        rng = np.random.default_rng([self.config.seed, self.step, stage])
        chosen = set(rng.permutation(num_micro_batches)[:count].tolist())
        return tuple(mask if m in chosen else () for m in range(num_micro_batches))

    # -- decisions: rank 0 decides, everyone acts on the same bytes ---------------------------------------------------

    def _replan(self, schedule: Schedule) -> None:
        reports = self.group.gather((self.shape.stage_id, self._fit(), self.criterion.statistics()))
        text = self._decide(schedule, reports) if self.group.rank == 0 else ""
        text = self.group.broadcast(text)
        if text:
            self.decision = Decision.from_json(text)
        elif self.decision is not None:
            # A failed solve keeps the last plan, and asks again an interval later.
            self.decision = replace(self.decision, step=self.step)
        self._check_replicas()

    def _decide(self, schedule: Schedule, reports: Sequence[tuple[int, StageFit | None, Any]]) -> str:
        """Rank 0: the new decision, or "" to keep the last. Nothing that goes wrong here may stop a job."""
        try:
            fits = [
                self._slowest([fit for stage, fit, _ in reports if stage == shape.stage_id]) for shape in self.shapes
            ]
            if any(fit is None for fit in fits):
                logger.warning(f"step {self.step}: no timings yet from some stage; the last plan stays")
                return ""
            criterion = self.config.criterion
            all_statistics = [next(stats for stage, _, stats in reports if stage == shape.stage_id) for shape in self.shapes]
            eligible = [
                eligible_units(statistics, criterion.gradient_threshold, criterion.variation_threshold)
                for statistics in all_statistics
            ]
            dag = PipelineDag(schedule)
            self.transfer_s = self._fit_transfer(dag, fits)
            decision = decide(self.step, self.config, dag, self.shapes, fits, eligible, self.transfer_s)
        except Exception as error:  # a solver's or our own: a job that costs money a minute does not end for want of a plan
            logger.debug("no new plan", exc_info=True)
            logger.warning(f"step {self.step}: no new plan ({type(error).__name__}: {error}); the last one stays")
            return ""
        shares = [shape.share(u for u, ok in enumerate(row) if ok) for shape, row in zip(self.shapes, eligible, strict=True)]
        logger.info(f"step {self.step}: plan {decision.verdict}; eligible share {min(shares):.2f} to {max(shares):.2f}")
        self.run_log.write(
            "plan",
            **{**asdict(decision), "eligible": None},
            eligible_share=shares,
            statistics=[_quantiles(statistics) for statistics in all_statistics],
            transfer_s=self.transfer_s,
            fits=[asdict(fit) for fit in fits],
        )
        return decision.to_json()

    def _fit(self) -> StageFit | None:
        forward, backward = [], []
        for timing, masks in [*self._calibration, *self._recent]:
            for (kind, micro_batch_id), seconds in timing.seconds.items():
                if kind == "F":
                    forward.append(seconds)
                else:
                    mask = masks.masks[micro_batch_id]
                    backward.append((self.shape.share(mask), self.shape.prefix_share(mask), seconds))
        return fit_stage(forward, backward, first_stage=self.shape.stage_id == 0)

    @staticmethod
    def _slowest(fits: Sequence[StageFit | None]) -> StageFit | None:
        """Of the data-parallel replicas of a stage the slowest: the others wait for it at the reduction."""
        known = [fit for fit in fits if fit is not None]
        return max(known, key=lambda fit: fit.forward_s + fit.backward_s) if known else None

    def _fit_transfer(self, dag: PipelineDag, fits: Sequence[StageFit]) -> float:
        """From the last steps under the present plan; before there are any, from those in which nothing was frozen."""
        steps = [
            (timing.makespan_s, masks)
            for timing, masks in [*self._calibration, *self._recent]
            if len(masks.masks) == dag.schedule.num_micro_batches
        ]
        if self._usable(dag.schedule.num_micro_batches):
            planned = [row for row in steps if row[1].phase == "steady" and row[1].step >= self.decision.step]
            if len(planned) >= TRANSFER_STEPS:
                return float(np.median([self._transfer_of_step(dag, fits, *row) for row in planned[-TRANSFER_STEPS:]]))
        measured = [makespan_s for makespan_s, masks in steps if masks.phase in ("warmup", "cooldown")]
        if not measured:
            return self.transfer_s
        unmasked = [((),) * dag.schedule.num_micro_batches for _ in self.shapes]
        return fit_transfer(
            lambda transfer: batch_seconds(dag, self.shapes, fits, unmasked, transfer), float(np.median(measured))
        )

    def _transfer_of_step(self, dag: PipelineDag, fits: Sequence[StageFit], makespan_s: float, step: StepMasks) -> float:
        """From one step under the present plan: the masks of the other stages are known too."""
        masks = [self.decision.masks(self.config, shape, step.step) for shape in self.shapes]
        return fit_transfer(lambda transfer: batch_seconds(dag, self.shapes, fits, masks, transfer), makespan_s)

    def _check_replicas(self) -> None:
        """Masks that differ between replicas end in a hang or in silent errors: compare before they are used."""
        if self.group.alone or self.decision is None:
            return
        masks = self.decision.masks(self.config, self.shape, self.step)
        sums = self.group.gather((self.shape.stage_id, masks_checksum(masks)))
        sums = self.group.broadcast(sums)
        for stage in {stage for stage, _ in sums}:
            ranks: dict[int, list[int]] = {}
            for rank, (other, checksum) in enumerate(sums):
                if other == stage:
                    ranks.setdefault(checksum, []).append(rank)
            if len(ranks) > 1:
                raise MaskMismatchError(
                    f"step {self.step}, stage {stage}: replicas disagree on what is frozen: ranks "
                    + " and ".join(str(group) for group in ranks.values())
                    + " have different masks. All ranks must run the same model, versions and config."
                )

    def _shapes_of_all_stages(self) -> list[StageShape]:
        gathered = self.group.broadcast(self.group.gather(self.shape))
        by_stage = {shape.stage_id: shape for shape in gathered}
        return [by_stage[stage] for stage in sorted(by_stage)]

    # -- records ------------------------------------------------------------------------------------------------------

    def _log_step(self, timing: StepTiming, masks: StepMasks) -> None:
        if not self.run_log.active:
            return
        self.run_log.write(
            "step",
            step=masks.step,
            phase=masks.phase,
            makespan_s=timing.makespan_s,
            mean_freeze_ratio=masks.mean_freeze_ratio,
            loss=self._losses[masks.step].read() if masks.step in self._losses else None,  # None: skipped by DeepSpeed
            predicted_makespan_s=self.decision.predicted_makespan_s if self.decision else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on as it was, as plain JSON values; per rank."""
        return {
            "phase": self.phase,
            "phase_step": self.phase_step,
            "step": self.step,
            "transfer_s": self.transfer_s,
            "decision": self.decision.to_json() if self.decision else None,
            "config": self.config.model_dump(),
            "criterion": self.criterion.state_dict(),
            "losses": [[step, loss.read()] for step, loss in self._losses.items()],
            "guard": {"average": self.guard.average, "beyond": self.guard.beyond},
            "shape": asdict(self.shape),
            "calibration": _rows(self._calibration),
            "recent": _rows(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, which must be of this stage and partition. Under another config than it was saved with, the
        decision is left behind: it may break the new limits."""
        self.phase, self.phase_step, self.step = state["phase"], state["phase_step"], state["step"]
        self.transfer_s = state["transfer_s"]
        keep = state["decision"] is not None and state["config"] == self.config.model_dump()
        self.decision = Decision.from_json(state["decision"]) if keep else None
        self.criterion.load_state_dict(state["criterion"])
        self.guard.average, self.guard.beyond = state["guard"]["average"], state["guard"]["beyond"]
        self._in_flight.clear()
        self._losses = {step: LateScalar(torch.tensor(loss, dtype=torch.float64)) for step, loss in state["losses"]}
        for timings, rows in ((self._calibration, state["calibration"]), (self._recent, state["recent"])):
            timings.clear()
            timings.extend(_from_rows(rows))


def _quantiles(statistics: tuple[list[float], list[float]]) -> dict[str, list[float]]:
    """Median, 90 % and largest value over the units: what a user needs to choose thresholds."""
    names = ("gradient", "variation")
    known = [[value for value in values if np.isfinite(value)] or [0.0] for values in statistics]
    return {name: [float(np.quantile(v, q)) for q in (0.5, 0.9, 1.0)] for name, v in zip(names, known, strict=True)}


def _rows(timings: Iterable[tuple[StepTiming, StepMasks]]) -> list[dict[str, Any]]:
    return [
        {
            "step": timing.step,
            "makespan_s": timing.makespan_s,
            "phase": masks.phase,
            "masks": [list(mask) for mask in masks.masks],
            "seconds": [[kind, micro_batch_id, seconds] for (kind, micro_batch_id), seconds in timing.seconds.items()],
        }
        for timing, masks in timings
    ]


def _from_rows(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[StepTiming, StepMasks]]:
    for row in rows:
        seconds = {(kind, micro_batch_id): value for kind, micro_batch_id, value in row["seconds"]}
        yield (
            StepTiming(row["step"], seconds, row["makespan_s"]),
            StepMasks(row["step"], row["phase"], tuple(tuple(mask) for mask in row["masks"])),
        )
