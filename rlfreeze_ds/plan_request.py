"""What a plan is made from and what comes of it, as JSON between a training job and the process that plans for it. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.decision import Decision, StageFacts, batch_seconds, decide
from rlfreeze_ds.errors import RLFreezeError, SolverError
from rlfreeze_ds.freezing.masks import Mask
from rlfreeze_ds.freezing.shape import StageShape
from rlfreeze_ds.memory_watch import check_peaks, memory_limit, predicted_peaks, splits_backwards, starting_orders
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.fit import StageFit, fit_transfer
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.memory import StageMemory
from rlfreeze_ds.planning.planned_order import Batch, best_start, common_order, held, search
from rlfreeze_ds.planning.progress import StageGradients, StageProgress, measured_stages
from rlfreeze_ds.planning.schedule import Schedule, from_commands, to_commands

# Rounding of a mean over the micro-batches.
_TOLERANCE = 1e-6

# Of max_freeze_ratio, before there is a plan: what a batch needs whose order is made for it.
_FIRST_GUESS = 0.4
# Predicted seconds that differ by less are alike.
_ALIKE = 0.005


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a decision depends on.

    Attributes:
        step: the step that the decision is for.
        orders: per stage, what it does in a step, such as "F SA RG B ...": the words of ``from_commands``.
        shapes, fits, eligible, gradients: per stage.
        num_replicas: data-parallel replicas of each stage.
        normalised: whether the optimizer normalises each element's step, as Adam does.
        plan_ratios: ``[stage][micro_batch]`` of a plan file, which then takes the place of the solver's.
        present: the decision in force, if there is one, and with it
        steady: (step, measured seconds) of the last batches that ran under it, enough for a median or none.
        unfrozen_makespan_s: measured seconds of a batch with nothing frozen; None if there was none.
        transfer_s: seconds of a transfer that the last plan found, for when there was none.
        memory: per stage; none where it was not measured.
    """

    step: int
    config: FreezeConfig
    orders: tuple[str, ...]
    shapes: tuple[StageShape, ...]
    fits: tuple[StageFit, ...]
    eligible: tuple[tuple[bool, ...], ...]
    gradients: tuple[StageGradients, ...]
    num_replicas: int
    normalised: bool
    plan_ratios: tuple[tuple[float, ...], ...] | None
    present: Decision | None
    steady: tuple[tuple[int, float], ...]
    unfrozen_makespan_s: float | None
    transfer_s: float
    memory: tuple[StageMemory, ...] = ()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the batch to plan."""
        return self.orders[0].count("F")

    def stages(self) -> list[StageFacts]:
        """What is known of each stage."""
        triples = list(zip(self.shapes, self.fits, self.eligible, strict=True))
        unknown = StageProgress((), self.num_micro_batches)
        facts = [StageFacts(shape, fit, eligible, unknown) for shape, fit, eligible in triples]
        pools = [stage.pool(self.config.selection) for stage in facts]
        progress = measured_stages(
            self.gradients,
            pools,
            [stage.share(pool) for stage, pool in zip(facts, pools, strict=True)],
            self.num_micro_batches * self.num_replicas,
            normalised=self.normalised,
            whole_step=self.config.mask_scope == "step",
        )
        return [replace(stage, progress=progress[stage.shape.stage_id]) for stage in facts]

    def to_json(self) -> str:
        """The reverse of :meth:`from_json`."""
        fields = {**vars(self), "config": self.config.model_dump()}
        fields["shapes"] = [vars(shape) for shape in self.shapes]
        fields["fits"] = [vars(fit) for fit in self.fits]
        fields["gradients"] = [vars(stage) for stage in self.gradients]
        fields["memory"] = [vars(stage) for stage in self.memory]
        fields["present"] = vars(self.present) if self.present else None
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> PlanRequest:
        """The reverse of :meth:`to_json`, exact."""
        fields = json.loads(text)
        fields["config"] = FreezeConfig.model_validate(fields["config"])
        fields["orders"] = tuple(fields["orders"])
        fields["shapes"] = tuple(StageShape(**_tuples(shape)) for shape in fields["shapes"])
        fields["fits"] = tuple(StageFit(**_tuples(fit)) for fit in fields["fits"])
        fields["gradients"] = tuple(StageGradients(**_tuples(stage)) for stage in fields["gradients"])
        fields["memory"] = tuple(StageMemory.from_fields(stage) for stage in fields["memory"])
        fields["steady"] = tuple((step, seconds) for step, seconds in fields["steady"])
        if fields["present"] is not None:
            fields["present"] = Decision.from_fields(fields["present"])
        if fields["plan_ratios"] is not None:
            fields["plan_ratios"] = tuple(tuple(row) for row in fields["plan_ratios"])
        fields["eligible"] = tuple(tuple(row) for row in fields["eligible"])
        return cls(**fields)


@dataclass(frozen=True)
class PlanAnswer:
    """The decision, the seconds of a transfer it was made with, and what there is to warn of."""

    decision: Decision
    transfer_s: float
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The reverse of :meth:`from_json`."""
        return json.dumps({**vars(self), "decision": vars(self.decision)})

    @classmethod
    def from_json(cls, text: str) -> PlanAnswer:
        """The reverse of :meth:`to_json`, exact.

        Raises:
            SolverError: the planning process found no plan, and the message says why; or ``text`` is no answer.
        """
        try:
            fields = json.loads(text)
            if "error" in fields:
                raise SolverError(fields["error"])
            decision = Decision.from_fields(fields["decision"])
            return cls(decision, float(fields["transfer_s"]), tuple(map(str, fields["warnings"])))
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise SolverError(f"no answer but {text[:80]!r} ({type(error).__name__}: {error})") from None


