"""Who should move the criterion's thresholds, in one engine on one job: nobody, chance, the policy that ships with the package, a
policy server that learns during the run, and, as the measure of what is possible, the best of a grid of fixed thresholds.

What it does: a GPT as in scripts/train_gpt.py, smaller, on two stages with real FLOPs, at a constant learning rate. The same
ranks hold a stock engine and one of ours for each policy; all begin with the same weights and train in turn on the same batches,
each timed on its own. Validation losses are compared over the seconds that each has spent: the target is the highest of the final
losses, so that everyone reaches it, and what counts is stock's time until then over each policy's.

How to run: OMP_NUM_THREADS=1 python benchmarks/threshold_policies.py --json benchmarks/records/threshold_policies.json
What to expect: twenty minutes on 2 cores; the policy server learns on the same two meanwhile, at all engines' cost. One seed, one
job: differences of a few percent between policies are noise, which the spread of the grid shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from jobs import spawn, train_gpt, write_record
from tqdm import tqdm

NUM_STAGES = 2
GRID = {f"fixed_{g:g}_{v:g}": (g, v) for g in (2.0, 0.3, 0.15) for v in (1.0, 0.3, 0.15)}
NEVER = "never"
LEARNERS = ("random", "pretrained", "rllib")
SMALLEST = 0.01  # a threshold that nothing is below


class Hold:
    """The policy of fixed thresholds: with it their windows are judged as everyone else's."""

    updates = 0

    def offer(self, window: int, observation: np.ndarray, reward: float | None) -> None:
        """Nothing to learn."""

    def take(self) -> np.ndarray:
        """Stay."""
        return np.zeros(2)

    def close(self) -> None:
        """Nothing to end."""


