"""Peaks of orders against a count of their own, orders that hold less, and searches under a limit of bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.lean_orders import first_orders, lean_order
from rlfreeze_ds.planning.memory import MemoryLimit, StageMemory, peak_bytes
from rlfreeze_ds.planning.planned_order import Batch, common_order, makespan, search
from rlfreeze_ds.planning.schedule import from_commands, to_commands
from rlfreeze_ds.planning.transfers import blocking_1f1b, blocking_zb_h1
from tests.test_split_schedule import check

# Forward and pairs of a stage of Linear and tanh are near these; the rest differs from everything else, so that none is mixed up.
LAST = StageMemory(input_bytes=3, forward_bytes=50, gradient_bytes=5, pair_bytes=70, shared_bytes=1000)
FIRST = StageMemory(forward_bytes=50, pair_bytes=70, shared_bytes=1000)


def counted(order: str, stage: StageMemory) -> int:
    """The peak of a rank, from when each piece of each micro-batch comes and goes."""
    words, counts = order.split(), Counter[str]()
    at: dict[tuple[str, int], int] = {}
    for position, word in enumerate(words):
        at[word, counts[word]] = position
        counts[word] += 1
    backward = "I" if counts["I"] else "B"
    spans = []
    for m in range(counts["F"]):
        spans.append((stage.forward_bytes, at["F", m], at[backward, m]))
        if counts["RA"]:
            spans.append((stage.input_bytes, at["RA", m], at["SG", m]))
            spans.append((stage.gradient_bytes, at[backward, m], at["SG", m]))
        if counts["W"]:
            spans.append((stage.pair_bytes, at["I", m], at["W", m]))
    return stage.shared_bytes + max(
        sum(size for size, first, end in spans if first <= position < end) for position in range(len(words))
    )


def memory_of(num_stages: int, seed: int = 0) -> tuple[StageMemory, ...]:
    rng = random.Random(seed)
    return tuple(
        StageMemory(
            input_bytes=rng.randint(1, 9) * (stage > 0), forward_bytes=rng.randint(20, 90),
            gradient_bytes=rng.randint(1, 9) * (stage > 0), pair_bytes=rng.randint(20, 120), shared_bytes=rng.randint(0, 5),
        )
        for stage in range(num_stages)
    )  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_peaks_are_those_of_a_count_piece_by_piece(num_stages: int) -> None:
    for num_micro_batches in (1, 2, 7, 12):
        size = (num_stages, num_micro_batches)
        stages = memory_of(num_stages, num_micro_batches)
        for schedule in (
            blocking_1f1b(*size),
            blocking_zb_h1(*size),
            lean_order(*size, 1, split=True),
            lean_order(*size, 2, split=False),
        ):
            orders = to_commands(schedule)
            expected = tuple(counted(order, stage) for order, stage in zip(orders, stages, strict=True))
            assert peak_bytes(from_commands(orders), stages) == expected


def test_peaks_in_closed_form() -> None:
    num_stages, num_micro_batches = 4, 8
    stages = (FIRST, LAST, LAST, LAST)
    # 1F1B: stage s has num_stages - s forwards under way; received inputs with them, and one more waits where DeepSpeed takes it
    # in before the gradient of an older one is sent.
    peaks = peak_bytes(blocking_1f1b(num_stages, num_micro_batches), stages)
    assert peaks == (1000 + 4 * 50, 1000 + 3 * 53, 1000 + 2 * 53, 1000 + 53)
    # ZB-H1: rank r keeps the pairs of r micro-batches and holds no more than the first stage of 1F1B.
    split = peak_bytes(blocking_zb_h1(num_stages, num_micro_batches), stages)
    assert split[0] == 1000 + 3 * 50 + 70
    # One at a time: an F, an I, a W; after the first stage another input has come meanwhile.
    assert peak_bytes(lean_order(2, 4, 1, split=True), (FIRST, FIRST))[0] == 1070
    assert peak_bytes(lean_order(2, 4, 1, split=False), (FIRST, FIRST)) == (1050, 1050)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
def test_lean_orders_can_run_and_hold_the_less_the_fewer_are_under_way(num_stages: int) -> None:
    stages = (FIRST, *[LAST] * (num_stages - 1))
    for num_micro_batches in (1, 3, 8):
        for split in (True, False):
            held = []
            for most in range(1, num_stages + 1):
                schedule = lean_order(num_stages, num_micro_batches, most, split=split)
                check(to_commands(schedule), num_micro_batches)
                held.append(max(peak_bytes(schedule, stages)))
            assert held == sorted(held)
            assert held[0] <= 1000 + (70 if split else 50) + 2 * (3 + 5)


def test_first_orders_keep_the_limit_where_any_does() -> None:
    size, stages = (4, 8), (FIRST, LAST, LAST, LAST)
    zb_h1, stock = blocking_zb_h1(*size), blocking_1f1b(*size)
    most = max(peak_bytes(zb_h1, stages))

    def of(name: str, limit: int | None) -> Sequence[object]:
        return first_orders(name, *size, stages, limit)

    for limit in (None, most):
        assert [of(name, limit) for name in ("stock", "zb-h1", "planned")] == [(stock,), (zb_h1,), (zb_h1,)]
    assert of("stock", 1) == (stock,) and of("zb-h1", most - 1) == of("zb-h1", 1) == (stock,)
    for limit in range(1000, most, 7):
        found = of("planned", limit)
        peaks = [max(peak_bytes(schedule, stages)) for schedule in found]
        least = min(max(peak_bytes(lean_order(*size, 1, split=split), stages)) for split in (True, False))
        assert max(peaks) <= max(limit, least), limit
        if limit >= max(peak_bytes(lean_order(*size, 4, split=False), stages)):
            assert any(schedule == lean_order(*size, 4, split=False) for schedule in found), "all under way, backwards whole"


@pytest.mark.parametrize("seed", range(6))
def test_a_search_keeps_to_the_limit_and_a_limit_costs_time(seed: int) -> None:
    rng = random.Random(seed)
    num_stages, num_micro_batches = rng.randint(2, 4), rng.randint(3, 6)
    stages = memory_of(num_stages, seed)
    for most in range(1, num_stages + 1):
        start = lean_order(num_stages, num_micro_batches, most, split=True)
        limit = max(peak_bytes(start, stages)) + rng.choice((0, 10))
        seconds = {i: rng.uniform(0.5, 2.0) for i in start.instructions}
        batch = Batch(seconds, 0.05, num_stages, MemoryLimit(stages, limit))
        found = search(start, batch, num_moves=800)
        assert max(peak_bytes(found, stages)) <= limit
        check(to_commands(found), num_micro_batches)
        time, before = (PipelineDag(schedule).simulate(seconds, 0.05).makespan for schedule in (found, start))
        assert time <= before + 1e-9 and time == pytest.approx(makespan(common_order(found), batch, num_stages))
    free = search(start, Batch(seconds, 0.05, num_stages, MemoryLimit(stages, 10**9)), num_moves=800)
    assert free == search(start, Batch(seconds, 0.05, num_stages), num_moves=800)


def test_a_search_without_the_limit_would_break_it() -> None:
    """So that the test above can fail."""
    stages = (FIRST,) * 3
    start = lean_order(3, 6, 1, split=True)
    seconds = dict.fromkeys(start.instructions, 1.0)
    limit = max(peak_bytes(start, stages))
    assert max(peak_bytes(search(start, Batch(seconds, 0.01, 3), num_moves=800), stages)) > limit
    kept = search(start, Batch(seconds, 0.01, 3, MemoryLimit(stages, limit)), num_moves=800)
    assert max(peak_bytes(kept, stages)) <= limit


@pytest.mark.parametrize("values", [{"input": 1}, {"input_bytes": -1}, {"input_bytes": 1.5}, {"input_bytes": True}])
def test_what_is_no_memory_of_a_stage_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        StageMemory.from_fields(values)
    assert StageMemory.from_fields(vars(LAST)) == LAST
