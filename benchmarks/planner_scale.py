"""How the planner's cost grows with the pipeline: seconds and memory from the instruction order to the checked plan.

How to run: python benchmarks/planner_scale.py --json benchmarks/records/planner_scale.json
What to expect: about two minutes. 1F1B; forward, input gradient and weight gradient of each stage drawn from 0.8 to 1.2 s;
limit 0.5, slack 0.02; HiGHS through PuLP on one thread. Each size runs in a fresh process, a few times; medians. "dag": the
dependency graph; "plan": everything after it. Aims: 4 x 8 under 0.05 s, 16 x 128 under 4 s, 64 x 512 under 30 s and 3 GiB. With
``--full`` also the program that is not folded, where that ends in a minute, and how far the folded plan is from its optimum.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from tqdm import tqdm

SIZES = ((4, 8), (8, 32), (16, 128), (32, 256), (64, 512))
FULL_SIZES = ((4, 8), (8, 32), (16, 128))


def measure(num_stages: int, num_micro_batches: int, full: bool | None) -> dict[str, Any]:
    """One plan, in this process."""
    from rlfreeze_ds.planning.builders import one_f_one_b
    from rlfreeze_ds.planning.cost_model import Costs, Duration
    from rlfreeze_ds.planning.dag import PipelineDag
    from rlfreeze_ds.planning.solver import Limits, available_solvers, solve

    available_solvers()  # its imports
    draw = random.Random(0)
    seconds = [[draw.uniform(0.8, 1.2) for _ in range(3)] for _ in range(num_stages)]
    schedule = one_f_one_b(num_stages, num_micro_batches)
    started = time.perf_counter()
    dag = PipelineDag(schedule)
    built = time.perf_counter()
    durations = {}
    for i in schedule.instructions:
        forward, input_gradient, weight_gradient = seconds[i.stage_id]
        durations[i] = Duration(forward, forward) if i.is_forward else Duration(input_gradient + weight_gradient, input_gradient)
    planning = time.perf_counter()
    plan = solve(dag, Costs(durations), Limits(0.5, 0.02), time_limit_s=100.0, full=full)
    ended = time.perf_counter()
    return {
        "dag_s": built - started,
        "plan_s": ended - planning,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "makespan_s": plan.planned_makespan_s,
        "mean_freeze_ratio": plan.mean_freeze_ratio,
        "speedup": plan.speedup,
    }


def repeated(num_stages: int, num_micro_batches: int, full: bool, repeats: int) -> dict[str, Any]:
    """Medians over fresh processes."""
    command = [sys.executable, __file__, "--one", str(num_stages), str(num_micro_batches), *(["--full"] if full else [])]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        if done.returncode:
            raise SystemExit(done.stderr)
        runs.append(json.loads(done.stdout))
    return {key: round(statistics.median(run[key] for run in runs), 5) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="also solve without folding, up to 16 x 128")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes, smallest first")
    parser.add_argument("--one", type=int, nargs=2, metavar=("STAGES", "MICRO_BATCHES"), help=argparse.SUPPRESS)
    parser.add_argument("--json", help="where the record goes")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, full=True if options.full else None)))
        return
    figures: dict[str, Any] = {}
    for stages, micro_batches in tqdm(SIZES[: options.sizes], unit="size"):
        row = figures[f"{stages} x {micro_batches}"] = repeated(stages, micro_batches, False, options.repeats)
        if options.full and (stages, micro_batches) in FULL_SIZES:
            row["full"] = repeated(stages, micro_batches, True, 1)
            row["makespan_over_full"] = round(row["makespan_s"] / row["full"]["makespan_s"], 6)
    from jobs import write_record  # late: the peak memory of a child counts what its parent had

    write_record("the planner's cost at scale", "benchmarks/planner_scale.py", options, {"figures": figures})


if __name__ == "__main__":
    main()
