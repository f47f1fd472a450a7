"""What a backward in two costs, and what it brings: the GPT of the demo on two stages, real work in every instruction.

How to run: OMP_NUM_THREADS=1 python benchmarks/split_cost.py --json benchmarks/records/split_cost.json
What to expect: some five minutes on two cores. Two ranks hold six engines that train in turn on the same batches; every round
begins with another engine, so a machine that drifts slows all alike. Per engine: seconds of a batch (median, quartiles), and the
median and quartiles of paired ratios.

- stock: DeepSpeed's engine. ours: our engine in stock's order, nothing frozen.
- split: the same order, each B as an I with its W right behind it. ``split_over_ours`` is what splitting itself costs.
- zb-h1: W where a stage would wait. Nothing frozen.
- ours 0.5, zb-h1 0.5: with planned masks, ``max_freeze_ratio`` 0.5. Their plans are made before the rounds begin.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jobs import spawn, train_gpt, write_record
from tqdm import tqdm

NUM_STAGES = 2
BLOCK = {
    "enabled": True, "warmup_steps": 6, "profile_steps": 8, "ramp_steps": 0, "replan_interval": 16, "selection": "spread",
    "guard": {"enabled": False},
}  # fmt: skip
ENGINES = {
    "ours": {"max_freeze_ratio": 0}, "split": {"max_freeze_ratio": 0}, "zb-h1": {"max_freeze_ratio": 0, "schedule": "zb-h1"},
    "ours 0.5": {"max_freeze_ratio": 0.5}, "zb-h1 0.5": {"max_freeze_ratio": 0.5, "schedule": "zb-h1"},
}  # fmt: skip
# The record's name, the engine that is compared, and what with.
RATIOS = {
    "ours_over_stock": ("ours", "stock"), "split_over_ours": ("split", "ours"), "split_over_stock": ("split", "stock"),
    "zb_h1_over_stock": ("zb-h1", "stock"), "ours_0.5_over_stock": ("ours 0.5", "stock"),
    "zb_h1_0.5_over_stock": ("zb-h1 0.5", "stock"), "zb_h1_0.5_over_ours_0.5": ("zb-h1 0.5", "ours 0.5"),
}  # fmt: skip


def whole_in_two(num_micro_batches: int) -> list[str]:
    """Stock's orders of all stages, with each W right after its I."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    from rlfreeze_ds.planning.schedule import from_pipe_schedules, to_commands

    stages = [TrainSchedule(num_micro_batches, NUM_STAGES, stage) for stage in range(NUM_STAGES)]
    return [order.replace("B", "I W") for order in to_commands(from_pipe_schedules(stages))]


def mean_ratio(engine: Any) -> float:
    """Share of W that the masks of the last step skip, over all stages and micro-batches, each unit counting by its size."""
    import torch
    from deepspeed import comm

    shape = engine.freeze_controller.shape
    shares = torch.tensor([statistics.fmean(shape.share(mask) for mask in engine._step_masks.masks)])
    comm.all_reduce(shares)
    return float(shares) / NUM_STAGES


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    quartiles = np.quantile(values, (0.25, 0.5, 0.75))
    return {name: round(float(value), 5) for name, value in zip(("lower", "median", "upper"), quartiles, strict=True)}


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """All engines on one rank; rank 0 writes the record."""
    import deepspeed
    import torch

    import rlfreeze_ds

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.rows, "gradient_accumulation_steps": options.micro_batches,
        "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }  # fmt: skip
    gpt = train_gpt()
    sizes = {"layers": options.layers, "width": options.width, "seq_len": options.seq_len}
    model = argparse.Namespace(seed=1234, heads=4, stages=NUM_STAGES, **sizes)
    engines = {"stock": deepspeed.initialize(model=gpt.build_model(model), config=config)[0]}
    for name, planning in ENGINES.items():
        block = BLOCK | {"planning": {"time_slack": options.time_slack, "background": False, **planning}}
        engines[name] = rlfreeze_ds.initialize(model=gpt.build_model(model), config=config | {"rlfreeze": block})[0]
    engines["split"]._split_backwards(whole_in_two)

    text, _ = gpt.load_corpus(None, 1 << 20)

    def batches(step: int) -> list[Any]:
        rows = gpt.sample_offsets(0, step, len(text), options.seq_len, 1, options.micro_batches, options.rows)[0]
        return [gpt.cut_samples(text, row, options.seq_len) for row in rows]

    def train(name: str, batch: list[Any]) -> float:
        deepspeed.comm.barrier()
        started = time.perf_counter()
        engines[name].train_batch(iter(batch))
        return time.perf_counter() - started

    frozen = [name for name, planning in ENGINES.items() if planning["max_freeze_ratio"] > 0]
    for step in range(options.plan_steps):  # a second plan, fitted under the first
        for name in frozen if step >= options.warmup else engines:
            train(name, batches(step))
    for name in frozen:
        assert engines[name].freeze_controller.phase == "steady", "raise --plan-steps"
        engines[name].freeze_controller.planner.ask = lambda *_: None  # no other plan meanwhile
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    ratios: dict[str, list[float]] = {name: [] for name in frozen}
    names = list(engines)
    for step in tqdm(range(options.steps), unit="round", disable=rank != 0):
        batch = batches(options.plan_steps + step)
        turned = names[step % len(names) :] + names[: step % len(names)]
        for name in turned if step // len(names) % 2 else reversed(turned):
            seconds[name].append(train(name, batch))
            if name in frozen:
                ratios[name].append(mean_ratio(engines[name]))
    parameters = torch.tensor([sum(parameter.numel() for parameter in engines["stock"].module.parameters())])
    deepspeed.comm.all_reduce(parameters)
    if rank != 0:
        return
    figures: dict[str, Any] = {
        name: spread([one / other for one, other in zip(seconds[mine], seconds[base], strict=True)])
        for name, (mine, base) in RATIOS.items()
    }
    figures["cost_of_splitting"] = round(figures["split_over_ours"]["median"] - 1, 5)
    figures["batch_s"] = {name: spread(values) for name, values in seconds.items()}
    figures["mean_freeze_ratio"] = {name: round(statistics.fmean(values), 4) for name, values in ratios.items()}
    figures["predicted_s"] = {name: round(engines[name].freeze_controller.decision.predicted_makespan_s, 5) for name in frozen}
    figures["num_parameters"] = int(parameters)
    write_record("what a backward in two costs, and what it brings", "benchmarks/split_cost.py", options, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="counted rounds, a step of each engine")
    parser.add_argument("--plan-steps", type=int, default=40, help="steps of the engines that freeze before that")
    parser.add_argument("--warmup", type=int, default=5, help="of these, steps of the other engines")
    parser.add_argument("--layers", type=int, default=5, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--time-slack", type=float, default=0.04, help="planning.time_slack of the engines that freeze")
    parser.add_argument("--json", help="where the record goes")
    spawn(rank_main, NUM_STAGES, parser.parse_args())


if __name__ == "__main__":
    main()
