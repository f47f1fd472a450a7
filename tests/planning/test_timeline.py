import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.builders import gpipe, one_f_one_b, zb_h1
from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.dag import PipelineDag, Timeline
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule
from rlfreeze_ds.planning.timeline import (
    CRITICAL,
    KINDS,
    SKIPPED,
    WAITING,
    chrome_trace,
    comparison_size,
    draw,
    draw_comparison,
    measured_timeline,
    text_grid,
    waiting,
)

ASSETS = Path(__file__).parents[1] / "assets"

# Two micro-batches on two stages, F 1 s and B 2 s; planned: 1B0 frozen whole takes 1 s. Drawn by hand on paper.
DAG = PipelineDag(one_f_one_b(2, 2))
SECONDS = {i: 1.0 if i.is_forward else 2.0 for i in DAG.schedule.instructions}
FROZEN = Instruction.parse("1B0")
RATIOS = {"planned": {FROZEN: 1.0, Instruction.parse("0B0"): 0.0}}
TIMELINES = {"unfrozen": DAG.simulate(SECONDS), "planned": DAG.simulate({**SECONDS, FROZEN: 1.0})}

TWO_STAGES_A_RANK = Schedule(
    tuple(
        tuple(Instruction.parse(text) for text in rank.split())
        for rank in ("0F0 2F0 2I0 2W0 0B0", "1F0 1I0 1W0")
    )
)


def random_timelines() -> list[Timeline]:
    generator = random.Random(3)
    dags = [PipelineDag(s) for s in (one_f_one_b(4, 8), gpipe(3, 5), TWO_STAGES_A_RANK)]
    return [dag.simulate({i: generator.random() / 50 for i in dag.order}, 0.0007) for dag in dags]


def test_text_of_a_batch_by_hand() -> None:
    assert text_grid(TIMELINES["unfrozen"], width=45) + "\n" == (ASSETS / "timeline_2x2.txt").read_text()
    assert text_grid(TIMELINES["planned"], width=25).splitlines() == [
        "rank 0 |F0F1  B0==  B1==|",
        "rank 1 |  F0B0F1B1==    |",
        "       0 s            8 s",
    ]


def test_text_with_two_stages_a_rank_names_the_stage() -> None:
    timeline = PipelineDag(TWO_STAGES_A_RANK).simulate({i: 1.0 for i in TWO_STAGES_A_RANK.instructions})
    assert text_grid(timeline, width=7 + 2 + 18).splitlines()[:2] == [
        "rank 0 |0F0   2F02I02W00B0|",
        "rank 1 |   1F0      1I01W0|",
    ]


@pytest.mark.parametrize("width", [0, 9, 10, 60, 100, 300])
def test_text_lines_are_as_wide_as_asked(width: int) -> None:
    for timeline in random_timelines():
        rows = text_grid(timeline, width=width).splitlines()[:-1]
        assert {len(row) for row in rows} == {max(width, 10)}


def test_text_of_short_instructions_keeps_the_kind_or_nothing() -> None:
    seconds = {i: 0.1 if i.is_forward else 10.0 for i in DAG.order}
    rank = text_grid(DAG.simulate(seconds), width=39).splitlines()[0]
    assert "F" not in rank and rank.count("B0==") == 1
    seconds = {i: 0.7 if i.is_forward else 10.0 for i in DAG.order}
    assert "FF" in text_grid(DAG.simulate(seconds), width=50).splitlines()[0]


def test_text_never_cuts_a_number() -> None:
    dag = PipelineDag(one_f_one_b(1, 11))
    rank = text_grid(dag.simulate(dict.fromkeys(dag.order, 1.0)), width=7 + 2 + 2 * 22).splitlines()[0]
    assert rank.endswith("F9B9F-B=|")


def test_nothing_runs_in_a_batch_of_zero_seconds() -> None:
    zero = DAG.simulate(dict.fromkeys(DAG.order, 0.0))
    empty = PipelineDag(Schedule(())).simulate({})
    assert text_grid(zero, width=12).splitlines() == ["rank 0 |   |", "rank 1 |   |", "       0 s 0 s"]
    assert [event["ph"] for event in chrome_trace({"empty": empty})["traceEvents"]] == ["M"]
    assert all(event["dur"] == 0 for event in chrome_trace({"zero": zero})["traceEvents"] if event["ph"] == "X")


def test_trace_of_a_batch_by_hand() -> None:
    expected = json.loads((ASSETS / "trace_2x2.json").read_text())
    assert json.loads(json.dumps(chrome_trace(TIMELINES, RATIOS))) == expected


@pytest.mark.parametrize("timeline", random_timelines())
def test_a_trace_has_each_instruction_once_without_overlap(timeline: Timeline) -> None:
    events = [event for event in chrome_trace({"it": timeline})["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(timeline.start)
    for rank, instructions in enumerate(timeline.dag.schedule.ranks):
        thread = sorted((event for event in events if event["tid"] == rank), key=lambda event: event["ts"])
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(thread))
        busy_s = sum(timeline.end[i] - timeline.start[i] for i in instructions)
        assert sum(event["dur"] for event in thread) == pytest.approx(busy_s * 1e6, abs=len(thread))
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.makespan * 1e6, abs=0.5)
    assert min(event["ts"] for event in events) == 0


