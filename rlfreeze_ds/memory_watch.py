"""What the micro-batches of each stage hold, known on every rank, and what comes of it under ``planning.memory_limit_bytes``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.errors import RLFreezeError, SolverError
from rlfreeze_ds.log import log_rank0
from rlfreeze_ds.planning.lean_orders import first_orders
from rlfreeze_ds.planning.memory import MemoryLimit, StageMemory, peak_bytes
from rlfreeze_ds.planning.schedule import Schedule, from_commands, to_commands

if TYPE_CHECKING:
    from rlfreeze_ds.control_group import ControlGroup
    from rlfreeze_ds.decision import Decision
    from rlfreeze_ds.plan_request import PlanRequest
    from rlfreeze_ds.telemetry.memory_probe import MeasuredMemory
    from rlfreeze_ds.telemetry.run_log import RunLog


class MemoryWatch:
    """Of one rank; the same on all. A step is measured at the start of a run, after a load, and in the first step of a plan,
    where there is a limit or an order of ours. A job with neither has nothing to gain by it."""

    def __init__(self, config: FreezeConfig, num_stages: int, group: ControlGroup, run_log: RunLog) -> None:
        self._planning = config.planning
        self._num_stages = num_stages
        self._group, self._run_log = group, run_log
        self._told = False
        self._wanted = config.planning.memory_limit_bytes is not None or config.planning.schedule != "stock"
        self.start_afresh()

    def start_afresh(self) -> None:
        """Nothing is known."""
        self.stages: tuple[StageMemory, ...] = ()
        """By stage; empty until measured, or where a stage cannot be measured."""
        self.measure_next()
        self._orders = lru_cache(maxsize=8)(self._first_orders)

    def measure_next(self) -> None:
        """Measure the step that starts next."""
        self.due = self._wanted

    def take(self, step: int, stage_id: int, measured: MeasuredMemory, order: str) -> None:
        """Collective, after a measured step. ``order``: what this stage did in it, in words."""
        self.due = False
        reports = self._group.gather((stage_id, measured, order))
        self.stages = self._group.broadcast(self._gathered(step, reports) if self._group.rank == 0 else None)
        self._orders.cache_clear()
        if self.stages:
            self._tell(order.count("F"))

    def orders(self, num_micro_batches: int) -> tuple[str, ...]:
        """Of all stages in words, where the limit asks for another order than the configured one."""
        if self._planning.memory_limit_bytes is None or not self.stages or self._planning.schedule == "stock":
            return ()
        return self._orders(num_micro_batches)

    def _first_orders(self, num_micro_batches: int) -> tuple[str, ...]:
        planning = self._planning
        usual = first_orders(planning.schedule, self._num_stages, num_micro_batches, self.stages, None)[0]
        chosen = first_orders(planning.schedule, self._num_stages, num_micro_batches, self.stages, planning.memory_limit_bytes)[0]
        return () if chosen == usual else to_commands(chosen)

    def _gathered(self, step: int, reports: Sequence[tuple[int, MeasuredMemory, str]]) -> tuple[StageMemory, ...]:
        """Rank 0: the stages anew. Replicas of a stage hold alike; the most of them counts."""
        stages: list[StageMemory] = []
        ordered = [[report for report in reports if report[0] == stage_id] for stage_id in range(self._num_stages)]
        for stage_id, replicas in enumerate(ordered):
            unknown = next((measured.why for _, measured, _ in replicas if measured.stage is None), None)
            if unknown is not None:
                self._tell_unknown(stage_id, unknown)
                return ()
            found = [measured.stage for _, measured, _ in replicas if measured.stage is not None]
            if self.stages and not any(measured.complete for _, measured, _ in replicas):
                found.append(self.stages[stage_id])  # frozen units keep less than the plan has to reckon with
            stage = found[0]
            for other in found[1:]:
                stage = stage.largest(other)
            stages.append(stage)
        if self.stages:
            # An order with whole backwards keeps no pairs: what was seen of them stays.
            stages = [
                replace(stage, pair_bytes=stage.pair_bytes or known.pair_bytes)
                for stage, known in zip(stages, self.stages, strict=True)
            ]
        measured = [replicas[0][1] for replicas in ordered]
        try:
            predicted = peak_bytes(from_commands([replicas[0][2] for replicas in ordered]), stages)
        except RLFreezeError:  # an order of somebody's own
            predicted = ()
        self._run_log.write(
            "memory",
            step=step,
            stages=[asdict(stage) for stage in stages],
            predicted_peak_bytes=predicted,
            measured_peak_bytes=[max(m.peak_bytes or 0 for _, m, _ in replicas) for replicas in ordered],
            most_micro_batches=[stage.most_micro_batches for stage in measured],
            most_pairs=[stage.most_pairs for stage in measured],
        )
        return tuple(stages)

    def _tell(self, num_micro_batches: int) -> None:
        """Once: that the limit is exceeded, and what comes of it."""
        planning = self._planning
        limit = planning.memory_limit_bytes
        if self._told or limit is None or self._group.rank != 0:
            return
        orders = (self._num_stages, num_micro_batches, self.stages)
        usual, chosen = (peak_bytes(first_orders(planning.schedule, *orders, least)[0], self.stages) for least in (None, limit))
        what = "train_micro_batch_size_per_gpu, turn on activation checkpointing, or raise the limit"
        if planning.schedule != "planned" and max(usual) > limit:
            line = f'{_most(usual)} under planning.schedule "{planning.schedule}".'
            if planning.schedule == "stock":
                line += f' It runs as it is; lower {what}, or set planning.schedule "planned".'
            elif max(chosen) <= limit:
                line += f" DeepSpeed's order with whole backwards runs in its place: {_most(chosen)}."
            else:
                line += f" DeepSpeed's order with whole backwards runs in its place, but {_most(chosen)} then; lower {what}."
        elif max(chosen) > limit:
            line = f"no order is known that keeps it; the one that holds least runs, in which {_most(chosen)}. Lower {what}."
        else:
            return
        self._told = True
        log_rank0(f"planning.memory_limit_bytes = {limit}: {line}", logging.WARNING)

    def _tell_unknown(self, stage_id: int, why: str) -> None:
        limit = self._planning.memory_limit_bytes
        if limit is not None and not self._told:
            self._told = True
            log_rank0(
                f"planning.memory_limit_bytes = {limit}: not looked at, since the memory of stage {stage_id} cannot be measured "
                f"({why}).",
                logging.WARNING,
            )

    def state_dict(self) -> list[dict[str, int]]:
        """As plain JSON values."""
        return [asdict(stage) for stage in self.stages]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """The reverse of :meth:`state_dict`; the next step is measured all the same, for the batch may have another size."""
        self.start_afresh()
        if len(state) == self._num_stages:
            self.stages = tuple(StageMemory.from_fields(stage) for stage in state)


def _most(peaks: Sequence[int]) -> str:
    stage_id = max(range(len(peaks)), key=peaks.__getitem__)
    return f"stage {stage_id} holds {peaks[stage_id]} bytes of activations and kept pairs"


# -- of a plan -----------------------------------------------------------------------------------------------------------------


def memory_limit(request: PlanRequest) -> MemoryLimit | None:
    """What a search must keep to; None where there is no limit, or nothing was measured."""
    limit = request.config.planning.memory_limit_bytes
    return MemoryLimit(request.memory, limit) if limit is not None and request.memory else None


def starting_orders(request: PlanRequest) -> tuple[Schedule, ...]:
    """What a job with a planned order runs before there is a plan, then other orders to look at; see :func:`first_orders`."""
    limit = memory_limit(request)
    return first_orders(
        "planned", len(request.shapes), request.num_micro_batches, request.memory, limit.limit_bytes if limit else None
    )


def splits_backwards(schedule: Schedule) -> bool:
    """Whether it has any I: then there is something to search."""
    return any(instruction.kind == "I" for instruction in schedule.instructions)


def predicted_peaks(request: PlanRequest, schedule: Schedule) -> tuple[int, ...]:
    """Per stage; none where nothing was measured."""
    return peak_bytes(schedule, request.memory) if request.memory else ()


def check_peaks(request: PlanRequest, decision: Decision, schedule: Schedule | None) -> None:
    """A planned order keeps the limit, or holds no more than the least that is known where none keeps it.

    Args:
        schedule: the order that was planned, if it was.

    Raises:
        SolverError
    """
    peaks = decision.predicted_peak_bytes
    if not request.memory:
        wrong = f"{peaks}, must be none: nothing was measured" if peaks else ""
    elif len(peaks) != len(request.shapes) or any(type(peak) is not int or peak < 0 for peak in peaks):
        wrong = f"{peaks}, must be {len(request.shapes)} integers >= 0"
    elif schedule is None:
        wrong = ""
    elif peaks != (expected := peak_bytes(schedule, request.memory)):
        wrong = f"{peaks}, must be {expected}, as of its order"
    else:
        limit = memory_limit(request)
        allowed = max(limit.limit_bytes, max(peak_bytes(starting_orders(request)[0], request.memory))) if limit else max(peaks)
        wrong = f"{peaks}, must be at most {allowed}" if max(peaks) > allowed else ""
    if wrong:
        raise SolverError(f"an absurd plan: predicted_peak_bytes = {wrong}")
