"""Schedules of one profile side by side: against a player of DeepSpeed's words that knows nothing of graphs, and by hand."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from rlfreeze_ds.errors import ProfileError, RLFreezeError, TargetError
from rlfreeze_ds.planning import planned_order
from rlfreeze_ds.planning.builders import gpipe, one_f_one_b, zb_h1, zbv
from rlfreeze_ds.planning.comparison import PlannedBatch, ProfiledBatch, compare, input_seconds, most_held, table
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.planning.profile import write_profile
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules, to_commands
from rlfreeze_ds.planning.solver import Limits
from rlfreeze_ds.planning.timeline import SKIPPED, draw_comparison
from rlfreeze_ds.planning.transfers import blocking_1f1b
from tests.planning.test_main import PUBLISHED, plan, refused

TRANSFER_S = 0.001
NAMES = ("stock", "zb-h1", "planned")


@pytest.fixture(scope="module", autouse=True)
def _shorter_searches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_order, "EFFORT", planned_order.EFFORT // 4)
        yield


@pytest.fixture(scope="module")
def profiled(published: tuple[PipelineDag, Costs]) -> ProfiledBatch:
    dag, costs = published
    return ProfiledBatch(dag.schedule, Costs(costs.durations, TRANSFER_S))


@pytest.fixture(scope="module")
def compared(profiled: ProfiledBatch) -> dict[str, PlannedBatch]:
    return compare(profiled, NAMES, Limits(0.8))


def play(orders: Sequence[str], seconds: Mapping[tuple[int, str, int], float], transfer_s: float) -> tuple[float, list[int]]:
    """Seconds of the batch and the most micro-batches held by each rank: every rank does word after word, a transfer when both
    its ranks have come to it."""
    words, at = [order.split() for order in orders], [0] * len(orders)
    counts = [Counter[str]() for _ in orders]
    clock, held, most = [0.0] * len(orders), [0] * len(orders), [0] * len(orders)
    other_end = {"SA": ("RA", 1), "SG": ("RG", -1)}

    def word(rank: int) -> str:
        return words[rank][at[rank]] if 0 <= rank < len(words) and at[rank] < len(words[rank]) else ""

    def done(rank: int) -> None:
        now = word(rank)
        held[rank] += (now == ("F" if rank == 0 else "RA")) - (now in ("B", "W"))
        most[rank] = max(most[rank], held[rank])
        counts[rank][now] += 1
        at[rank] += 1

    moved = True
    while moved:
        moved = False
        for rank in range(len(orders)):
            now = word(rank)
            if now in ("F", "B", "I", "W"):
                clock[rank] += seconds[rank, now, counts[rank][now]]
                done(rank)
                moved = True
            elif now in other_end and word(rank + other_end[now][1]) == other_end[now][0]:
                ends = (rank, rank + other_end[now][1])
                assert counts[rank][now] == counts[ends[1]][word(ends[1])]
                clock[ends[0]] = clock[ends[1]] = max(clock[end] for end in ends) + transfer_s
                for end in ends:
                    done(end)
                moved = True
    assert at == [len(order) for order in words], "the ranks wait for each other"
    return max(clock), most


def seconds_of(found: Mapping[str, object]) -> dict[tuple[int, str, int], float]:
    """From the published CSV and the ratios of a row of the JSON, with arithmetic of its own."""
    ratios = {(row["stage_id"], row["micro_batch_id"]): row["ratio"] for row in found["plan"]["freeze_ratio"]}
    seconds = {}
    for line in PUBLISHED.read_text().splitlines()[1:]:
        _, stage, m, kind, unfrozen, frozen = line.split(",")
        place = int(stage), int(m)
        if kind == "F":
            seconds[place[0], "F", place[1]] = float(unfrozen)
            continue
        weight_s = (1 - ratios.get(place, 0.0)) * (float(unfrozen) - float(frozen))
        for name, value in (("I", float(frozen)), ("W", weight_s), ("B", float(frozen) + weight_s)):
            seconds[place[0], name, place[1]] = value
    return seconds


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_stock_is_deepspeeds_own_order(num_stages: int) -> None:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for num_micro_batches in range(1, 17):
        real = [schedule.TrainSchedule(num_micro_batches, num_stages, stage) for stage in range(num_stages)]
        assert blocking_1f1b(num_stages, num_micro_batches) == from_pipe_schedules(real)


def test_the_command_line_tells_what_a_player_finds(tmp_path: Path) -> None:
    out = tmp_path / "compared.json"
    result = plan(
        "--schedule", *NAMES, "--transfer-s", TRANSFER_S, "--max-freeze-ratio", 0.8,
        "--json", out, "--trace", tmp_path / "t.json",
        blocked=("torch", "deepspeed", "ray", "matplotlib"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())["batches"]
    lines = result.stdout.splitlines()
    assert [row["schedule"] for row in rows] == [name for name in NAMES for _ in range(2)] and len(lines) == 7
    for row, line in zip(rows, lines[1:], strict=True):
        seconds = seconds_of(row)
        batch_s, most = play(row["orders"], seconds, TRANSFER_S)
        kinds = "FB" if row["schedule"] == "stock" else "FIW"
        busy_s = sum(value for (_, kind, _), value in seconds.items() if kind in kinds)
        assert row["batch_s"] == pytest.approx(batch_s) and row["micro_batches_held"] == most
        assert row["bubble_ratio"] == pytest.approx(1 - busy_s / (4 * batch_s))
        assert line.startswith(row["name"])
        assert line[len(row["name"]) :].split() == [
            f"{batch_s:.4f}", f"{rows[0]['batch_s'] / batch_s:.2f}", f"{100 * row['bubble_ratio']:.1f}%",
            f"{row['mean_freeze_ratio']:.3f}", *map(str, most),
        ]  # fmt: skip
        ratios = [entry["ratio"] for entry in row["plan"]["freeze_ratio"]]
        assert len(ratios) == 32 and row["mean_freeze_ratio"] == pytest.approx(sum(ratios) / 32)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ends = [max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in range(6)]
    assert ends == [pytest.approx(row["batch_s"] * 1e6, abs=1) for row in rows]
    stock, zero_bubble, searched = (row["batch_s"] for row in rows[::2])
    assert searched < zero_bubble < stock and rows[0]["micro_batches_held"] == [4, 3, 2, 1]
    assert all(planned["batch_s"] < unfrozen["batch_s"] for unfrozen, planned in zip(rows[::2], rows[1::2], strict=True))


def test_equal_instructions_by_closed_form() -> None:
    """(M + P - 1) (tF + tB) for 1F1B; nothing can be better than a rank's own M (tF + tB) after the way to it and from it."""
    schedule = gpipe(4, 8)  # the order of the profile does not matter
    durations = {i: Duration(1.0, 1.0) if i.is_forward else Duration(2.0, 1.0) for i in schedule.instructions}
    found = compare(ProfiledBatch(schedule, Costs(durations)), NAMES, Limits(0.0))
    stock, zero_bubble, searched = (batch.timeline.makespan for batch in found.values())
    assert stock == pytest.approx(11 * 3.0) and 8 * 3.0 + 3.0 <= searched <= zero_bubble < stock
    assert list(found) == ["stock (1F1B)", "zero-bubble (ZB-H1)", "planned order"]


