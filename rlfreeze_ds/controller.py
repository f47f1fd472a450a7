"""One per rank: walks a run through its phases, asks the wings, hands masks to the engine.

Phases: warmup (nothing frozen) -> profile (frozen and unfrozen side by side) -> ramp (from zero to the plan) -> steady;
the guard sends any of the last two to cooldown (nothing frozen) -> ramp. All ranks walk in step: transitions depend only on
step counts, on the loss that every rank has, and on rank 0's broadcast answers. Nothing waits for a plan: the last one holds
meanwhile, and the ramp begins with the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.control_group import ControlGroup
from rlfreeze_ds.decision import Decision
from rlfreeze_ds.errors import MaskMismatchError
from rlfreeze_ds.freezing.criterion import MixedCriterion
from rlfreeze_ds.freezing.gradients import on_device
from rlfreeze_ds.freezing.masks import Mask, masks_checksum
from rlfreeze_ds.freezing.noise import GradientNoise
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.freezing.units import FreezeUnit
from rlfreeze_ds.guard import LossGuard
from rlfreeze_ds.history import StepHistory, StepMasks
from rlfreeze_ds.log import log_rank0
from rlfreeze_ds.memory_watch import MemoryWatch
from rlfreeze_ds.planner import Planner, StageReport
from rlfreeze_ds.planning.progress import StageGradients
from rlfreeze_ds.telemetry.late_scalar import LateScalar
from rlfreeze_ds.telemetry.memory_probe import MeasuredMemory
from rlfreeze_ds.telemetry.profiler import StepTiming
from rlfreeze_ds.telemetry.run_log import RunLog
from rlfreeze_ds.thresholds import RunThresholds

# Steps between two looks at whether the predicted batch time comes true: enough for a median.
DRIFT_STEPS = 16
# Steps under the present plan that tell what a transfer takes.
TRANSFER_STEPS = 8


class FreezeController:
    """See the module's docstring. Not for users; the engine owns it as ``engine.freeze_controller``."""

    def __init__(
        self,
        config: FreezeConfig,
        units: Sequence[FreezeUnit],
        shape: StageShape,
        device: torch.device,
        run_log: RunLog,
        *,
        normalised: bool = True,
    ) -> None:
        self.config = config
        self.freezes = config.planning.max_freeze_ratio > 0
        self.plans = self.freezes or config.planning.schedule == "planned"
        self.units = units
        self.shape = shape
        self.device = device
        self.run_log = run_log
        self.group = ControlGroup()
        self.shapes = self._shapes_of_all_stages()
        self.planner = Planner(config, self.shapes, self.group, run_log, normalised=normalised)
        self.thresholds = RunThresholds(config, self.group, run_log)
        self.memory = MemoryWatch(config, len(self.shapes), self.group, run_log)
        self.start_afresh(0)

    def start_afresh(self, step: int) -> None:
        """As at the start of a run: nothing known, warm-up first."""
        self.criterion = MixedCriterion(len(self.units), self.config.criterion.ema, self.device)
        self.noise = GradientNoise(len(self.units), self.device)
        self.guard = LossGuard(self.config.guard)
        self.phase = "warmup"
        self.phase_step = 0
        self.step = step
        self.decision: Decision | None = None
        self.asked: tuple[int, int] | None = None  # step and micro-batches of the last request
        self.planned = step  # from which step on the decision has held
        self.drifted = False  # whether it was asked for because the last one's prediction did not come true
        self.thresholds.start_afresh(step)
        self.memory.start_afresh()
        self.planner.cancel()
        self.planner.transfer_s = 0.0
        self.history = StepHistory(self.shape)
        self._in_flight: dict[int, StepMasks] = {}
        self._losses: dict[int, LateScalar] = {}

    def describe(self) -> str:
        """One line for the log at start."""
        units = sum(len(shape.names) for shape in self.shapes)
        planning = self.config.planning
        if not self.freezes:
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

    def orders(self, num_micro_batches: int) -> tuple[str, ...]:
        """Of all stages in the step that starts now, as planned or as the memory limit asks for; none: the configured order."""
        planned = self.decision.orders if self._usable(num_micro_batches) else ()
        return planned or self.memory.orders(num_micro_batches)

    def take_memory(self, measured: MeasuredMemory, order: str) -> None:
        """Collective, after a step that was measured (``memory.due``) and before its :meth:`end_step`. ``order``: as there."""
        self.memory.take(self.step, self.shape.stage_id, measured, order)

    def first_stage_frozen(self, num_micro_batches: int) -> bool:
        """Whether masks leave nothing of the first stage live throughout the step that began last; known on every rank."""
        first = self.shapes[0]
        if not first.names or first.has_others:
            return False
        if self.phase != "profile" and not self._usable(num_micro_batches):
            return False
        if self.phase != "profile" and self.config.mask_scope == "micro_batch" and 0.0 in self.decision.ratios[0]:
            return False  # seen without making the masks
        return all(len(mask) == len(first.names) for mask in self._masks(first, num_micro_batches))

    def _masks(self, shape: StageShape, num_micro_batches: int) -> tuple[Mask, ...]:
        """Of any stage, in the step that starts now."""
        if shape.weights and self.freezes:
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
        order: str,
        *,
        applied: bool = True,
    ) -> None:
        """Take what the step brought; re-plan and change phase where due. The guard looks at the loss of the step before:
        this one's may still be on its way from the device, and all ranks must look at the same.

        ``order``: what this stage did in the step, as it ran: "F SA RG B ..." (:func:`planning.schedule.from_commands`).
        ``applied``: False where DeepSpeed skipped the update (overflow): such a step moves neither phase nor guard.
        """
        self._in_flight[step_masks.step] = step_masks
        if applied:
            self._losses[step_masks.step] = LateScalar(loss)
        for timing in timings:
            masks = self._in_flight.pop(timing.step)
            self.history.add(timing, masks)
            self._log_step(timing, masks)
            if masks.phase in ("ramp", "steady"):
                self.thresholds.add_seconds(timing.makespan_s)
        self._losses.pop(self.step - 3, None)
        known = self._losses[self.step - 1].read() if self.step - 1 in self._losses else None
        self.step += 1
        self.phase_step += applied
        if not self.plans:
            return
        if self.planner.pending:
            self._take_answer()
        if known is not None:
            self.thresholds.add_loss(known)
        if self.freezes and known is not None and self.guard.observe(known) and self.phase in ("ramp", "steady"):
            log_rank0(
                f"step {self.step}: the loss ({known:.4f}) left its trend ({self.guard.average:.4f}); nothing is frozen "
                f"for {self.config.guard.cooldown_steps} steps"
            )
            self.run_log.write("guard", step=self.step, loss=known)
            self._enter("cooldown")
        elif applied:
            self._advance(order)

    def observe_gradients(self, norm: torch.Tensor, step_masks: StepMasks, num_replicas: int) -> None:
        """Take the norms of a step's reduced gradients, [num_units]."""
        self.criterion.observe(norm)
        live_counts = step_masks.live_counts(len(self.units))
        if not self.config.gradient_rescale:  # then they are not yet means over the live micro-batches
            factors = [len(step_masks.masks) / max(1, live) for live in live_counts]
            norm = norm * on_device(factors, norm.dtype, norm.device)
        self.noise.observe(norm, live_counts, num_replicas)

    def forget_gradients(self) -> None:
        """Undo the last :meth:`observe_gradients`: its step was skipped."""
        self.criterion.forget_last()
        self.noise.forget_last()

    def _advance(self, order: str) -> None:
        config = self.config
        if self.phase == "warmup" and self.phase_step >= config.warmup_steps:
            self.criterion.set_reference()
            self.thresholds.set_reference()
            # Gradients fall fast at first, and with all micro-batches live they tell nothing of the noise.
            self.noise = GradientNoise(len(self.units), self.device)
            if self.freezes:
                self._enter("profile")
            else:
                self._enter("ramp")
                self._ask(order)
        elif self.phase == "profile" and self.phase_step >= config.profile_steps:
            self._enter("ramp")
            self._ask(order)
        elif self.phase == "cooldown" and self.phase_step >= config.guard.cooldown_steps:
            self._enter("ramp")
        elif self.phase in ("ramp", "steady"):
            if not self.planner.pending:
                if self.thresholds.waits:
                    self._take_thresholds(order)
                elif self._due(order.count("F")):
                    self.drifted = False
                    self._end_window(order)
                elif self._drifts():
                    self.drifted = True
                    self.history.rebase(self.step - DRIFT_STEPS // 2)
                    self._ask(order)
            if self.planner.pending and self.decision is None:
                self.phase_step = 0  # nothing to ramp up to yet
            elif self.phase == "ramp" and self.phase_step >= config.ramp_steps:
                self._enter("steady")

    def _due(self, num_micro_batches: int) -> bool:
        """Also after a request that brought no plan it takes an interval, or another batch size, to ask again."""
        return (
            self.asked is None
            or self.step - self.asked[0] >= self.thresholds.interval
            or self.asked[1] != num_micro_batches
        )

    def _drifts(self) -> bool:
        """Collective every so many steps. Whether batches take other than the predicted time, as rank 0 measures it.

        Once for a plan: where a new one does not help either, the next waits for its interval.
        """
        since = self.step - self.planned
        if self.phase != "steady" or self.decision is None or self.drifted or since == 0 or since % DRIFT_STEPS:
            return False
        message = ""
        if self.group.rank == 0:
            seconds = [seconds for _, seconds in self.history.steady(self.planned, DRIFT_STEPS)]
            measured_s, predicted_s = float(np.median(seconds)) if seconds else 0.0, self.decision.predicted_makespan_s
            drift = measured_s / predicted_s - 1 if seconds and predicted_s > 0 else 0.0
            if abs(drift) > self.config.planning.drift_tolerance:
                message = f"batches take {measured_s:.4g} s, {drift:+.0%} against the plan's {predicted_s:.4g} s"
        message = self.group.broadcast(message)
        if message:
            log_rank0(f"step {self.step}: {message}; planning anew")
            self.run_log.write("drift", step=self.step, message=message)
        return bool(message)

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

    # -- windows: a policy moves the thresholds between them ------------------------------------------------------------

    def _end_window(self, order: str) -> None:
        """Ask the policy where there is one to ask and something to tell it; then for a plan."""
        if not self.thresholds.moves or not self._usable(order.count("F")):
            self._ask(order)
            return
        self.thresholds.end_window(self.step, self.decision, self.history.unfrozen_makespan_s(order.count("F")))
        self._take_thresholds(order)

    def _take_thresholds(self, order: str) -> None:
        """Collective. Plan with what the policy said, once it did or was waited for long enough."""
        if self.thresholds.answered(self.step):
            self._ask(order)
            self.asked = (self.thresholds.window_end, self.asked[1])  # a window is as long however long the answer took

    def close(self) -> None:
        """The job ends: no process or thread of ours is left."""
        self.planner.cancel()
        self.thresholds.close()

    # -- plans: rank 0's process solves beside training, everyone acts on the same bytes -------------------------------

    def _ask(self, order: str) -> None:
        num_micro_batches = order.count("F")
        self.asked = (self.step, num_micro_batches)
        self.planner.ask(
            self.step,
            self.thresholds.current,
            StageReport(
                self.shape.stage_id,
                order,
                self.history.fit(),
                self.criterion.statistics(),
                self._gradients(),
                self.decision if self._usable(num_micro_batches) else None,
                self.history.steady(self.planned, TRANSFER_STEPS),
                self.history.instruction_seconds(self.planned),
                self.history.unfrozen_makespan_s(num_micro_batches),
            ),
            self.memory.stages,
        )
        if not self.config.planning.background:
            self.settle()

    def _gradients(self) -> StageGradients:
        signal, noise = self.noise.estimates()
        sizes = (sum(parameter.numel() for parameter in unit.parameters) for unit in self.units)
        return StageGradients(tuple(self.criterion.norms()), tuple(signal), tuple(noise), tuple(sizes))

    def settle(self) -> None:
        """Collective. Wait for the answer to a pending request, and act on it."""
        if self.planner.pending:
            self._take_answer(wait=True)

    def _take_answer(self, *, wait: bool = False) -> None:
        """Act on the answer, if there is one, on all ranks in the same step."""
        first = self.decision is None
        decision = self.planner.answer(self.step, wait=wait, keeps=not first)
        if self.planner.pending:
            return
        if decision is not None:
            self.decision, self.planned = decision, self.step
            self.memory.measure_next()  # the first step of the plan
            if first and self.phase in ("ramp", "steady"):
                self._enter("ramp")
        self._check_replicas()

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
            "transfer_s": self.planner.transfer_s,
            "asked": self.asked,
            "planned": self.planned,
            "drifted": self.drifted,
            "tuner": self.thresholds.state_dict(),
            "decision": self.decision.to_json() if self.decision else None,
            "config": self.config.model_dump(),
            "criterion": self.criterion.state_dict(),
            "noise": self.noise.state_dict(),
            "losses": [[step, loss.read()] for step, loss in self._losses.items()],
            "guard": {"average": self.guard.average, "beyond": self.guard.beyond},
            "shape": asdict(self.shape),
            "memory": self.memory.state_dict(),
            **self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, which must be of this stage and partition. Under another config than it was saved with, the
        decision is left behind: it may break the new limits."""
        self.phase, self.phase_step, self.step = state["phase"], state["phase_step"], state["step"]
        self.planner.cancel()
        self.planner.transfer_s = state["transfer_s"]
        same = state["config"] == self.config.model_dump()
        self.decision = Decision.from_json(state["decision"]) if same and state["decision"] is not None else None
        self.planned, self.drifted = state["planned"], state["drifted"]
        self.asked = tuple(state["asked"]) if same and state["asked"] is not None else None
        self.thresholds.load_state_dict(state.get("tuner") if same else None)
        self.memory.load_state_dict(state.get("memory", ()))
        self.criterion.load_state_dict(state["criterion"])
        self.noise.load_state_dict(state["noise"])
        self.guard.average, self.guard.beyond = state["guard"]["average"], state["guard"]["beyond"]
        self._in_flight.clear()
        self._losses = {step: LateScalar(torch.tensor(loss, dtype=torch.float64)) for step, loss in state["losses"]}
        self.history.load_state_dict(state)
