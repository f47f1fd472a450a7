"""What the engine costs when it freezes nothing: ratio 0 against stock, step by step in turn, in one run.

How to run: OMP_NUM_THREADS=1 python benchmarks/overhead.py --json benchmarks/records/overhead.json
What to expect: some two minutes; the median of the paired ratios ours / stock of seconds per batch, with quartiles. Two ranks
hold a stock engine and ours with the same weights; they train alternately on the same batches, and the order within a pair
alternates too, so a machine that drifts slows both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from jobs import pipeline, spawn, write_record

NUM_STAGES = 2


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """One rank: both engines, pairs of steps; rank 0 writes the record."""
    import deepspeed

    import rlfreeze_ds

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.rows, "gradient_accumulation_steps": options.micro_batches,
        "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "rlfreeze": {"enabled": True, "planning": {"max_freeze_ratio": 0}},
    }  # fmt: skip

    engines = {
        "stock": deepspeed.initialize(model=pipeline(options.layers, options.width, NUM_STAGES), config=config)[0],
        "ours": rlfreeze_ds.initialize(model=pipeline(options.layers, options.width, NUM_STAGES), config=config)[0],
    }
    batch = torch.randn(options.rows, options.width)
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for step in range(options.warmup + options.steps):
        for name in ("stock", "ours") if step % 2 else ("ours", "stock"):
            deepspeed.comm.barrier()
            started = time.perf_counter()
            engines[name].train_batch(iter([(batch, batch)] * options.micro_batches))
            if step >= options.warmup:
                seconds[name].append(time.perf_counter() - started)
    if rank == 0:
        ratios = [ours / stock for ours, stock in zip(seconds["ours"], seconds["stock"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        write_record(
            "overhead of max_freeze_ratio 0 against the stock engine", "benchmarks/overhead.py", options,
            {
                "median_ratio": statistics.median(ratios), "ratio_quartiles": [quartiles[0], quartiles[2]],
                "stock_median_s": statistics.median(seconds["stock"]), "ours_median_s": statistics.median(seconds["ours"]),
            },
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="counted pairs of steps")
    parser.add_argument("--warmup", type=int, default=10, help="pairs that are not counted")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--json", help="where the record goes")
    options = parser.parse_args()
    spawn(rank_main, NUM_STAGES, options)


if __name__ == "__main__":
    main()