def test_the_same_seconds_in_two_parts_are_the_same_batch(profiled: ProfiledBatch, compared: dict[str, PlannedBatch]) -> None:
    again = ProfiledBatch(zb_h1(4, 8), profiled.split)
    assert {i: (d.unfrozen_s, d.frozen_s) for i, d in again.whole.durations.items()} == {
        i: pytest.approx((d.unfrozen_s, d.frozen_s)) for i, d in profiled.whole.durations.items()
    }
    for name in ("stock", "zb-h1"):
        unfrozen = list(compared.values())[2 * NAMES.index(name)]
        found = compare(again, [name], Limits(0.0))
        assert next(iter(found.values())).timeline.makespan == pytest.approx(unfrozen.timeline.makespan)


def test_a_target_is_over_the_first_schedule_for_all(profiled: ProfiledBatch) -> None:
    found = list(compare(profiled, NAMES, Limits(0.8, target_speedup=1.3)).values())
    target_s = found[0].timeline.makespan / 1.3
    stock, zero_bubble, searched = found[1::2]
    for batch in (stock, zero_bubble, searched):
        assert batch.timeline.makespan == pytest.approx(target_s, rel=1e-5)
    # The same batch for less freezing: what these schedules are for.
    means = [batch.plan.mean_freeze_ratio for batch in (stock, zero_bubble, searched)]
    assert 0 < means[2] < means[1] < 0.7 * means[0]
    slow = list(compare(profiled, NAMES[:2], Limits(0.8, target_speedup=1.1)).values())[-1]
    assert slow.plan.mean_freeze_ratio == 0 and slow.timeline.makespan < found[0].timeline.makespan / 1.1
    with pytest.raises(TargetError, match=r"stock \(1F1B\) cannot be 1.5 times as fast as stock .*at most 1.3"):
        compare(profiled, NAMES[:1], Limits(0.5, target_speedup=1.5))


