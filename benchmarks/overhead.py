"""What the engine costs when it freezes nothing: ratio 0 against stock, step by step in turn, in one run.

How to run: OMP_NUM_THREADS=1 python benchmarks/overhead.py --json benchmarks/records/overhead.json
What to expect: some two minutes; the median of the paired ratios ours / stock of seconds per batch, with quartiles. Two ranks
hold a stock engine and ours with the same weights; they train alternately on the same batches, and the order within a pair
alternates too, so a machine that drifts slows both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

NUM_STAGES = 2


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def rank_main(rank: int, options: argparse.Namespace, port: int) -> None:
    """One rank: both engines, pairs of steps; rank 0 writes the record."""
    # No LOCAL_SIZE: with it DeepSpeed's CPU communication op leaves shared memory behind for ever.
    os.environ.pop("LOCAL_SIZE", None)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_STAGES), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import rlfreeze_ds

    deepspeed.init_distributed("gloo")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.rows, "gradient_accumulation_steps": options.micro_batches,
        "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "rlfreeze": {"enabled": True, "planning": {"max_freeze_ratio": 0}},
    }  # fmt: skip

    def module() -> Any:
        layers = [LayerSpec(Block, options.width) for _ in range(options.layers)]
        return PipelineModule(
            layers, num_stages=NUM_STAGES, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=True
        )

    engines = {
        "stock": deepspeed.initialize(model=module(), config=config)[0],
        "ours": rlfreeze_ds.initialize(model=module(), config=config)[0],
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
        record = {
            "claim": "overhead of max_freeze_ratio 0 against the stock engine",
            "script": "benchmarks/overhead.py", "options": {k: v for k, v in vars(options).items() if k != "json"},
            "median_ratio": statistics.median(ratios), "ratio_quartiles": [quartiles[0], quartiles[2]],
            "stock_median_s": statistics.median(seconds["stock"]), "ours_median_s": statistics.median(seconds["ours"]),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__},
            "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread a rank, gloo",
        }  # fmt: skip
        print(json.dumps(record, indent=2))
        if options.json:
            partial = Path(f"{options.json}.tmp")
            partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            partial.replace(options.json)
    deepspeed.comm.barrier()


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (options, port), nprocs=NUM_STAGES)


if __name__ == "__main__":
    main()
