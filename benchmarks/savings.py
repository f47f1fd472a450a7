"""What leaving frozen units out of a whole step saves: gradient bytes, optimizer seconds, activations, against stock.

How to run: OMP_NUM_THREADS=1 python benchmarks/savings.py --json benchmarks/records/savings.json
What to expect: some five minutes. For PP1 x DP2 and PP2 x DP2 and each mode, ranks hold a stock engine and one of ours with
``"mask_scope": "step"`` per freeze ratio; all train in turn on the same batches. Bytes are what this rank hands to the
data-parallel reduction of gradients in one step; optimizer seconds are those of the inner optimizer's ``step``, hooks
included; memory is the most that autograd keeps for the backward at any time of a step, and the most of that and the parameters'
gradients together (weights, moments and flat buffers are the same for all). On rank 0: means over steps of bytes
and memory, which vary with the masks, and medians of seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from jobs import pipeline, spawn, write_record

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 4_000_000}},
}
RATIOS = (0.0, 0.5, 0.8)
KEPT_STEPS = 10
KEYS = ("bytes", "seconds", "kept", "peak")


class Meter:
    """Bytes that go through gradient reductions, and seconds inside optimizer steps."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self._reducing = False
        self._started = 0.0
        for name in ("all_reduce", "reduce"):
            self._count(name)

    def _count(self, name: str) -> None:
        stock = getattr(torch.distributed, name)

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._reducing:
                self.bytes += tensor.nbytes
            return stock(tensor, *args, **kwargs)

        setattr(torch.distributed, name, counted)

    def watch(self, engine: Any) -> None:
        """Count in this engine too."""
        from deepspeed.runtime.pipe.schedule import ReduceGrads

        instructions = type(engine)._INSTRUCTION_MAP

        def reduce_grads(engine: Any) -> None:
            self._reducing = True
            instructions[ReduceGrads](engine)
            self._reducing = False

        engine._INSTRUCTION_MAP = {**instructions, ReduceGrads: reduce_grads}
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        first = inner.register_step_pre_hook(self._start)
        inner._optimizer_step_pre_hooks.move_to_end(first.id, last=False)
        inner.register_step_post_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._started


def freeze(engine: Any, ratio: float) -> None:
    """Make the controller freeze the same share of every stage's units, one mask a step."""
    from rlfreeze_ds.controller import StepMasks
    from rlfreeze_ds.freezing.masks import step_masks

    controller = engine.freeze_controller
    weights = controller.shape.weights

    def begin_step(num_micro_batches: int) -> StepMasks:
        (mask,) = step_masks(
            [ratio], weights, [True] * len(weights), selection="spread", whole=False, seed=0, step=controller.step,
            stage_id=controller.shape.stage_id,
        )  # fmt: skip
        return StepMasks(controller.step, "benchmark", (mask,) * num_micro_batches)

    controller.begin_step = begin_step


class Kept:
    """Bytes of the activations that autograd keeps for the backward: the most at any time, alone and with the gradients that
    parameters hold then. Parameters do not count."""

    def __init__(self, engine: Any) -> None:
        self.peak = self.peak_with_gradients = self._now = 0
        self._trained = [p for p in engine.module.parameters() if p.requires_grad]
        self._holders: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}

    def hooks(self) -> Any:
        """A context; train a step in it."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: torch.Tensor) -> Held:
        return Held(tensor, self)

    def count(self, storage: torch.UntypedStorage, change: int) -> None:
        """One more, or one less, that needs ``storage``."""
        key = storage.data_ptr()
        if key in self._parameters:
            return
        before = self._holders.get(key, 0)
        self._holders[key] = before + change
        if before + change in (0, 1) and before != 2:
            self._now += change * storage.nbytes()
            self.peak = max(self.peak, self._now)
            held = sum(p.grad.nbytes for p in self._trained if p.grad is not None)
            self.peak_with_gradients = max(self.peak_with_gradients, self._now + held)


class Held:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor, kept: Kept) -> None:
        self.tensor, self._kept = tensor, kept
        kept.count(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._kept.count(self.tensor.untyped_storage(), -1)


def rank_main(rank: int, options: argparse.Namespace, stages: int, dp: int, results: dict[str, Any]) -> None:
    """All modes of one topology."""
    import deepspeed

    import rlfreeze_ds

    meter = Meter()
    for mode, settings in MODES.items():
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": options.rows, "gradient_accumulation_steps": options.micro_batches,
            "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "rlfreeze": {"enabled": True, "mask_scope": "step", "warmup_steps": 10**6}, **settings,  # masks are given, no plan
        }  # fmt: skip
        engines = {"stock": deepspeed.initialize(model=pipeline(options.layers, options.width, stages), config=config)[0]}
        for ratio in RATIOS:
            engine = rlfreeze_ds.initialize(model=pipeline(options.layers, options.width, stages), config=config)[0]
            freeze(engine, ratio)
            engines[f"ratio {ratio}"] = engine
        for engine in engines.values():
            meter.watch(engine)
        dtype = torch.float32 if mode == "fp32" else torch.bfloat16
        batch = torch.randn(options.rows, options.width).to(dtype)
        figures: dict[str, dict[str, list[float]]] = {name: {key: [] for key in KEYS} for name in engines}
        order = list(engines)
        for step in range(options.warmup + options.steps):
            for name in order if step % 2 else reversed(order):
                meter.bytes, meter.seconds = 0, 0.0
                deepspeed.comm.barrier()
                engines[name].train_batch(iter([(batch, batch)] * options.micro_batches))
                if step >= options.warmup:
                    figures[name]["bytes"].append(meter.bytes)
                    figures[name]["seconds"].append(meter.seconds)
        for name, engine in engines.items():  # by themselves: counting takes time
            for _ in range(KEPT_STEPS):
                kept = Kept(engine)
                with kept.hooks():
                    engine.train_batch(iter([(batch, batch)] * options.micro_batches))
                figures[name]["kept"].append(kept.peak)
                figures[name]["peak"].append(kept.peak_with_gradients)
        if rank == 0:
            results[f"{mode}, PP{stages} x DP{dp}"] = {
                name: {
                    "mib_reduced": round(statistics.fmean(values["bytes"]) / 2**20, 3),
                    "optimizer_ms": round(1e3 * statistics.median(values["seconds"]), 3),
                    "optimizer_ms_quartiles": [round(1e3 * q, 3) for q in np.quantile(values["seconds"], (0.25, 0.75))],
                    "activations_kept_mib": round(statistics.fmean(values["kept"]) / 2**20, 2),
                    "activations_and_gradients_mib": round(statistics.fmean(values["peak"]) / 2**20, 2),
                }
                for name, values in figures.items()
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="counted steps of every engine")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=512, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--json", help="where the record goes")
    options = parser.parse_args()
    import torch.multiprocessing as mp

    with mp.Manager() as manager:
        results = manager.dict()
        for stages in (1, 2):
            spawn(rank_main, 2 * stages, options, stages, 2, results)
        figures = {"figures": dict(results)}
    write_record(
        "a unit frozen for a whole step costs no gradient traffic, no optimizer time and keeps no activations",
        "benchmarks/savings.py", options, figures,
    )  # fmt: skip


if __name__ == "__main__":
    main()
