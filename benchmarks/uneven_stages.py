"""Where the plan freezes when one stage is twice as heavy, and what that is worth against random freezing; and whether the
predicted batch time comes true. Real FLOPs: the GPT of scripts/train_gpt.py on two stages.

How to run: OMP_NUM_THREADS=1 python benchmarks/uneven_stages.py --json benchmarks/records/uneven_stages.json
What to expect: some six minutes. Two blocks on the first stage, four on the second. The same ranks hold a stock engine, ours with
its own plan, and ours with masks of units drawn at random, the same mean ratio for every stage and micro-batch as the plan has on
the whole; all train in turn on the same batches once the plan holds. On rank 0: medians of the paired speed-ups over stock, the
speed-up beyond 1 per unit of mean freeze ratio, and predicted over measured seconds from the first forward to the last backward.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import numpy as np
from jobs import spawn, train_gpt, write_record
from tqdm import tqdm

NUM_STAGES = 2
BLOCK = {
    "enabled": True, "warmup_steps": 6, "profile_steps": 8, "ramp_steps": 0, "replan_interval": 16, "selection": "spread",
    "guard": {"enabled": False}, "planning": {"max_freeze_ratio": 0.5, "time_slack": 0.02, "background": False},
}  # fmt: skip


def model(options: argparse.Namespace) -> Any:
    """Embedding and a third of the blocks on the first stage, the others and the head on the second."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    gpt = train_gpt()
    blocks = [
        LayerSpec(gpt.Block, options.width, 4, options.seq_len, options.layers, seed) for seed in range(1, options.layers + 1)
    ]

    class Uneven(PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            self.parts = [0, 1 + options.layers // 3, options.layers + 2]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    layers = [LayerSpec(gpt.Embedding, options.width, 0), *blocks, LayerSpec(gpt.Head, options.width, 99)]
    return Uneven(layers, num_stages=NUM_STAGES, loss_fn=gpt.next_byte_loss)


def freeze_at_random(engine: Any, ratio: float) -> None:
    """For every micro-batch, units in random order until their share of the stage is nearest to ``ratio``."""
    from rlfreeze_ds.history import StepMasks

    controller = engine.freeze_controller
    weights = controller.shape.weights
    draw = random.Random(controller.shape.stage_id)

    def mask() -> tuple[int, ...]:
        chosen: list[int] = []
        share = 0.0
        for unit in draw.sample(range(len(weights)), len(weights)):
            if abs(share + weights[unit] - ratio) < abs(share - ratio):
                chosen.append(unit)
                share += weights[unit]
        return tuple(sorted(chosen))

    controller.begin_step = lambda num: StepMasks(controller.step, "benchmark", tuple(mask() for _ in range(num)))


def mean_ratio(engine: Any) -> float:
    """Of the step that ran last, over all stages and micro-batches, each unit counting by its size."""
    import torch
    from deepspeed import comm

    shape = engine.freeze_controller.shape
    shares = torch.tensor([statistics.fmean(shape.share(mask) for mask in engine._step_masks.masks)])
    comm.all_reduce(shares)
    return float(shares) / NUM_STAGES


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """All three engines on one rank; rank 0 writes the record."""
    import deepspeed
    import torch

    import rlfreeze_ds

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.rows, "gradient_accumulation_steps": options.micro_batches,
        "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "rlfreeze": BLOCK,
    }  # fmt: skip
    engines = {"stock": deepspeed.initialize(model=model(options), config=config)[0]}
    engines |= {name: rlfreeze_ds.initialize(model=model(options), config=config)[0] for name in ("plan", "random")}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (options.micro_batches, options.rows, options.seq_len + 1), generator=generator)
    batch = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]
    planned = engines["plan"].freeze_controller

    def train(name: str) -> float:
        deepspeed.comm.barrier()
        started = time.perf_counter()
        engines[name].train_batch(iter(batch))
        return time.perf_counter() - started

    while planned.phase != "steady" or planned.step < options.plan_steps:  # a second plan, fitted under the first
        train("plan")
    ratios: dict[str, list[float]] = {"plan": [], "random": []}
    train("plan")
    freeze_at_random(engines["random"], mean_ratio(engines["plan"]))
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    makespans: dict[str, list[float]] = {"plan": []}
    planned.planner.ask = lambda *_: None  # no other plan meanwhile
    for step in tqdm(range(options.steps), unit="round", disable=rank != 0):
        for name in engines if step % 2 else reversed(engines):
            seconds[name].append(train(name))
            if name in ratios:
                ratios[name].append(mean_ratio(engines[name]))
        makespans["plan"] += [s for _, s in planned.history.steady(0, 1)]
    if rank != 0:
        return
    decision = planned.decision
    figures: dict[str, Any] = {"stage_freeze_ratio": [round(float(np.mean(row)), 3) for row in decision.ratios]}
    for name, values in ratios.items():
        speedups = [stock / own for stock, own in zip(seconds["stock"], seconds[name], strict=True)]
        speedup, mean = statistics.median(speedups), statistics.fmean(values)
        figures[name] = {
            "speedup": round(speedup, 4), "speedup_quartiles": [round(float(q), 4) for q in np.quantile(speedups, (0.25, 0.75))],
            "mean_freeze_ratio": round(mean, 4), "speedup_per_ratio": round((speedup - 1) / mean, 4) if mean > 0 else None,
        }  # fmt: skip
    plan, drawn = (figures[name]["speedup_per_ratio"] for name in ratios)
    figures["per_ratio_plan_over_random"] = round(plan / drawn, 3) if plan and drawn else None
    measured = statistics.median(makespans["plan"])
    figures["predicted_s"], figures["measured_s"] = round(decision.predicted_makespan_s, 5), round(measured, 5)
    figures["predicted_over_measured"] = round(decision.predicted_makespan_s / measured, 4)
    write_record("one stage twice as heavy: the plan against random freezing", "benchmarks/uneven_stages.py", options, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="counted rounds, a step of each engine")
    parser.add_argument("--plan-steps", type=int, default=40, help="steps of the planned engine before that")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks, a third of them on the first stage")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--json", help="where the record goes")
    spawn(rank_main, NUM_STAGES, parser.parse_args())


if __name__ == "__main__":
    main()
