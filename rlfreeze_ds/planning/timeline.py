"""A batch as a picture, as text and as a trace.

Drawing works on a matplotlib Axes that the caller made, so this module needs no matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.dag import PipelineDag, Timeline
from rlfreeze_ds.planning.instruction import Instruction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ratios = Mapping[Instruction, float]
"""Freeze ratio in [0, 1] of an instruction; 0 where it lacks one."""

KINDS = {
    "F": ("forward", "#b9c0c8", "-"),
    "B": ("backward", "#6699cc", "="),
    "I": ("input gradient", "#88aed6", "="),
    "W": ("weight gradient", "#eecc66", "~"),
}
"""Per kind its name, its colour and its filler in a text. Greys, blues and yellows of different lightness: they differ for
colour-blind readers and in grey print."""

SKIPPED = "skipped share of weight gradient (half a bar: all)"
WAITING = "waiting"
CRITICAL = "critical path"
MAKESPAN = "makespan"
_ICE_COLOUR, _PATH_COLOUR, _TEXT_COLOUR = "#e2edf8", "#994455", "#222222"
_WAITING_COLOUR = "#f1efec"
_BAR_HEIGHT = 0.8
# Of a bar's height: what an instruction's freeze ratio is a share of. Below it the bar keeps its colour, for I is never skipped.
_ICE_HEIGHT = 0.5
_LABEL_POINTS = 7.0
_GROUP_GAP = 1.0


def measured_timeline(
    dag: PipelineDag,
    stage_seconds: Sequence[Mapping[tuple[str, int], float]],
    transfer_s: float = 0.0,
    tail_s: Mapping[int, float] | None = None,
) -> Timeline:
    """A step that really ran, laid out from the measured seconds of its instructions.

    A run knows how long each instruction took, not when it began on a clock that the ranks share. So the durations are
    measured, but starts, waiting and makespan are the simulator's: compare the latter with the measured makespan.

    Args:
        dag: the batch that ran, one stage a rank.
        stage_seconds: per stage, (kind, micro_batch_id) to seconds, as in ``telemetry.profiler.StepTiming.seconds``.
        transfer_s: seconds of a transfer from one rank to another.
        tail_s: per rank, seconds of what follows its last instruction.

    Raises:
        ScheduleError: the instructions that were measured are not those of the batch.
    """
    seconds = {
        Instruction(stage_id, micro_batch_id, kind): value
        for stage_id, stage in enumerate(stage_seconds)
        for (kind, micro_batch_id), value in stage.items()
    }
    unknown = sorted(seconds.keys() - set(dag.schedule.instructions))
    if unknown:
        raise ScheduleError(f"{unknown[0]} was measured but is not in the batch: pass the timings of one step of it.")
    return dag.simulate(seconds, transfer_s, tail_s)


def waiting(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Per rank the (start, seconds) in which it runs nothing, from the first start of the batch to its end, transfers included.

    They add up to ``timeline.bubble_ratio`` of the rank-seconds of the batch.
    """
    found = []
    for rank, instructions in enumerate(timeline.dag.schedule.ranks):
        gaps, end = [], 0.0
        for i in instructions:
            gaps.append((end, timeline.start[i] - end))
            end = timeline.end[i]
        end += timeline.tail_s.get(rank, 0.0) if instructions else 0.0
        gaps.append((end, timeline.makespan - end))
        found.append([(start, seconds) for start, seconds in gaps if seconds > 0])
    return found


def draw(
    ax: Axes,
    timeline: Timeline,
    ratios: Ratios | None = None,
    critical_path: bool = True,
    input_s: Mapping[Instruction, float] | None = None,
) -> None:
    """Draw a batch as a Gantt chart: a row a rank, a bar an instruction, in seconds.

    The top of a backward's bars is ice-coloured: as much of their upper half as the freeze ratio of its B or W. Bars carry their
    micro-batch where it fits (stage:micro-batch where a rank holds several stages).

    Args:
        ax: an empty matplotlib Axes.
        timeline: what to draw.
        ratios: the freeze ratios that its durations stand for.
        critical_path: draw one critical path over it, as a line.
        input_s: of a B, the seconds of its I. Its bar is drawn as an I and a W then, as one B otherwise.
    """
    _set_time_axis(ax, timeline.makespan)
    _draw_rows(ax, timeline, ratios or {}, 0.0, critical_path, input_s or {})
    _finish(ax, {float(rank): f"rank {rank}" for rank in range(timeline.dag.schedule.num_ranks)}, above=0.6)


