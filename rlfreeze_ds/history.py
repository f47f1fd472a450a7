"""The steps that a rank remembers: what was frozen in them and what they took. A plan is fitted to these."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlfreeze_ds.freezing.masks import Mask
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.planning.fit import BackwardSample, StageFit, fit_stage, fit_weight
from rlfreeze_ds.telemetry.profiler import StepTiming

# Steps whose timings a fit looks at: enough for medians, few enough to follow a machine that changes.
FIT_STEPS = 64
# So many micro-batches at the beginning and the end of a batch may each have seconds of their own.
NEAR_END = 4


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


@dataclass(frozen=True)
class _Measured:
    """A step, and what a fit takes from it: worked out once, for a fit sees thousands of masks."""

    timing: StepTiming
    masks: StepMasks
    forward_s: tuple[float, ...]
    backward: tuple[BackwardSample, ...]
    """Of whole backwards: an I and its W are added up."""
    weight: tuple[tuple[Mask, float], ...]
    """Of each W, its mask and seconds."""


class StepHistory:
    """Of one stage on one rank."""

    def __init__(self, shape: StageShape) -> None:
        self.shape = shape
        # Warm-up and profiling stay: the steady phase never shows a stage unfrozen or frozen whole, and a fit needs both.
        self._calibration: deque[_Measured] = deque(maxlen=FIT_STEPS)
        self._recent: deque[_Measured] = deque(maxlen=FIT_STEPS)

    def add(self, timing: StepTiming, masks: StepMasks) -> None:
        """Take a step whose times are known."""
        kept = self._calibration if masks.phase in ("warmup", "profile") else self._recent
        kept.append(self._measured(timing, masks))

    def _measured(self, timing: StepTiming, masks: StepMasks) -> _Measured:
        forward = tuple(seconds for (kind, _), seconds in timing.seconds.items() if kind == "F")
        weight = tuple((masks.masks[m], seconds) for (kind, m), seconds in timing.seconds.items() if kind == "W")
        backward = []
        for (kind, micro_batch_id), seconds in timing.with_whole_backwards().seconds.items():
            if kind != "F":
                mask = masks.masks[micro_batch_id]
                backward.append((mask, self.shape.prefix_share(mask), seconds))
        return _Measured(timing, masks, forward, tuple(backward), weight)

    def rebase(self, since_step: int) -> None:
        """The machine is another since ``since_step``: what was measured before counts as so much slower, or faster, as the steps
        since then are on average. They alone rarely show a stage unfrozen or frozen whole, which a fit needs."""
        fit, fresh = self.fit(), [step for step in self._recent if step.masks.step >= since_step]
        if fit is None or not fresh:
            return
        forward = _ratio([(seconds, fit.forward_s) for step in fresh for seconds in step.forward_s])
        backward = _ratio(
            [
                (seconds, fit.backward(sum(fit.unit_shares[unit] for unit in mask), prefix_share))
                for step in fresh
                for mask, prefix_share, seconds in step.backward
            ]
        )
        whole = (forward * fit.forward_s + backward * fit.backward_s) / ((fit.forward_s + fit.backward_s) or 1.0)
        for index, step in enumerate(self._calibration):
            seconds = {key: value * (forward if key[0] == "F" else backward) for key, value in step.timing.seconds.items()}
            timing = replace(step.timing, seconds=seconds, makespan_s=whole * step.timing.makespan_s)
            self._calibration[index] = self._measured(timing, step.masks)
        self._recent.clear()
        self._recent.extend(fresh)

    def fit(self) -> StageFit | None:
        """Seconds of the stage as a function of its mask; None before anything was measured."""
        steps = [*self._calibration, *self._recent]
        fit = fit_stage(
            [seconds for step in steps for seconds in step.forward_s],
            [sample for step in steps for sample in step.backward],
            self.shape.weights,
            first_stage=self.shape.stage_id == 0,
        )
        if fit is None:
            return None
        fit = fit_weight(
            fit, [(sum(fit.unit_shares[unit] for unit in mask), seconds) for step in steps for mask, seconds in step.weight]
        )
        tail_s = max(0.0, float(np.median([step.timing.tail_s for step in steps])))
        return self._beyond(replace(fit, tail_s=tail_s), steps)

    def _beyond(self, fit: StageFit, steps: list[_Measured]) -> StageFit:
        """With what the micro-batches at both ends of a batch take beyond ``fit``. Those between are alike, to a planner too."""
        num_micro_batches = len(steps[-1].masks.masks)
        # Backwards run as they did last.
        kinds = "FB" if fit.weight_s is None else "FIW"
        beyond: dict[str, list[list[float]]] = {kind: [[] for _ in range(num_micro_batches)] for kind in kinds}
        for step in steps:
            if len(step.masks.masks) != num_micro_batches:
                continue
            for (kind, m), seconds in step.timing.seconds.items():
                if NEAR_END <= m < num_micro_batches - NEAR_END or kind not in beyond:
                    continue
                mask = step.masks.masks[m]
                share, prefix_share = sum(fit.unit_shares[unit] for unit in mask), self.shape.prefix_share(mask)
                expected = fit.seconds(kind, share, prefix_share)
                beyond[kind][m].append(seconds - expected)
        medians = {kind: tuple(float(np.median(row)) if row else 0.0 for row in rows) for kind, rows in beyond.items()}
        backward, weight = (medians["B"], ()) if fit.weight_s is None else (medians["I"], medians["W"])
        return replace(fit, forward_beyond_s=medians["F"], backward_beyond_s=backward, weight_beyond_s=weight)

    def unfrozen_makespan_s(self, num_micro_batches: int) -> float | None:
        """Median seconds of the batch, in steps in which nothing was frozen on any stage."""
        measured = [
            step.timing.makespan_s
            for step in [*self._calibration, *self._recent]
            if step.masks.phase in ("warmup", "cooldown") and len(step.masks.masks) == num_micro_batches
        ]
        return float(np.median(measured)) if measured else None

    def steady(self, since_step: int, num_steps: int) -> tuple[tuple[int, float], ...]:
        """(step, seconds of the batch) of the last ``num_steps`` steps of the steady phase since ``since_step``; none if there
        were not as many."""
        steady = tuple(
            (step.masks.step, step.timing.makespan_s)
            for step in self._recent
            if step.masks.phase == "steady" and step.masks.step >= since_step
        )
        return steady[-num_steps:] if len(steady) >= num_steps else ()

    def instruction_seconds(self, since_step: int) -> tuple[tuple[str, int, float], ...]:
        """(kind, micro_batch_id, median seconds) of each instruction, over the steps of the steady phase since ``since_step``."""
        rows: dict[tuple[str, int], list[float]] = {}
        for step in self._recent:
            if step.masks.phase == "steady" and step.masks.step >= since_step:
                for key, seconds in step.timing.seconds.items():
                    rows.setdefault(key, []).append(seconds)
        return tuple((*key, float(np.median(seconds))) for key, seconds in rows.items())

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """As plain JSON values."""
        return {"calibration": _rows(self._calibration), "recent": _rows(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of :meth:`state_dict`; other keys of ``state`` are not looked at."""
        self._calibration.clear()
        self._recent.clear()
        for row in [*state["calibration"], *state["recent"]]:
            seconds = {(kind, micro_batch_id): value for kind, micro_batch_id, value in row["seconds"]}
            masks = StepMasks(row["step"], row["phase"], tuple(tuple(mask) for mask in row["masks"]))
            self.add(StepTiming(row["step"], seconds, row["makespan_s"], row["tail_s"]), masks)


def _ratio(pairs: list[tuple[float, float]]) -> float:
    """Median of measured over expected; 1 where nothing was."""
    ratios = [measured / expected for measured, expected in pairs if expected > 0 and np.isfinite(measured)]
    return float(np.median(ratios)) if ratios else 1.0


def _rows(steps: deque[_Measured]) -> list[dict[str, Any]]:
    return [
        {
            "step": step.timing.step,
            "makespan_s": step.timing.makespan_s,
            "tail_s": step.timing.tail_s,
            "phase": step.masks.phase,
            "masks": [list(mask) for mask in step.masks.masks],
            "seconds": [[kind, m, seconds] for (kind, m), seconds in step.timing.seconds.items()],
        }
        for step in steps
    ]
