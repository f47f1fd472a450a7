"""``python -m rlfreeze_ds plan``: a plan from a measured profile; ``timeline``: the batches of a run; both need no GPU, torch or
deepspeed. ``serve``: the policy server, which needs the ``server`` extra."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlfreeze_ds.errors import ConfigError, RLFreezeError
from rlfreeze_ds.planning.atomic_write import write_text
from rlfreeze_ds.planning.plan import Plan
from rlfreeze_ds.policy.serve import add_arguments as add_serve_arguments
from rlfreeze_ds.policy.serve import serve

if TYPE_CHECKING:
    from rlfreeze_ds.planning.comparison import PlannedBatch
    from rlfreeze_ds.planning.cost_model import Costs
    from rlfreeze_ds.planning.dag import PipelineDag, Timeline
    from rlfreeze_ds.planning.instruction import Instruction


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 when it worked, 2 with one message on stderr when its input is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except RLFreezeError as error:
        print(f"rlfreeze_ds {arguments.command}: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlfreeze_ds", description="Freeze parameters where time is lost.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,timeline,serve}")
    plan = commands.add_parser(
        "plan",
        help="a freeze ratio per stage and micro-batch from a measured profile",
        description="Find the least freezing that makes a batch nearly as short as freezing can.",
    )
    plan.add_argument(
        "--profile", required=True, metavar="CSV", help="rank,stage_id,micro_batch_id,kind,unfrozen_s,frozen_s"
    )
    plan.add_argument(
        "--schedule", nargs="+", choices=("stock", "zb-h1", "planned"), metavar="NAME", dest="schedules",
        help="stock (1F1B), zb-h1, planned: plan for this schedule of the engine, with the seconds of the profile (default: for "
        "the profile's own order); of several: compare them, unfrozen and planned",
    )  # fmt: skip
    plan.add_argument(
        "--transfer-s", type=float, default=0.0, metavar="SECONDS",
        help="of a transfer between two ranks; with --schedule it blocks both (default: 0)",
    )  # fmt: skip
    plan.add_argument(
        "--most-held", type=int, metavar="N",
        help="micro-batches that a stage may hold under the schedule planned (default: as 1F1B's first stage)",
    )  # fmt: skip
    plan.add_argument(
        "--max-freeze-ratio", type=float, default=0.5, metavar="R",
        help="share of a stage's weight-gradient time that may be skipped, 0 to 1 (default: %(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--time-slack", type=float, default=0.02, metavar="S",
        help="share of the least makespan to give up for less freezing (default: %(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--target-speedup", type=float, metavar="X", help="least freezing for a batch X times as fast, in place of --time-slack"
    )
    plan.add_argument(
        "--objective", choices=("makespan", "progress"), default="makespan",
        help="makespan: shortest batch, then least freezing (default); progress: most expected loss decrease per second",
    )  # fmt: skip
    plan.add_argument(
        "--noise-scale", type=float, metavar="B",
        help="gradient noise scale in micro-batches, of every stage (default: unknown, so the worst case)",
    )  # fmt: skip
    plan.add_argument("--frontier", action="store_true", help="freeze ratio against makespan, from nothing to the shortest batch")
    plan.add_argument("--frontier-picture", metavar="PATH", help="draw that: .png, .svg or .pdf")
    plan.add_argument(
        "--solver", choices=("auto", "highs", "cbc"), default="auto", help="auto: HiGHS, then CBC (default)"
    )
    plan.add_argument("--time-limit-s", type=float, default=10.0, metavar="SECONDS", help="default: %(default)s")
    plan.add_argument("--json", metavar="PATH", help="write the plan there as well")
    plan.add_argument("--gantt", metavar="PATH", help="draw the batches: .png, .svg or .pdf")
    plan.add_argument("--trace", metavar="PATH", help="write them as a trace for chrome://tracing, ui.perfetto.dev")
    plan.set_defaults(run=_run_plan)
    timeline = commands.add_parser(
        "timeline",
        help="a run's batch with nothing frozen, as planned and as measured",
        description="Lay out the batches of a run that had RLFREEZE_RUN_DIR set.",
    )
    timeline.add_argument("--run", required=True, dest="folder", metavar="DIR", help="what RLFREEZE_RUN_DIR was")
    timeline.add_argument("--gantt", metavar="PATH", help="draw the three: .png, .svg or .pdf")
    timeline.add_argument("--trace", metavar="PATH", help="write them as a trace for chrome://tracing, ui.perfetto.dev")
    timeline.set_defaults(run=_run_timeline)
    server = commands.add_parser(
        "serve",
        help="a policy that learns from running jobs how far to freeze",
        description="Answer training jobs that freeze, and learn from what comes of it.",
    )
    add_serve_arguments(server)
    server.set_defaults(run=serve)
    return parser


def _run_plan(arguments: argparse.Namespace) -> int:
    from rlfreeze_ds.planning.dag import PipelineDag
    from rlfreeze_ds.planning.explain import explain
    from rlfreeze_ds.planning.frontier import frontier
    from rlfreeze_ds.planning.picture import save_picture
    from rlfreeze_ds.planning.profile import read_profile
    from rlfreeze_ds.planning.progress import equal_stages
    from rlfreeze_ds.planning.solver import Limits, solve

    schedules = _schedules(arguments)
    limits = Limits(arguments.max_freeze_ratio, arguments.time_slack, target_speedup=arguments.target_speedup)
    schedule, costs = read_profile(arguments.profile)
    costs = replace(costs, transfer_s=arguments.transfer_s)
    progress = equal_stages(schedule.num_stages, schedule.num_micro_batches, arguments.noise_scale)
    how = {"progress": progress, "solver": arguments.solver, "time_limit_s": arguments.time_limit_s}

    def ask(dag: PipelineDag, costs: Costs) -> Plan:
        return solve(dag, costs, limits, objective=arguments.objective, **how)

    extra: list[str] = []
    if not schedules:
        dag = PipelineDag(schedule)
        plan = ask(dag, costs)
    else:
        from rlfreeze_ds.planning.comparison import ProfiledBatch, compare

        batch = ProfiledBatch(schedule, costs, arguments.most_held)
        if len(schedules) > 1:
            return _compared(arguments, compare(batch, schedules, limits, objective=arguments.objective, **how))
        found = batch.planned(schedules[0], ask, limits.max_freeze_ratio)
        dag, costs, plan = found.dag, found.costs, found.plan
        # The plan's own speed-up is over the same order with nothing frozen, which nobody would run.
        times = f"  ({batch.stock_s / plan.planned_makespan_s:.2f}x)" if plan.planned_makespan_s > 0 else ""
        extra = [
            f"stock_makespan_s       {batch.stock_s:.6f}{times}",
            f"micro_batches_held     {'  '.join(map(str, found.held))}",
        ]
    lines = [_text(plan, extra), "", _planned_batch(arguments, dag, costs, plan), "", *explain(dag, costs, plan)]
    document = plan.to_json()
    if arguments.frontier or arguments.frontier_picture is not None:
        curve = frontier(dag, costs, limits, **how)
        document["frontier"] = curve.to_json()
        lines += ["", "the least freezing for each makespan", curve.table()]
        if arguments.frontier_picture is not None:
            save_picture(arguments.frontier_picture, curve.draw)
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(document, indent=2, allow_nan=False) + "\n")
    print("\n".join(lines))
    return 0


def _schedules(arguments: argparse.Namespace) -> list[str]:
    """What ``--schedule`` names.

    Raises:
        ConfigError: one is named twice, or an option is of no use with what is named.
    """
    schedules = arguments.schedules or []
    twice = next((name for name in schedules if schedules.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--schedule names {twice} twice: name each schedule once.")
    if arguments.most_held is not None and "planned" not in schedules:
        raise ConfigError("--most-held limits the order that is searched: add planned to --schedule, or leave it out.")
    if len(schedules) > 1 and (arguments.frontier or arguments.frontier_picture is not None):
        raise ConfigError("--frontier is of one schedule: name one with --schedule.")
    return schedules


def _planned_batch(arguments: argparse.Namespace, dag: PipelineDag, costs: Costs, plan: Plan) -> str:
    """The planned batch as text; the picture and the trace that were asked for are written."""
    from rlfreeze_ds.planning.comparison import input_seconds

    ratios = {"unfrozen": {}, "planned": plan.ratios}
    batches = {name: dag.simulate(costs.seconds(ratios[name]), costs.transfer_s, costs.tail_s) for name in ratios}
    _write_batches(arguments, batches, ratios, dict.fromkeys(ratios, input_seconds(costs)))
    return _grid("planned", batches["planned"])


def _compared(arguments: argparse.Namespace, batches: Mapping[str, PlannedBatch]) -> int:
    from rlfreeze_ds.planning.comparison import input_seconds, table, to_json

    timelines = {name: batch.timeline for name, batch in batches.items()}
    ratios = {name: batch.plan.ratios for name, batch in batches.items()}
    input_s = {name: input_seconds(batch.costs) for name, batch in batches.items()}
    _write_batches(arguments, timelines, ratios, input_s, critical_path=False)
    if arguments.json is not None:
        write_text(arguments.json, json.dumps({"batches": to_json(batches)}, indent=2, allow_nan=False) + "\n")
    print(table(batches))
    return 0


def _run_timeline(arguments: argparse.Namespace) -> int:
    from rlfreeze_ds.telemetry.run_batches import read_run

    found = read_run(arguments.folder)
    _write_batches(arguments, found.timelines, found.ratios)
    print(
        f"step {found.step}: predicted {found.predicted_s:.4g} s, measured {found.measured_s:.4g} s "
        f"({found.predicted_s / found.measured_s - 1:+.1%})"
    )
    for name, timeline in found.timelines.items():
        print(f"\n{_grid(name, timeline)}")
    return 0


def _write_batches(
    arguments: argparse.Namespace,
    batches: Mapping[str, Timeline],
    ratios: Mapping[str, Mapping[Instruction, float]],
    input_s: Mapping[str, Mapping[Instruction, float]] | None = None,
    critical_path: bool = True,
) -> None:
    """The picture and the trace that were asked for."""
    from rlfreeze_ds.planning import timeline
    from rlfreeze_ds.planning.picture import save_picture

    if arguments.gantt is not None:
        size = timeline.comparison_size(batches)
        save_picture(arguments.gantt, lambda ax: timeline.draw_comparison(ax, batches, ratios, critical_path, input_s), size=size)
    if arguments.trace is not None:
        write_text(arguments.trace, json.dumps(timeline.chrome_trace(batches, ratios), allow_nan=False) + "\n")


def _grid(name: str, batch: Timeline) -> str:
    from rlfreeze_ds.planning.timeline import text_grid

    grid = text_grid(batch, shutil.get_terminal_size((100, 24)).columns)
    return f"the {name} batch (F forward, B = I + W backward, blank: waiting)\n{grid}"


def _text(plan: Plan, extra: Sequence[str]) -> str:
    """Everything that plan.json holds, for people, with ``extra`` lines."""
    stages = "  ".join(f"{ratio:.4f}" for ratio in plan.stage_freeze_ratio)
    return "\n".join(
        [
            f"verdict                {plan.verdict}",
            f"unfrozen_makespan_s    {plan.unfrozen_makespan_s:.6f}",
            f"planned_makespan_s     {plan.planned_makespan_s:.6f}",
            f"all_frozen_makespan_s  {plan.all_frozen_makespan_s:.6f}",
            f"mean_freeze_ratio      {plan.mean_freeze_ratio:.4f}",
            f"stage_freeze_ratio     {stages}",
            f"bubble_ratio           {plan.bubble_ratio:.4f}  (unfrozen {plan.unfrozen_bubble_ratio:.4f})",
            f"expected_kept_progress {plan.expected_kept_progress:.4f}",
            f"expected_loss_per_second_gain  {plan.expected_loss_per_second_gain:.4f}",
            f"solver                 {plan.solver}",
            *extra,
            "",
            plan.grid(),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