def draw_comparison(
    ax: Axes,
    timelines: Mapping[str, Timeline],
    ratios: Mapping[str, Ratios] | None = None,
    critical_path: bool = True,
    input_s: Mapping[str, Mapping[Instruction, float]] | None = None,
) -> None:
    """Draw several batches below each other on one time axis, each as :func:`draw` does, with its makespan, the share of its
    rank-seconds that is waiting, and the mean of its freeze ratios.

    Args:
        ax: an empty matplotlib Axes; :func:`comparison_size` says which size suits it.
        timelines: what to draw, by name; speed-ups are over the first.
        ratios: the freeze ratios that a timeline's durations stand for, by the same names.
        critical_path: draw one critical path over each.
        input_s: of a B, the seconds of its I, by the same names.
    """
    _set_time_axis(ax, max((timeline.makespan for timeline in timelines.values()), default=0.0))
    ticks: dict[float, str] = {}
    top, first_s = 0.0, None
    for name, timeline in timelines.items():
        num_ranks, makespan = timeline.dag.schedule.num_ranks, timeline.makespan
        own = (ratios or {}).get(name, {})
        _draw_rows(ax, timeline, own, top, critical_path, (input_s or {}).get(name, {}))
        ticks |= {top + rank: f"rank {rank}" for rank in range(num_ranks)}
        text = f"{makespan:.4g} s"
        if first_s is None:
            first_s = makespan
        elif makespan > 0:
            text += f", {first_s / makespan:.2f}x"
        text += f", bubble {timeline.bubble_ratio:.0%}"
        if any(own.values()):
            text += f", mean freeze ratio {math.fsum(own.values()) / len(own):.2f}"
        place = {"ha": "left", "va": "bottom", "color": _TEXT_COLOUR, "fontsize": 9}
        title = ax.text(0.0, top - 0.5, f"{name}: ", fontweight="bold", **place)
        ax.annotate(text, (1.0, 0.0), xycoords=title, **place)
        edges = [top - 0.5, top + num_ranks - 0.5]
        ax.plot([makespan, makespan], edges, color=_TEXT_COLOUR, linewidth=1.0, linestyle=":", label=MAKESPAN)
        top += num_ranks + _GROUP_GAP
    _finish(ax, ticks, above=1.1)


def comparison_size(timelines: Mapping[str, Timeline]) -> tuple[float, float]:
    """Width and height, in inches, that suit :func:`draw_comparison`."""
    num_rows = sum(timeline.dag.schedule.num_ranks + _GROUP_GAP for timeline in timelines.values())
    return 12.0, 1.2 + 0.28 * num_rows


def _set_time_axis(ax: Axes, longest_s: float) -> None:
    # Before the bars: which labels fit depends on the scale. A little room lets the end of the batch be seen.
    ax.set_xlim(0.0, 1.01 * longest_s if longest_s > 0 else 1.0)
    ax.set_xlabel("seconds")


def _draw_rows(
    ax: Axes, timeline: Timeline, ratios: Ratios, top: float, critical_path: bool, input_s: Mapping[Instruction, float]
) -> None:
    """Bars, labels and critical path of one timeline, rank 0 at height ``top``."""
    schedule = timeline.dag.schedule
    row = {i: top + schedule.rank_of(i.stage_id) for i in timeline.start}
    left = timeline.start
    width = {i: timeline.end[i] - timeline.start[i] for i in timeline.start}
    for rank, gaps in enumerate(waiting(timeline)):
        if gaps:
            place = (top + rank - _BAR_HEIGHT / 2, _BAR_HEIGHT)
            ax.broken_barh(gaps, place, facecolor=_WAITING_COLOUR, linewidth=0, label=WAITING, zorder=0.9)
    # Per kind the (instruction, start, seconds) of its bars.
    bars: dict[str, list[tuple[Instruction, float, float]]] = {kind: [] for kind in KINDS}
    for i in left:
        if i.kind == "B" and i in input_s:
            of_input = min(input_s[i], width[i])
            bars["I"] += [(i, left[i], of_input)] if of_input > 0 else []
            bars["W"] += [(i, left[i] + of_input, width[i] - of_input)] if width[i] > of_input else []
        else:
            bars[i.kind].append((i, left[i], width[i]))
    for kind, (name, colour, _) in KINDS.items():
        if bars[kind]:
            of, starts, seconds = zip(*bars[kind], strict=True)
            ax.barh(
                [row[i] for i in of], seconds, left=starts,
                height=_BAR_HEIGHT, color=colour, edgecolor="white", linewidth=0.6, label=name,
            )  # fmt: skip
    skipped = {i: ratio for i in left if (ratio := _ratio_of(i, ratios)) > 0}
    if skipped:
        ax.barh(
            [row[i] - _BAR_HEIGHT / 2 for i in skipped], [width[i] for i in skipped], left=[left[i] for i in skipped],
            height=[_ICE_HEIGHT * _BAR_HEIGHT * ratio for ratio in skipped.values()], align="edge", color=_ICE_COLOUR,
            edgecolor="#9fb6cc", linewidth=0.4, label=SKIPPED,
        )  # fmt: skip
    low_s, high_s = ax.get_xlim()
    points_per_second = ax.get_window_extent().width * 72.0 / ax.figure.dpi / (high_s - low_s)
    several = _several_stages_a_rank(timeline)
    labels = {i: f"{i.stage_id}:{i.micro_batch_id}" if several else str(i.micro_batch_id) for i in left}
    # The longest label decides for all: a row that stops counting at 9 looks like a mistake.
    needed_s = 0.75 * _LABEL_POINTS * max(map(len, labels.values()), default=0) / points_per_second
    for i, start, seconds in (bar for of_kind in bars.values() for bar in of_kind):
        if seconds > needed_s:
            place = (start + seconds / 2, row[i] + 0.12 * _BAR_HEIGHT)  # clear of the ice
            ax.text(*place, labels[i], ha="center", va="center", fontsize=_LABEL_POINTS, color=_TEXT_COLOUR)
    if critical_path:
        # Along the lower edge of the bars, where it hides neither labels nor the skipped share.
        path = timeline.critical_path()
        times = [time for i in path for time in (timeline.start[i], timeline.end[i])]
        rows = [row[i] + 0.4 * _BAR_HEIGHT for i in path for _ in range(2)]
        ax.plot(times, rows, color=_PATH_COLOUR, linewidth=1.6, solid_joinstyle="round", label=CRITICAL)