def test_a_long_pipeline_under_a_planned_order_is_faster_than_stock() -> None:
    """ZB-H1 is not, once much is frozen: its transfers are placed for an F, I and W of the same length."""
    schedule = one_f_one_b(8, 24)
    durations = {i: Duration(1.0, 1.0) if i.is_forward else Duration(2.2, 1.1) for i in schedule.instructions}
    found = list(compare(ProfiledBatch(schedule, Costs(durations, 0.01)), NAMES, Limits(0.6)).values())
    stock, zero_bubble, searched = (batch.timeline.makespan for batch in found[1::2])
    assert searched < 0.97 * stock < stock < zero_bubble


def test_a_searched_order_may_hold_more(profiled: ProfiledBatch, published: tuple[PipelineDag, Costs]) -> None:
    loose = ProfiledBatch(published[0].schedule, profiled.whole, most_held=6)
    (searched,) = compare(loose, ["planned"], Limits(0.0)).values()
    assert max(searched.held) <= 6 and max(searched.held) > 4
    with pytest.raises(RLFreezeError, match="most_held = 3: must be at least 4"):
        ProfiledBatch(published[0].schedule, profiled.whole, most_held=3)


def test_a_batch_of_one_stage_or_one_micro_batch() -> None:
    for num_stages, num_micro_batches in ((1, 1), (1, 3), (3, 1), (2, 2)):
        schedule = one_f_one_b(num_stages, num_micro_batches)
        costs = Costs({i: Duration(1.0, 1.0) if i.is_forward else Duration(2.0, 1.0) for i in schedule.instructions}, 0.1)
        found = compare(ProfiledBatch(schedule, costs), NAMES, Limits(0.5, time_slack=0.0))
        assert len(table(found).splitlines()) == 7
        if num_stages == 1:
            expected = [3.0 * num_micro_batches, 2.5 * num_micro_batches] * 3
            assert [batch.timeline.makespan for batch in found.values()] == pytest.approx(expected)


def test_held_by_hand() -> None:
    assert most_held(blocking_1f1b(3, 8)) == (3, 2, 1) and most_held(blocking_1f1b(4, 2)) == (2, 2, 2, 1)


def test_the_picture_has_every_bar_in_its_place(compared: dict[str, PlannedBatch]) -> None:
    """Bars of a rank do not overlap and add up to its seconds; what is between them is the bubble that is written."""
    ax = pytest.importorskip("matplotlib.figure").Figure(figsize=(12, 9)).add_subplot()
    draw_comparison(
        ax, {name: batch.timeline for name, batch in compared.items()},
        {name: batch.plan.ratios for name, batch in compared.items()}, critical_path=False,
        input_s={name: input_seconds(batch.costs) for name, batch in compared.items()},
    )  # fmt: skip
    rows: dict[int, list[tuple[float, float]]] = {}
    for container in ax.containers:
        if container.get_label() != SKIPPED:
            for bar in container.patches:
                rows.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append((bar.get_x(), bar.get_width()))
    texts = [text.get_text() for text in ax.texts if not text.get_text().isdigit()]
    for panel, (name, batch) in enumerate(compared.items()):
        orders = to_commands(batch.dag.schedule)
        seconds = {(i.stage_id, i.kind, i.micro_batch_id): s for i, s in batch.costs.seconds(batch.plan.ratios).items()}
        batch_s, _ = play(orders, seconds, TRANSFER_S)
        total = 0.0
        for rank in range(4):
            bars = sorted(rows[5 * panel + rank])
            assert all(x + width <= later + 1e-9 for (x, width), (later, _) in itertools.pairwise(bars))
            busy_s = sum(width for _, width in bars)
            assert busy_s == pytest.approx(sum(value for (stage, _, _), value in seconds.items() if stage == rank))
            assert bars[-1][0] + bars[-1][1] <= batch_s + 1e-9
            total += busy_s
        text = texts[2 * panel] + texts[2 * panel + 1]
        assert text.startswith(f"{name}: {batch_s:.4g} s") and f"bubble {1 - total / (4 * batch_s):.0%}" in text
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["forward", "input gradient", "weight gradient", SKIPPED, "waiting", "makespan"]