def block(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The main job's limits; a new plan with every window, whoever decides."""
    kind = name if name in LEARNERS else "random"
    policy: dict[str, Any] = {"type": kind, "interval": options.interval, "total_steps": options.steps}
    if name == "rllib":
        policy |= {"server": "auto", "train_batch": 8}
    gradient, variation = GRID.get(name, (SMALLEST, SMALLEST) if name == NEVER else (2.0, 1.0))
    return {
        "enabled": True, "warmup_steps": 10, "profile_steps": 8, "ramp_steps": 0, "policy": policy,
        "criterion": {"gradient_threshold": gradient, "variation_threshold": variation},
        "planning": {"max_freeze_ratio": 0.5, "time_slack": 0.04},
    }  # fmt: skip


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """All engines on one rank; rank 0 writes the record."""
    import deepspeed
    import torch

    import rlfreeze_ds

    gpt = train_gpt()
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in ("width", "layers", "seq_len", "seed")]
    arguments = gpt.parse_arguments(flags)
    text, held_out = gpt.load_corpus(None, arguments.max_bytes)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.rows, "gradient_accumulation_steps": options.micro_batches,
        "steps_per_print": 10**9, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.95], "torch_adam": True}},
    }  # fmt: skip

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / arguments.warmup))

    names = ["stock", *options.policies]
    folder = Path(options.folder)
    engines = {}
    for name in names:
        model = gpt.build_model(arguments)
        os.environ["RLFREEZE_RUN_DIR"] = str(folder / name)
        full = config if name == "stock" else config | {"rlfreeze": block(name, options)}
        make = deepspeed.initialize if name == "stock" else rlfreeze_ds.initialize
        engines[name] = make(model=model, model_parameters=list(model.parameters()), config=full, lr_scheduler=schedule)[0]
        if rank == 0 and name in (NEVER, *GRID):
            engines[name].freeze_controller.thresholds.tuner.policy = Hold()

    shape = (1, options.micro_batches, options.rows)
    validation = gpt.validation_offsets(len(held_out), options.seq_len, options.eval_batches, *shape)
    clock = dict.fromkeys(names, 0.0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for step in tqdm(range(options.steps), unit="round", disable=rank != 0):
        offsets = gpt.sample_offsets(options.seed, step, len(text), options.seq_len, *shape)[0]
        samples = [gpt.cut_samples(text, row, options.seq_len) for row in offsets]
        for name in names if step % 2 else reversed(names):
            deepspeed.comm.barrier()
            started = time.perf_counter()
            engines[name].train_batch(iter(samples))
            seconds[name].append(time.perf_counter() - started)
            clock[name] += seconds[name][-1]
        if (step + 1) % options.eval_interval == 0 or step + 1 == options.steps:
            for name in names:
                losses = []
                for batch in validation:
                    rows = [gpt.cut_samples(held_out, row, options.seq_len) for row in batch[0]]
                    losses.append(engines[name].eval_batch(iter(rows)).item())
                curves[name].append((clock[name], statistics.fmean(losses)))
    for name in names[1:]:
        engines[name].destroy()
    if rank == 0:
        figures = summary(seconds, curves, folder, options.steps // 2)
        del options.folder
        claim = "thresholds that are fixed, drawn, pretrained, learned online, or the best of a grid"
        write_record(claim, "benchmarks/threshold_policies.py", options, figures)


def summary(
    seconds: dict[str, list[float]], curves: dict[str, list[tuple[float, float]]], folder: Path, settled: int
) -> dict[str, Any]:
    """By policy, against stock. ``settled``: the step from which on seconds are those of its plans."""
    target = max(curve[-1][1] for curve in curves.values())
    stock_s = seconds_until(curves["stock"], target)
    figures: dict[str, Any] = {}
    for name, curve in curves.items():
        pairs = [stock / own for stock, own in zip(seconds["stock"][settled:], seconds[name][settled:], strict=True)]
        figures[name] = {
            "loss_per_second_gain": round(stock_s / seconds_until(curve, target), 4),
            "speedup": round(statistics.median(pairs), 4),
            "speedup_quartiles": np.quantile(pairs, (0.25, 0.75)).round(4).tolist(),
            "total_s": round(curve[-1][0], 2), "val_loss": round(curve[-1][1], 4),
            **(windows(folder / name) if name != "stock" else {}),
        }  # fmt: skip
    fixed = {name: figures[name]["loss_per_second_gain"] for name in (NEVER, *GRID) if name in figures}
    best = max(fixed, key=fixed.__getitem__, default=None)
    return {
        "target_val_loss": round(target, 4), "policies": figures, "oracle": best,
        "oracle_loss_per_second_gain": fixed.get(best),
        "val_loss": {name: [round(loss, 4) for _, loss in curve] for name, curve in curves.items()},
    }  # fmt: skip


def seconds_until(curve: list[tuple[float, float]], target: float) -> float:
    """When the validation loss is first at or below ``target``, on the line between two evaluations."""
    before: tuple[float, float] | None = None
    for clock, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return clock
            return before[0] + (clock - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (clock, loss)
    raise ValueError(f"a loss of {target:.4f} is never reached")


def windows(folder: Path) -> dict[str, Any]:
    """What the run log says of the policy."""
    events = [json.loads(line) for line in (folder / "rlfreeze.jsonl").read_text().splitlines()]
    decided = [event for event in events if event["event"] == "policy"]
    ratios = [event["mean_freeze_ratio"] for event in events if event["event"] == "step"]
    found: dict[str, Any] = {
        "mean_freeze_ratio": round(statistics.fmean(ratios), 4), "windows": len(decided),
        # The reward of a window is known when it ends, that of the first belongs to no decision.
        "mean_reward": round(statistics.fmean(event["reward"] for event in decided[1:]), 4) if len(decided) > 1 else None,
        "guard": sum(event["event"] == "guard" for event in events),
    }  # fmt: skip
    if folder.name in LEARNERS:
        found["thresholds"] = [[round(value, 3) for value in event["thresholds"].values()] for event in decided]
        found["updates"] = max((event["updates"] or 0 for event in decided), default=0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="rounds, a step of each engine")
    parser.add_argument("--interval", type=int, default=10, help="steps of a window")
    parser.add_argument("--eval-interval", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--eval-batches", type=int, default=2, help="batches of an evaluation")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=1234)
    every = [NEVER, *GRID, *LEARNERS]
    parser.add_argument("--policies", nargs="+", choices=every, default=every, metavar="NAME", help=f"of {', '.join(every)}")
    parser.add_argument("--json", help="where the record goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        spawn(rank_main, NUM_STAGES, options)


if __name__ == "__main__":
    main()
