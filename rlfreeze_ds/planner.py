"""Planning beside training: every rank reports, rank 0's process solves, every rank gets the same answer in the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.control_group import ControlGroup
from rlfreeze_ds.decision import Decision
from rlfreeze_ds.errors import ConfigError, RLFreezeError, SolverError, in_words
from rlfreeze_ds.freezing.criterion import eligible_units
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.log import logger
from rlfreeze_ds.plan_process import PlanProcess
from rlfreeze_ds.plan_request import PlanAnswer, PlanRequest, check_answer
from rlfreeze_ds.planning.fit import StageFit
from rlfreeze_ds.planning.memory import StageMemory
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.planning.progress import StageGradients
from rlfreeze_ds.policy.observation import Thresholds
from rlfreeze_ds.telemetry.run_log import RunLog


@dataclass(frozen=True)
class StageReport:
    """What one rank knows for a plan: its stage, the order it ran in, its fitted seconds, the statistics and the gradients of its
    units, the decision in force with what the last batches under it took, as wholes and (kind, micro_batch_id, seconds) by
    instruction, and the seconds of a batch with nothing frozen. None where nothing was measured."""

    stage_id: int
    order: str
    fit: StageFit | None
    statistics: tuple[list[float], list[float]]
    gradients: StageGradients
    present: Decision | None
    steady: tuple[tuple[int, float], ...]
    seconds: tuple[tuple[str, int, float], ...]
    unfrozen_makespan_s: float | None


class Planner:
    """One request at a time. ``pending`` is equal on all ranks: between :meth:`ask` and the :meth:`answer` that ends it."""

    def __init__(
        self, config: FreezeConfig, shapes: Sequence[StageShape], group: ControlGroup, run_log: RunLog, *, normalised: bool
    ) -> None:
        self.config = config
        self.normalised = normalised
        self.shapes = tuple(shapes)
        self.group = group
        self.run_log = run_log
        self.plan_ratios = self._plan_file()
        self.pending = False
        self.transfer_s = 0.0
        self._process = PlanProcess()
        self._request: PlanRequest | None = None
        self._statistics: list[tuple[list[float], list[float]]] = []
        self._failure: str | None = None
        self._seconds: list[tuple[tuple[str, int, float], ...]] = []
        self._solver = ""

    def ask(self, step: int, thresholds: Thresholds, report: StageReport, memory: tuple[StageMemory, ...] = ()) -> None:
        """Collective. Start to solve for ``step`` with rank 0's thresholds; returns before it is solved.

        Args:
            memory: per stage, where it was measured.
        """
        reports = self.group.gather(report)
        self.pending = True
        if self.group.rank != 0:
            return
        self._failure = None
        try:
            self._request = self._gathered(step, thresholds, reports, memory)
            self._process.send(self._request.to_json(), self.config.planning.time_limit_s)
        except Exception as error:  # nothing that goes wrong with a plan may stop a job, here and below
            logger.debug("no new plan", exc_info=True)
            self._failure = in_words(error)

    def answer(self, step: int, *, wait: bool, keeps: bool) -> Decision | None:
        """Collective. The decision, on every rank; None with ``pending`` still set: not yet (never if ``wait``); None without:
        there will be none, and rank 0 has said why.

        ``keeps``: whether there is a last plan that stays.
        """
        text = self._receive(step, wait, keeps) if self.group.rank == 0 else None
        text = self.group.broadcast(text)
        self.pending = text is None
        return Decision.from_json(text) if text else None

    def cancel(self) -> None:
        """Forget the request, on every rank; the next one starts a process of its own."""
        self.pending = False
        self._process.stop()

    def _plan_file(self) -> tuple[tuple[float, ...], ...] | None:
        """Collective. The ratios of ``planning.plan_file``, which only rank 0 has to see.

        Raises:
            ConfigError: on every rank.
        """
        path = self.config.planning.plan_file
        if path is None:
            return None
        found = self.group.broadcast(_read_plan(path, self.config, len(self.shapes)) if self.group.rank == 0 else None)
        if isinstance(found, str):
            raise ConfigError(f"rlfreeze.planning.plan_file: {found}")
        return found

    def _gathered(
        self, step: int, thresholds: Thresholds, reports: Sequence[StageReport], memory: tuple[StageMemory, ...]
    ) -> PlanRequest:
        stages = [[report for report in reports if report.stage_id == shape.stage_id] for shape in self.shapes]
        fits = [_slowest([report.fit for report in replicas]) for replicas in stages]
        if None in fits:
            raise SolverError(f"no timings yet from stage {fits.index(None)}")
        self._seconds = [replicas[0].seconds for replicas in stages]
        num_micro_batches = stages[0][0].order.count("F")
        if self.plan_ratios is not None and len(self.plan_ratios[0]) != num_micro_batches:
            path = self.config.planning.plan_file
            raise SolverError(f"{path} is for {len(self.plan_ratios[0])} micro-batches, a batch has {num_micro_batches}")
        self._statistics = [replicas[0].statistics for replicas in stages]
        return PlanRequest(
            step=step,
            config=self.config,
            orders=tuple(replicas[0].order for replicas in stages),
            shapes=self.shapes,
            fits=tuple(fits),
            eligible=tuple(
                tuple(eligible_units(statistics, thresholds.gradient, thresholds.variation)) for statistics in self._statistics
            ),
            gradients=tuple(replicas[0].gradients for replicas in stages),
            num_replicas=len(stages[0]),
            normalised=self.normalised,
            plan_ratios=self.plan_ratios,
            present=reports[0].present,
            steady=reports[0].steady,
            unfrozen_makespan_s=reports[0].unfrozen_makespan_s,
            transfer_s=self.transfer_s,
            memory=memory,
        )

    def _receive(self, step: int, wait: bool, keeps: bool) -> str | None:
        """Rank 0: the decision as text, "" if there will be none, None if it is not there yet."""
        try:
            if self._failure is not None:
                raise SolverError(self._failure)
            text = self._process.receive(wait=wait)
            if text is None:
                return None
            answer = PlanAnswer.from_json(text)
            check_answer(self._request, answer)
        except Exception as error:
            logger.debug("no new plan", exc_info=True)
            stays = "the last one stays" if keeps else "nothing is frozen without one"
            logger.warning(f"step {step}: no new plan ({in_words(error)}); {stays}")
            return ""
        self._log(step, answer)
        self.transfer_s = answer.transfer_s
        return answer.decision.to_json()

    def _log(self, step: int, answer: PlanAnswer) -> None:
        for warning in answer.warnings:
            logger.warning(warning)
        decision, request = answer.decision, self._request
        shares = [
            shape.share(unit for unit, allowed in enumerate(row) if allowed)
            for shape, row in zip(self.shapes, decision.eligible, strict=True)
        ]
        logger.info(f"step {step}: plan {decision.verdict}; eligible share {min(shares):.2f} to {max(shares):.2f}")
        if decision.solver != self._solver:
            self._solver = decision.solver
            logger.info(f"step {step}: plans are solved with {decision.solver}")
        if request.present is not None and request.steady:
            self.run_log.write(
                "batch",
                step=request.step,
                orders=request.orders,
                ratios=request.present.ratios,
                predicted_makespan_s=request.present.predicted_makespan_s,
                measured_makespan_s=float(np.median([seconds for _, seconds in request.steady])),
                transfer_s=answer.transfer_s,
                seconds=self._seconds,
                fits=[asdict(fit) for fit in request.fits],
            )
        self.run_log.write(
            "plan",
            **{**vars(decision), "eligible": None},
            used_from_step=step,
            eligible_share=shares,
            statistics=[_quantiles(statistics) for statistics in self._statistics],
            transfer_s=answer.transfer_s,
            fits=[asdict(fit) for fit in request.fits],
        )


def _read_plan(path: str, config: FreezeConfig, num_stages: int) -> tuple[tuple[float, ...], ...] | str:
    """Ratios by stage and micro-batch, or what is wrong with them."""
    try:
        plan = Plan.load(path)
    except RLFreezeError as error:
        return str(error)
    if plan.num_stages != num_stages:
        return f"{path} is a plan for {plan.num_stages} stages, this job has {num_stages}; plan with a profile of this job."
    limit = config.planning.max_freeze_ratio
    if max(plan.stage_freeze_ratio, default=0.0) > limit + 1e-6:
        return (
            f"{path} has a stage with a mean ratio of {max(plan.stage_freeze_ratio):.3g}, above max_freeze_ratio {limit:g} of "
            "this job; raise that, or plan with --max-freeze-ratio."
        )
    return tuple(tuple(plan.ratio(s, m) for m in range(plan.num_micro_batches)) for s in range(num_stages))


def _slowest(fits: Sequence[StageFit | None]) -> StageFit | None:
    """Of the data-parallel replicas of a stage the slowest: the others wait for it at the reduction."""
    known = [fit for fit in fits if fit is not None]
    return max(known, key=lambda fit: fit.forward_s + fit.backward_s) if known else None


def _quantiles(statistics: tuple[list[float], list[float]]) -> dict[str, list[float]]:
    """Median, 90 % and largest value over the units: what a user needs to choose thresholds."""
    names = ("gradient", "variation")
    known = [[value for value in values if np.isfinite(value)] or [0.0] for values in statistics]
    return {name: [float(np.quantile(v, q)) for q in (0.5, 0.9, 1.0)] for name, v in zip(names, known, strict=True)}