def test_one_schedule_is_planned_for_like_a_profile(tmp_path: Path, profiled: ProfiledBatch) -> None:
    out = tmp_path / "plan.json"
    result = plan("--schedule", "zb-h1", "--transfer-s", TRANSFER_S, "--frontier", "--json", out)
    assert result.returncode == 0, result.stderr
    found = Plan.load(out)
    assert {i.kind for i in found.ratios} == {"W"} and found.unfrozen_makespan_s == pytest.approx(0.615)
    assert "micro_batches_held     4  4  4  4" in result.stdout and "knee" in result.stdout
    assert f"stock_makespan_s       0.700000  ({0.7 / found.planned_makespan_s:.2f}x)" in result.stdout


def test_a_picture_of_several_schedules(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = plan("--schedule", "stock", "zb-h1", "--gantt", tmp_path / "schedules.png")
    assert result.returncode == 0 and result.stderr == ""
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_that_cannot_be_compared_is_one_error(tmp_path: Path) -> None:
    def written(schedule: Schedule, backward: Duration) -> Path:
        durations = {i: Duration(1.0, 1.0) if i.is_forward else backward for i in schedule.instructions}
        write_profile(tmp_path / "profile.csv", schedule, Costs(durations))
        return tmp_path / "profile.csv"

    message = refused(plan("--schedule", *NAMES, profile=written(one_f_one_b(2, 4), Duration(2.0, 2.0))))
    assert "nothing says what part of it is W" in message and message.startswith("rlfreeze_ds plan: error: ")
    message = refused(plan("--schedule", "zb-h1", profile=written(zbv(2, 4), Duration(1.0, 0.0))))
    assert "3F0 is on rank 0" in message and "one stage a rank" in message
    with pytest.raises(ProfileError, match="1F0 is on rank 0"):
        order = one_f_one_b(2, 1)
        ProfiledBatch(Schedule(order.ranks[::-1]), Costs(dict.fromkeys(order.instructions, Duration(1.0, 0.0))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "zb-h2"), "invalid choice: 'zb-h2'"),
        (("--schedule", "stock", "stock"), "--schedule names stock twice"),
        (("--schedule", "stock", "zb-h1", "--most-held", 6), "add planned to --schedule"),
        (("--most-held", 6), "add planned to --schedule"),
        (("--schedule", "planned", "--most-held", 2), "most_held = 2: must be at least 4"),
        (("--schedule", "stock", "zb-h1", "--frontier"), "--frontier is of one schedule"),
        (("--schedule", "stock", "zb-h1", "--transfer-s", "-1"), "transfer_s = -1.0: must be a finite number of seconds >= 0"),
        (("--transfer-s", "nan"), "transfer_s = nan: must be a finite number"),
        (("--schedule", "stock", "zb-h1", "--target-speedup", 3), "cannot be 3 times as fast as stock (1F1B) (0.675 s)"),
        (("--schedule", "stock", "zb-h1", "--gantt", "a.jpg"), "must be one of .png"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(plan(*arguments))


def test_what_is_in_a_b_is_its_input_gradient() -> None:
    b, f = Instruction.parse("0B0"), Instruction.parse("0F0")
    assert input_seconds(Costs({f: Duration(1.0, 1.0), b: Duration(3.0, 1.25)})) == {b: 1.25}
    assert input_seconds(Costs({f: Duration(1.0, 1.0), b: Duration(3.0, 3.5)})) == {}