def answer(request: PlanRequest) -> PlanAnswer:
    """Solve. The transfer is fitted first, so that a simulated batch lasts as long as the measured one.

    Raises:
        SolverError: no solver gave an answer that holds.
    """
    stages = request.stages()
    transfer_s = _transfer_s(request, stages)

    def decided(schedule: Schedule) -> Decision:
        dag = PipelineDag(schedule)
        found = decide(request.step, request.config, dag, stages, transfer_s, request.plan_ratios, _beyond(request))
        return replace(found, predicted_peak_bytes=predicted_peaks(request, schedule))

    if request.config.planning.schedule != "planned":
        return PlanAnswer(decided(from_commands(request.orders)), transfer_s)
    return PlanAnswer(_with_its_order(request, stages, transfer_s, decided), transfer_s)


def _with_its_order(
    request: PlanRequest, stages: list[StageFacts], transfer_s: float, decided: Callable[[Schedule], Decision]
) -> Decision:
    """The best order depends on what is frozen, and the reverse: orders are searched for some guesses at what each stage freezes,
    and of plans about as fast as the fastest the one that freezes least is taken."""
    orders = [*starting_orders(request)]
    starts = [*filter(splits_backwards, orders)]  # whole backwards, for a memory limit alone, leave nothing to search
    limits = [min(len(stages), request.num_micro_batches), *[_most_held(request)] * 3]
    means = [_FIRST_GUESS * request.config.planning.max_freeze_ratio] * len(stages)
    if request.present is not None and _runs(request, request.present.orders):
        orders.append(from_commands(request.present.orders))
        limits, means = [_most_held(request)], _means(request.present)
    found = [replace(decided(order), orders=to_commands(order)) for order in orders]
    for number, limit in enumerate(limits if starts else ()):
        seconds = {i: _mean_seconds(stages[i.stage_id], i, means[i.stage_id]) for i in starts[0].instructions}
        batch = Batch(seconds, transfer_s, limit, memory_limit(request))
        start = best_start(len(stages), request.num_micro_batches, batch, *starts)
        order = search(start, batch, seed=len(limits) * request.step + number)
        found.append(replace(decided(order), orders=to_commands(order)))
        means = _means(found[-1])
    fastest_s = min(decision.predicted_makespan_s for decision in found)
    alike = [decision for decision in found if decision.predicted_makespan_s <= (1 + _ALIKE) * fastest_s]
    return min(alike, key=lambda decision: (decision.mean_freeze_ratio, decision.predicted_makespan_s))


def _means(decision: Decision) -> list[float]:
    """Of a stage's ratios. An order for the ratios of single micro-batches would leave the program nothing to improve."""
    return [sum(row) / len(row) for row in decision.ratios]


def _runs(request: PlanRequest, orders: Sequence[str]) -> bool:
    """Whether a batch may run in these orders."""
    try:
        schedule, most = _read_orders(orders, len(request.shapes))
        limit = memory_limit(request)
        fits = limit is None or max(predicted_peaks(request, schedule)) <= limit.limit_bytes
        return schedule.num_micro_batches == request.num_micro_batches and most <= _most_held(request) and fits
    except RLFreezeError:
        return False


def _read_orders(orders: Sequence[str], num_stages: int) -> tuple[Schedule, int]:
    """A schedule that can run, and the most micro-batches that a stage holds in it.

    Raises:
        RLFreezeError: it cannot run.
    """
    # A B is an I and its W, one after the other, to all that an order has to be.
    split = from_commands([order.replace("B", "I W") for order in orders])
    return from_commands(orders), max(held(common_order(split), num_stages))


def _most_held(request: PlanRequest) -> int:
    of_1f1b = min(len(request.shapes), request.num_micro_batches)
    return max(of_1f1b, request.config.planning.most_held or 0)