def test_a_trace_of_the_published_profile_is_exact(published: tuple[PipelineDag, Costs]) -> None:
    dag, costs = published
    timeline = dag.simulate(costs.seconds({}))
    events = [event for event in chrome_trace({"it": timeline})["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in events) == 675_000
    assert sum(event["dur"] for event in events) == round(1e6 * sum(costs.seconds({}).values()))


def test_a_measured_step_is_laid_out_from_its_durations() -> None:
    stage_seconds = [{(i.kind, i.micro_batch_id): SECONDS[i] for i in rank} for rank in DAG.schedule.ranks]
    assert measured_timeline(DAG, stage_seconds, 0.5) == DAG.simulate(SECONDS, 0.5)
    stage_seconds[1]["B", 0] = 1.0
    assert measured_timeline(DAG, stage_seconds).makespan == 8.0


def test_a_measured_step_of_another_batch_is_refused() -> None:
    stage_seconds = [{(i.kind, i.micro_batch_id): SECONDS[i] for i in rank} for rank in DAG.schedule.ranks]
    with pytest.raises(ScheduleError, match="1B1 has no duration"):
        measured_timeline(DAG, [stage_seconds[0], {key: 1.0 for key in stage_seconds[1] if key != ("B", 1)}])
    with pytest.raises(ScheduleError, match="0B2 was measured but is not in the batch"):
        measured_timeline(DAG, [{**stage_seconds[0], ("B", 2): 1.0}, stage_seconds[1]])


# -- drawing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ax():
    figure = pytest.importorskip("matplotlib.figure")
    return figure.Figure(figsize=(10, 4)).add_subplot()


def bars(ax, label: str) -> set[tuple[float, float, float]]:
    """Start, width and middle of every bar with this label."""
    patches = [patch for container in ax.containers if container.get_label() == label for patch in container.patches]
    return {
        (round(p.get_x(), 9), round(p.get_width(), 9), round(p.get_y() + p.get_height() / 2, 9)) for p in patches
    }


@pytest.mark.parametrize("index", range(3))
def test_bars_are_the_instructions(ax, index: int) -> None:
    timeline = random_timelines()[index]
    draw(ax, timeline)
    schedule = timeline.dag.schedule
    for kind, (label, _, _) in KINDS.items():
        assert bars(ax, label) == {
            (round(timeline.start[i], 9), round(timeline.end[i] - timeline.start[i], 9), schedule.rank_of(i.stage_id))
            for i in schedule.instructions
            if i.kind == kind
        }
    assert sum(len(container.patches) for container in ax.containers) == len(timeline.start)


def test_the_skipped_share_is_a_share_of_the_bar(ax) -> None:
    ratio, timeline = 0.25, TIMELINES["planned"]
    draw(ax, timeline, {FROZEN: ratio, Instruction.parse("0B0"): 0.0})
    (shade,) = next(c for c in ax.containers if c.get_label() == SKIPPED).patches
    (bar,) = [p for c in ax.containers if c.get_label() == "backward" for p in c.patches if p.get_x() == timeline.start[FROZEN]]
    assert (shade.get_x(), shade.get_width()) == (bar.get_x(), bar.get_width())
    assert shade.get_height() == pytest.approx(ratio * bar.get_height() / 2)
    assert shade.get_y() == pytest.approx(bar.get_y())  # the upper edge: the axis points down


def test_the_critical_path_joins_starts_and_ends(ax) -> None:
    timeline = TIMELINES["planned"]
    draw(ax, timeline)
    (line,) = [line for line in ax.lines if line.get_label() == CRITICAL]
    path = timeline.critical_path()
    assert list(line.get_xdata()) == [t for i in path for t in (timeline.start[i], timeline.end[i])]
    assert [round(y) for y in line.get_ydata()] == [i.stage_id for i in path for _ in range(2)]
    assert all(0.1 < y - round(y) < 0.5 for y in line.get_ydata())  # below the labels: the axis points down


def test_without_critical_path(ax) -> None:
    draw(ax, TIMELINES["planned"], critical_path=False)
    assert not ax.lines


def test_micro_batches_are_written_where_they_fit(ax) -> None:
    draw(ax, TIMELINES["planned"])
    assert sorted(text.get_text() for text in ax.texts) == ["0"] * 4 + ["1"] * 4
    ax.clear()
    draw(ax, DAG.simulate({i: 0.001 if i.is_forward else 1.0 for i in DAG.order}))
    assert sorted(text.get_text() for text in ax.texts) == ["0"] * 2 + ["1"] * 2
    ax.clear()
    draw(ax, random_timelines()[2])
    assert {text.get_text() for text in ax.texts} <= {"0:0", "1:0", "2:0"}


def test_a_written_label_is_inside_its_bar(ax, published: tuple[PipelineDag, Costs]) -> None:
    dag, costs = published
    draw(ax, dag.simulate(costs.seconds({})))
    ax.figure.draw_without_rendering()
    boxes = [patch.get_window_extent() for container in ax.containers for patch in container.patches]
    assert ax.texts
    for text in ax.texts:
        box = text.get_window_extent()
        assert any(bar.x0 <= box.x0 and box.x1 <= bar.x1 and bar.y0 <= box.y0 and box.y1 <= bar.y1 for bar in boxes)


def test_a_comparison_has_one_axis_and_each_makespan(ax) -> None:
    draw_comparison(ax, {**TIMELINES, "measured": DAG.simulate(SECONDS, 0.5)}, RATIOS)
    texts = [text.get_text() for text in ax.texts if not text.get_text().isdigit()]
    # Each rank is busy for 6 s, but for the second of 1B0 that is planned to be frozen.
    assert ["".join(pair) for pair in zip(texts[::2], texts[1::2], strict=True)] == [
        "unfrozen: 9 s, bubble 33%",
        "planned: 8 s, 1.12x, bubble 31%, mean freeze ratio 0.50",
        "measured: 10 s, 0.90x, bubble 40%",
    ]
    ends = [set(line.get_xdata()) for line in ax.lines if line.get_label() == "makespan"]
    assert ends == [{9.0}, {8.0}, {10.0}]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["rank 0", "rank 1"] * 3
    assert len(bars(ax, "backward")) == 3 * 4
    assert sum(len(c.patches) for c in ax.containers if c.get_label() == SKIPPED) == 1
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["forward", "backward", SKIPPED, WAITING, CRITICAL, "makespan"]
    assert ax.get_xlim()[1] >= 10.0


def test_a_backward_in_two_is_drawn_as_what_it_is_made_of(ax) -> None:
    """1B0 of 1.5 s: 1.25 s for the input, and of the other 0.75 s a third for the weights."""
    timeline = DAG.simulate({**SECONDS, FROZEN: 1.5})
    draw(ax, timeline, {FROZEN: 2 / 3}, input_s={FROZEN: 1.25, Instruction.parse("0B0"): 9.0})
    start = timeline.start[FROZEN]
    assert bars(ax, "weight gradient") == {(start + 1.25, 0.25, 1.0)}
    assert bars(ax, "input gradient") == {(start, 1.25, 1.0), (timeline.start[Instruction.parse("0B0")], 2.0, 0.0)}
    assert len(bars(ax, "backward")) == 2 and bars(ax, SKIPPED) == {(start, 1.5, 0.733333333)}


def test_a_weight_gradient_that_is_skipped_whole_is_seen_on_its_input_gradient(ax) -> None:
    dag = PipelineDag(zb_h1(2, 2))
    timeline = dag.simulate({i: float(str(i) != "1W0") for i in dag.order})
    draw(ax, timeline, {Instruction.parse("1W0"): 1.0, Instruction.parse("0W0"): 0.0})
    starts = {start for start, *_ in bars(ax, SKIPPED)}
    assert starts == {timeline.start[Instruction.parse(text)] for text in ("1I0", "1W0")}


@pytest.mark.parametrize("index", range(3))
def test_what_is_waited_is_the_bubble(ax, index: int) -> None:
    """Beside the instructions, second by second of each rank."""
    timeline = random_timelines()[index]
    timeline = timeline.dag.simulate({i: timeline.end[i] - timeline.start[i] for i in timeline.start}, 0.0007, {0: 0.01})
    gaps, schedule = waiting(timeline), timeline.dag.schedule
    total = sum(seconds for of_rank in gaps for _, seconds in of_rank)
    assert total == pytest.approx(timeline.bubble_ratio * schedule.num_ranks * timeline.makespan)
    for rank, (of_rank, instructions) in enumerate(zip(gaps, schedule.ranks, strict=True)):
        spans = [(start, start + seconds) for start, seconds in of_rank]
        spans += [(timeline.start[i], timeline.end[i]) for i in instructions]
        spans += [(timeline.end[instructions[-1]], timeline.end[instructions[-1]] + (0.01 if rank == 0 else 0.0))]
        spans.sort()
        assert spans[0][0] == 0.0 and spans[-1][1] == pytest.approx(timeline.makespan)
        assert all(before[1] == pytest.approx(after[0]) for before, after in pairwise(spans))
    draw(ax, timeline)
    drawn = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    expected = sorted(gap for of_rank in gaps for gap in of_rank)
    assert sorted((box.x0, box.width) for box in drawn) == [pytest.approx(gap) for gap in expected]


def test_a_comparison_of_empty_batches(ax) -> None:
    draw_comparison(ax, {"empty": PipelineDag(Schedule(())).simulate({}), "zero": DAG.simulate(dict.fromkeys(DAG.order, 0.0))})
    ax.clear()
    draw_comparison(ax, {})


def test_a_comparison_grows_with_its_rows() -> None:
    width, height = comparison_size(TIMELINES)
    assert comparison_size({**TIMELINES, "measured": TIMELINES["planned"]}) > (width, height)