def _ratio_of(instruction: Instruction, ratios: Ratios) -> float:
    """Of a B or W its own; of an I that of its W, for one that is skipped whole has no bar to show it on."""
    if instruction.kind == "I":
        instruction = replace(instruction, kind="W")
    return ratios.get(instruction, 0.0)


def _finish(ax: Axes, ticks: Mapping[float, str], above: float) -> None:
    """Ranks from top to bottom, with ``above`` rows of room for a title; a light grid; a legend."""
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set_ylim(max(ticks, default=0.0) + 0.6, -above)
    ax.tick_params(labelsize=9)
    ax.tick_params(axis="y", length=0)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    drawn = dict(zip(labels, handles, strict=True))
    order = [name for name in (*(name for name, *_ in KINDS.values()), SKIPPED, WAITING, CRITICAL, MAKESPAN) if name in drawn]
    if order:
        ax.legend(
            [drawn[name] for name in order], order, ncols=len(order), loc="lower left", bbox_to_anchor=(0.0, 1.0),
            frameon=False, fontsize=8, borderaxespad=0.3,
        )  # fmt: skip


def text_grid(timeline: Timeline, width: int = 100) -> str:
    """A batch as text: a row a rank, time to the right, blank while the rank waits; the last line is the time axis.

    Each instruction begins with its kind and micro-batch (its stage as well where a rank holds several), or with its
    kind alone where it is too short for that; one shorter than half a column is left out.

    Args:
        timeline: what to show.
        width: characters a line.
    """
    schedule, makespan = timeline.dag.schedule, timeline.makespan
    names = [f"rank {rank} " for rank in range(schedule.num_ranks)]
    margin = max((len(name) for name in names), default=0)
    columns = max(1, width - margin - 2)
    per_second = columns / makespan if makespan > 0 else 0.0
    several = _several_stages_a_rank(timeline)
    lines = []
    for name, instructions in zip(names, schedule.ranks, strict=True):
        cells = [" "] * columns
        for i in instructions:
            first, last = round(timeline.start[i] * per_second), round(timeline.end[i] * per_second)
            label = str(i) if several else f"{i.kind}{i.micro_batch_id}"
            label = label if len(label) <= last - first else i.kind
            cells[first:last] = label.ljust(last - first, KINDS[i.kind][2])[: last - first]
        lines.append(f"{name.ljust(margin)}|{''.join(cells)}|")
    lines.append(" " * margin + "0 s " + f"{makespan:.4g} s".rjust(columns + 2 - len("0 s ")))
    return "\n".join(lines)


def chrome_trace(timelines: Mapping[str, Timeline], ratios: Mapping[str, Ratios] | None = None) -> dict[str, Any]:
    """Batches as trace events (JSON values) for chrome://tracing and ui.perfetto.dev.

    A process a timeline, a thread a rank, whole microseconds: a viewer then sees no two instructions overlap.

    Args:
        timelines: what to write, by name.
        ratios: the freeze ratios that a timeline's durations stand for, by the same names.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_name_event("process_name", process, 0, name))
        for rank, instructions in enumerate(timeline.dag.schedule.ranks):
            events.append(_name_event("thread_name", process, rank, f"rank {rank}"))
            for i in instructions:
                start_us, end_us = round(timeline.start[i] * 1e6), round(timeline.end[i] * 1e6)
                arguments: dict[str, Any] = {"stage_id": i.stage_id, "micro_batch_id": i.micro_batch_id}
                if i.computes_weight_gradient:
                    arguments["freeze_ratio"] = (ratios or {}).get(name, {}).get(i, 0.0)
                events.append(
                    {
                        "name": f"{i.kind} {i.micro_batch_id}",
                        "cat": KINDS[i.kind][0],
                        "ph": "X",
                        "ts": start_us,
                        "dur": end_us - start_us,
                        "pid": process,
                        "tid": rank,
                        "args": arguments,
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _several_stages_a_rank(timeline: Timeline) -> bool:
    return timeline.dag.schedule.num_stages > timeline.dag.schedule.num_ranks
