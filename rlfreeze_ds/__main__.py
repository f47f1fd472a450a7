"""``python -m rlfreeze_ds plan``: a plan from a measured profile. Needs no GPU, torch or deepspeed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.plan import Plan


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
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan}")
    plan = commands.add_parser(
        "plan",
        help="a freeze ratio per stage and micro-batch from a measured profile",
        description="Find the least freezing that makes a batch nearly as short as freezing can.",
    )
    plan.add_argument(
        "--profile", required=True, metavar="CSV", help="rank,stage_id,micro_batch_id,kind,unfrozen_s,frozen_s"
    )
    plan.add_argument(
        "--max-freeze-ratio", type=float, default=0.5, metavar="R",
        help="share of a stage's weight-gradient time that may be skipped, 0 to 1 (default: %(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--time-slack", type=float, default=0.02, metavar="S",
        help="share of the least makespan to give up for less freezing (default: %(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--solver", choices=("auto", "highs", "cbc"), default="auto", help="auto: HiGHS, then CBC (default)"
    )
    plan.add_argument("--time-limit-s", type=float, default=10.0, metavar="SECONDS", help="default: %(default)s")
    plan.add_argument("--json", metavar="PATH", help="write the plan there as well")
    plan.set_defaults(run=_run_plan)
    return parser


def _run_plan(arguments: argparse.Namespace) -> int:
    from rlfreeze_ds.planning.dag import PipelineDag
    from rlfreeze_ds.planning.explain import explain
    from rlfreeze_ds.planning.profile import read_profile
    from rlfreeze_ds.planning.solver import Limits, solve

    limits = Limits(max_freeze_ratio=arguments.max_freeze_ratio, time_slack=arguments.time_slack)
    schedule, costs = read_profile(arguments.profile)
    dag = PipelineDag(schedule)
    plan = solve(dag, costs, limits, solver=arguments.solver, time_limit_s=arguments.time_limit_s)
    if arguments.json is not None:
        plan.save(arguments.json)
    print("\n".join([_text(plan), "", *explain(dag, costs, plan)]))
    return 0


def _text(plan: Plan) -> str:
    """Everything that plan.json holds, for people."""
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
            f"solver                 {plan.solver}",
            "",
            plan.grid(),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
