"""Plans under a limit of bytes: what is searched, and what of an answer is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rlfreeze_ds.decision import Decision
from rlfreeze_ds.errors import SolverError
from rlfreeze_ds.memory_watch import starting_orders
from rlfreeze_ds.plan_request import PlanAnswer, PlanRequest, answer, check_answer
from rlfreeze_ds.planning import planned_order
from rlfreeze_ds.planning.lean_orders import lean_order
from rlfreeze_ds.planning.memory import StageMemory, peak_bytes
from rlfreeze_ds.planning.schedule import from_commands, to_commands
from rlfreeze_ds.planning.transfers import blocking_1f1b, blocking_zb_h1
from tests.test_planner import MICRO_BATCHES, REQUEST, planned_request

SIZE = (2, MICRO_BATCHES)
STAGES = (StageMemory(forward_bytes=320, pair_bytes=384), StageMemory(64, 320, 64, 384))
MOST = max(peak_bytes(blocking_zb_h1(*SIZE), STAGES))


def request_for(limit: int | None, stages: tuple[StageMemory, ...] = STAGES, schedule: str = "planned") -> PlanRequest:
    request = planned_request() if schedule == "planned" else REQUEST
    planning = request.config.planning.model_copy(update={"memory_limit_bytes": limit, "schedule": schedule})
    return replace(request, config=request.config.model_copy(update={"planning": planning}), memory=stages)


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_order, "EFFORT", 300_000)


def test_a_plan_says_what_its_order_holds_and_survives_json() -> None:
    for request in (request_for(None), request_for(None, schedule="stock"), request_for(None, ())):
        answered = answer(request)
        check_answer(request, answered)
        assert PlanRequest.from_json(request.to_json()) == request
        assert PlanAnswer.from_json(answered.to_json()) == answered
        orders = answered.decision.orders or request.orders
        expected = peak_bytes(from_commands(orders), STAGES) if request.memory else ()
        assert answered.decision.predicted_peak_bytes == expected
    fields = dict(vars(answered.decision))
    del fields["predicted_peak_bytes"]  # as of a checkpoint from before
    assert Decision.from_fields(fields) == answered.decision


def test_a_planned_order_keeps_the_limit_where_one_does() -> None:
    least = max(peak_bytes(lean_order(*SIZE, 1, split=False), STAGES))
    rng = random.Random(5)
    limits = [MOST, MOST - 1, 640, least, least - 1, 1, *(rng.randrange(least, MOST) for _ in range(3))]
    seconds = {}
    for limit in limits:
        request = request_for(limit)
        answered = answer(request)
        check_answer(request, answered)
        peak = max(answered.decision.predicted_peak_bytes)
        assert peak == max(peak_bytes(from_commands(answered.decision.orders), STAGES))
        assert peak <= max(limit, least), limit
        seconds[limit] = answered.decision.predicted_makespan_s
    # A limit that changes nothing changes nothing.
    assert answer(request_for(10**6)).decision == answer(request_for(None)).decision
    assert seconds[MOST] <= seconds[least]


def test_an_answer_that_breaks_the_limit_is_refused_where_another_keeps_it() -> None:
    good = answer(request_for(None)).decision

    def with_orders(orders: tuple[str, ...]) -> PlanAnswer:
        return PlanAnswer(replace(good, orders=orders, predicted_peak_bytes=peak_bytes(from_commands(orders), STAGES)), 0.02)

    zb_h1 = with_orders(to_commands(blocking_zb_h1(*SIZE)))
    check_answer(request_for(MOST), zb_h1)
    with pytest.raises(SolverError, match=f"predicted_peak_bytes = .*must be at most {MOST - 1}"):
        check_answer(request_for(MOST - 1), zb_h1)
    check_answer(request_for(640), with_orders(to_commands(blocking_1f1b(*SIZE))))
    # None keeps it: only what holds no more than the least is taken.
    least = starting_orders(request_for(1))
    assert least == (lean_order(*SIZE, 1, split=False),)
    check_answer(request_for(1), with_orders(to_commands(least[0])))
    with pytest.raises(SolverError, match="must be at most"):
        check_answer(request_for(1), with_orders(to_commands(blocking_1f1b(*SIZE))))


@pytest.mark.parametrize("peaks", [(), (1, 2), (1,), (1.5, 2.0), (-1, 5)])
def test_peaks_that_are_not_those_of_the_order_are_refused(peaks: tuple[int, ...]) -> None:
    request = request_for(None)
    answered = answer(request)
    with pytest.raises(SolverError, match="absurd plan: predicted_peak_bytes"):
        check_answer(request, replace(answered, decision=replace(answered.decision, predicted_peak_bytes=peaks)))
    if peaks:
        unknown = request_for(None, ())
        with pytest.raises(SolverError, match="must be none"):
            check_answer(unknown, replace(answered, decision=replace(answered.decision, predicted_peak_bytes=peaks)))