def _mean_seconds(facts: StageFacts, instruction: Instruction, ratio: float) -> float:
    """At a ratio of which no mask is drawn yet."""
    return facts.fit.seconds(instruction.kind, ratio, ratio if facts.whole else 0.0, instruction.micro_batch_id)


def _transfer_s(request: PlanRequest, stages: list[StageFacts]) -> float:
    """From the last steps under the present plan, where the model of a batch then errs least; before there are any, from those
    in which nothing was frozen."""

    steady = request.present is not None and request.steady
    schedule = from_commands(request.orders)
    if request.config.planning.schedule == "planned":  # a plan that just came has not run yet, and nothing is planned unfrozen
        schedule = from_commands(request.present.orders) if steady else starting_orders(request)[0]
    dag = PipelineDag(schedule)

    def fitted(masks: Sequence[Sequence[Mask]], measured_s: float) -> float:
        return fit_transfer(lambda seconds: batch_seconds(dag, stages, masks, seconds), measured_s)

    if steady:
        found = []
        for step, measured_s in request.steady:
            masks = [request.present.masks(request.config, shape, step) for shape in request.shapes]
            found.append(fitted(masks, measured_s))
        return statistics.median(found)
    if request.unfrozen_makespan_s is None:
        return request.transfer_s
    return fitted([((),) * request.num_micro_batches for _ in stages], request.unfrozen_makespan_s)


def _beyond(request: PlanRequest) -> float:
    """Share of its prediction by which the present plan's batches are longer."""
    if request.present is None or not request.steady or request.present.predicted_makespan_s <= 0:
        return 0.0
    return statistics.median(seconds for _, seconds in request.steady) / request.present.predicted_makespan_s - 1


def check_answer(request: PlanRequest, answer: PlanAnswer) -> None:
    """The job acts only on a decision that it could have asked for.

    Raises:
        SolverError: a number is not what ``request`` allows.
    """
    decision, limit = answer.decision, request.config.planning.max_freeze_ratio
    _expect(decision.step == request.step, "step", decision.step, f"{request.step}")
    _expect(decision.eligible == request.eligible, "eligible", "other units", "the units that were asked for")
    sizes = [len(row) for row in decision.ratios]
    wanted = [request.num_micro_batches] * len(request.shapes)
    _expect(sizes == wanted, "number of ratios", sizes, f"{wanted}")
    for stage_id, row in enumerate(decision.ratios):
        wrong = next((m for m, ratio in enumerate(row) if not _in_range(ratio, 1.0)), None)
        if wrong is not None:
            _expect(False, f"ratio of stage {stage_id}, micro-batch {wrong}", row[wrong], "0 to 1")
        mean = math.fsum(row) / len(row)
        _expect(mean <= limit + _TOLERANCE, f"mean ratio of stage {stage_id}", mean, f"at most {limit:g}")
    schedule = None
    if request.config.planning.schedule == "planned":
        try:
            schedule, most = _read_orders(decision.orders, len(request.shapes))
        except RLFreezeError as error:
            raise SolverError(f"an absurd plan: an order that cannot run ({error})") from None
        counts = [schedule.num_ranks, schedule.num_micro_batches]
        wanted = [len(request.shapes), request.num_micro_batches]
        _expect(counts == wanted, "stages and micro-batches of the order", counts, f"{wanted}")
        _expect(most <= _most_held(request), "micro-batches held", most, f"at most {_most_held(request)}")
    else:
        _expect(not decision.orders, "orders", decision.orders, "none")
    check_peaks(request, decision, schedule)
    for shape, row in zip(request.shapes, decision.unit_shares, strict=False):
        fits = len(row) == len(shape.weights) and all(_in_range(share, 1.0 + _TOLERANCE) for share in row)
        _expect(fits, f"shares of the units of stage {shape.stage_id}", row, f"{len(shape.weights)} numbers from 0 to 1")
    _expect(_in_range(decision.mean_freeze_ratio, 1.0 + _TOLERANCE), "mean ratio", decision.mean_freeze_ratio, "0 to 1")
    for name, seconds in (
        ("unfrozen_makespan_s", decision.unfrozen_makespan_s),
        ("predicted_makespan_s", decision.predicted_makespan_s),
        ("transfer_s", answer.transfer_s),
    ):
        _expect(_in_range(seconds, math.inf), name, seconds, "a finite number of seconds >= 0")


def _in_range(value: Any, largest: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= largest


def _expect(holds: bool, name: str, found: Any, allowed: str) -> None:
    if not holds:
        raise SolverError(f"an absurd plan: {name} = {found}, must be {allowed}")


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Lists as the tuples that they were before they became JSON."""
    return {key: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for key, value in fields.items()}  # fmt: skip
