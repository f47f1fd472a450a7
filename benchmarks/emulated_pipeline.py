"""A pipeline in a box, EMULATED: the real engines, processes and point-to-point traffic, with layers that sleep.

What it does: reads a profile (CSV of ``rlfreeze_ds.planning.profile``) and runs its pipeline, one process a stage and replica,
over gloo. A layer sleeps for its share of its stage's forward, input-gradient (I) and weight-gradient (W) seconds, and skips I or
W exactly when autograd skips the work; B unfrozen = I + W, B frozen = I. Stock's engine and one of ours per ``--schedule`` and
``max_freeze_ratio`` live in the same processes and train in turn on the same batches; under zb-h1 and planned ours run I and W
apart. They get nothing but a config: they measure, fit and plan.
How to run: OMP_NUM_THREADS=1 python benchmarks/emulated_pipeline.py --json benchmarks/records/emulated_pipeline.json
What to expect: some three minutes. Per engine: seconds of a batch (median, quartiles), batches per second against stock (median
of paired ratios), realised freeze ratio, predicted against measured seconds, and what a batch takes beyond the profile. Sleeping
needs no core, so two cores carry 8 stages; the figures are those of emulated timing, not of a GPU job.

First stage: where the profile says that it is still busy when frozen, its input is made to need a gradient, so autograd asks for
I as on any other stage. Where it says 0, as the default profile does, B is all W, unless ``--first-stage-input`` makes a share of
it input gradients that autograd needs only behind a live layer, as in a real job: frozen is 0 then too, but only a frozen prefix
saves I.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import spawn, write_record
from torch import nn

from rlfreeze_ds.freezing import weight_gradients
from rlfreeze_ds.planning.builders import one_f_one_b, zb_h1
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.profile import read_profile
from rlfreeze_ds.planning.schedule import Schedule, from_commands

PROFILE = Path(__file__).parent / "profiles" / "llama8b_h200_pp4_1f1b.csv"
WIDTH = 8
# The layers of a LLaMA-8B block: an attention (q, k, v, o) and an MLP (gate, up, down), in units of 4096 x 1024 elements.
BLOCK = ((4, 1, 1, 4), (14, 14, 14))
WARMUP_STEPS, PROFILE_STEPS_PER_STAGE, RAMP_STEPS = 10, 2, 2
Masks = Sequence[Sequence[Sequence[int]]]
"""``masks[stage][micro_batch]``: the frozen layers."""
KINDS = {"ForwardPass": "F", "BackwardPass": "B", "BackwardInputPass": "I", "BackwardWeightPass": "W"}


@dataclass(frozen=True)
class Emulated:
    """What is emulated. A stage is a chain of layers of some matrices each, which are the freeze units.

    Attributes:
        orders: of the ranks, by the name of the schedule.
        seconds: ``seconds[stage][micro_batch]`` = (F, I, W).
        needs_input: per stage, whether I is paid whatever is frozen.
        sizes: per layer of a stage, the elements of its matrices; seconds are shared out by elements.
    """

    orders: dict[str, Schedule]
    seconds: tuple[tuple[tuple[float, float, float], ...], ...]
    needs_input: tuple[bool, ...]
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, options: argparse.Namespace) -> Emulated:
        """From a profile, all seconds times ``scale``."""
        schedule, costs = read_profile(options.profile)
        num_stages, num_micro_batches = schedule.num_stages, schedule.num_micro_batches
        if schedule.ranks != one_f_one_b(num_stages, num_micro_batches).ranks:
            raise SystemExit(f"{options.profile}: the engine runs 1F1B, one stage a rank; this profile has another order.")
        seconds, needs_input = [], []
        for stage in range(num_stages):
            rows = []
            for m in range(num_micro_batches):
                forward, backward = (costs.durations[Instruction(stage, m, kind)] for kind in "FB")
                rows.append([options.scale * s for s in (forward.unfrozen_s, backward.frozen_s, backward.saving_s)])
            needs_input.append(stage > 0 or any(row[1] > 0 for row in rows))
            if not needs_input[stage]:
                rows = [[f, options.first_stage_input * w, (1 - options.first_stage_input) * w] for f, _, w in rows]
            seconds.append(tuple(map(tuple, rows)))
        orders = {"stock": schedule, "zb-h1": zb_h1(num_stages, num_micro_batches)}
        return cls(orders, tuple(seconds), tuple(needs_input), options.blocks * BLOCK)

    @cached_property
    def unit_shares(self) -> tuple[float, ...]:
        """Per freeze unit, its share of the elements of a stage."""
        sizes = [size for layer in self.sizes for size in layer]
        return tuple(size / sum(sizes) for size in sizes)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Per layer, its share of the elements of a stage."""
        return tuple(sum(layer) / sum(map(sum, self.sizes)) for layer in self.sizes)

    def share(self, mask: Sequence[int]) -> float:
        """Share of a stage's weight gradients that a mask skips."""
        return sum(self.unit_shares[unit] for unit in mask)

    def input_share(self, stage: int, layer: int) -> float:
        """Share of the stage's I that is this layer's; the first layer of a batch has none."""
        if self.needs_input[stage]:
            return self.shares[layer]
        return (layer > 0) * self.shares[layer] / (1.0 - self.shares[0])

    def duration(self, kind: str, stage: int, micro_batch: int, mask: Sequence[int]) -> float:
        """Seconds of an F, B, I or W with these units frozen."""
        forward, input_gradient, weight_gradient = self.seconds[stage][micro_batch]
        if kind == "F":
            return forward
        of_weights = (1 - self.share(mask)) * weight_gradient
        if kind == "W":
            return of_weights
        units = iter(range(len(self.unit_shares)))
        alive = [[next(units) not in mask for _ in layer] for layer in self.sizes]
        live = [index for index, layer in enumerate(alive) if any(layer)]
        layers = range(len(self.sizes))
        behind = layers if self.needs_input[stage] else layers[live[0] + 1 :] if live else ()
        return sum(self.input_share(stage, n) for n in behind) * input_gradient + (kind == "B") * of_weights

    def makespan(self, masks: Masks, schedule: str, decision: Any) -> float:
        """Seconds of a batch by the profile alone: transfers and host time are 0."""
        if schedule.startswith("planned"):
            dag = PipelineDag(Schedule(from_commands(decision.orders).ranks))
        else:
            dag = PipelineDag(self.orders[schedule])
        return dag.simulate(
            {i: self.duration(i.kind, i.stage_id, i.micro_batch_id, masks[i.stage_id][i.micro_batch_id]) for i in dag.order}
        ).makespan

    def freeze_ratio(self, masks: Masks) -> tuple[float, float]:
        """Share of the weight gradients of a batch that is skipped: of their seconds; and as the mean of all masks' shares."""
        shares = [[self.share(mask) for mask in row] for row in masks]
        weights = [[w for _, _, w in row] for row in self.seconds]
        return float(np.average(shares, weights=weights)), float(np.mean(shares))


class Pace:
    """Sleeps of one process that end on time.

    A sleep of the system ends late, by about as much each time, so it is asked for less. And sleeps are reckoned from the start
    of the instruction, so neither what is left of that nor host time within the instruction adds to the profile's seconds, which
    were measured with such times in them.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []  # per instruction, seconds by which its last sleep ended late
        self._due = 0.0
        self._last_late: float | None = None
        self._overshoot = 8e-5

    def begin(self) -> float:
        """An instruction starts now."""
        if self._last_late is not None:
            self.late_s.append(self._last_late)
        self._due, self._last_late = time.perf_counter(), None
        return self._due

    def sleep(self, seconds: float) -> None:
        """Return ``seconds`` after the sleep before should have returned, or the instruction began."""
        self._due += seconds
        ahead = self._due - time.perf_counter() - self._overshoot
        if ahead > 0:
            time.sleep(ahead)
            # Small fixed steps find the median; a moving average would follow the rare sleep that is late by milliseconds.
            self._overshoot += 2e-6 if time.perf_counter() > self._due else -2e-6
        self._last_late = time.perf_counter() - self._due


class Sleep(torch.autograd.Function):
    """``x``, in the seconds of ``layer``. A live weight gets the output gradient's sum as its gradient in every element: what is
    emulated is time, and four ranks share two cores, so as little as possible is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SleepingLayer, micro_batch_id: int, *weights: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.seconds = layer, layer.seconds[micro_batch_id]
        layer.pace.sleep(ctx.seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, (_, input_gradient, weight_gradient) = ctx.layer, ctx.seconds
        for_input, _, _, *for_weights = ctx.needs_input_grad
        live = sum(size for size, needed in zip(layer.sizes, for_weights, strict=True) if needed) / layer.size
        layer.pace.sleep(for_input * input_gradient + live * weight_gradient)
        total = gradient.sum()
        of_weights = (total.expand(n) if needed else None for n, needed in zip(layer.sizes, for_weights, strict=True))
        return gradient if for_input else None, None, None, *of_weights


class SleepInTwo:
    """:class:`Sleep` with its W apart: an operation of ``rlfreeze_ds.freezing.operations`` on the live weights of a layer."""

    bias = None

    def __init__(self, layer: SleepingLayer, micro_batch_id: int, live: Sequence[nn.Parameter]) -> None:
        self._layer, self._seconds = layer, layer.seconds[micro_batch_id]
        self.parameters = tuple(live)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        self._layer.pace.sleep(self._seconds[0])
        return x.clone()

    def saved_weight(self) -> None:
        return None

    def input_gradient(self, gradient: torch.Tensor, x: torch.Tensor, weight: None) -> torch.Tensor:
        self._layer.pace.sleep(self._seconds[1])
        return gradient

    def weight_gradients(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [weight.numel() for weight in self.parameters]
        self._layer.pace.sleep(sum(sizes) / self._layer.size * self._seconds[2])
        total = gradient.sum()
        return tuple(total.expand(size) for size in sizes)


class SleepingLayer(nn.Module):
    """One of the layers of a stage; ``seconds[micro_batch]`` = (F, I, W) of this layer."""

    def __init__(self, index: int, emulated: Emulated, pace: Pace) -> None:
        super().__init__()
        stage, layer = divmod(index, len(emulated.sizes))
        shares = (emulated.shares[layer], emulated.input_share(stage, layer), emulated.shares[layer])
        self.sizes = emulated.sizes[layer]
        self.size = sum(self.sizes)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in self.sizes)
        self.pace = pace
        self.seconds = [tuple(share * s for share, s in zip(shares, row, strict=True)) for row in emulated.seconds[stage]]
        self.makes_input_need_gradient = layer == 0 and emulated.needs_input[stage]
        self._num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        micro_batch_id = self._num_forwards % len(self.seconds)  # micro-batches come in order, on every stage
        self._num_forwards += 1
        if self.makes_input_need_gradient and not x.requires_grad:
            x = x.detach().requires_grad_()
        weights = tuple(self.weights)
        catcher = weight_gradients._catcher  # set while our engine runs the forward of a backward in two
        live = [weight for weight in weights if weight.requires_grad] if catcher is not None else []
        if live:
            return catcher.record(SleepInTwo(self, micro_batch_id, live), x)
        return Sleep.apply(x, self, micro_batch_id, *weights)


class Watch:
    """When each instruction of an engine ran on this rank: (class, start, end). Starts ``pace`` with each."""

    def __init__(self, engine: Any, pace: Pace) -> None:
        self.rows: list[tuple[str, float, float]] = []
        self._pace = pace
        # On the instance: the class's map is shared.
        engine._INSTRUCTION_MAP = {kind: self._timed(kind.__name__, run) for kind, run in type(engine)._INSTRUCTION_MAP.items()}

    def _timed(self, name: str, run: Any) -> Any:
        def timed(engine: Any, **arguments: Any) -> None:
            start = self._pace.begin()
            run(engine, **arguments)
            self.rows.append((name, start, time.perf_counter()))

        return timed


@dataclass(frozen=True)
class Step:
    """One counted step of one engine on this rank; ``decision`` is the plan in force, None on stock's."""

    batch_s: float
    rows: list[tuple[str, float, float]]
    late_s: list[float]
    masks: Masks
    decision: Any
    replanned: bool


def train_step(engine: Any, watch: Watch, emulated: Emulated, pace: Pace, data: list[Any]) -> Step:
    """Train one batch and tell what it took."""
    import deepspeed

    controller = getattr(engine, "freeze_controller", None)
    decision = controller.decision if controller else None
    masks = [((),) * len(row) for row in emulated.seconds]
    if decision is not None:  # the engine's own, of all stages
        masks = [decision.masks(engine.freeze_config, shape, controller.step) for shape in controller.shapes]
    watch.rows, pace.late_s = [], []
    deepspeed.comm.barrier()
    started = time.perf_counter()
    engine.train_batch(iter(data))
    batch_s = time.perf_counter() - started
    replanned = controller is not None and controller.decision is not decision
    return Step(batch_s, watch.rows, pace.late_s, masks, decision, replanned)


def make_engines(options: argparse.Namespace, emulated: Emulated, pace: Pace) -> dict[str, Any]:
    """Stock's and one per ratio, by name."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import rlfreeze_ds

    num_stages = len(emulated.seconds)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": len(emulated.seconds[0]),
        "steps_per_print": 10**9, "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
    }  # fmt: skip

    def model() -> Any:
        layers = [LayerSpec(SleepingLayer, i, emulated, pace) for i in range(num_stages * len(emulated.sizes))]
        return PipelineModule(layers, num_stages=num_stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")

    engines = {"stock": deepspeed.initialize(model=model(), config=config)[0]}
    for name, ratio in itertools.product(options.schedule, options.ratios):
        schedule, _, most_held = name.partition(":")
        if schedule == "stock" and ratio == 0:
            continue  # that is what stock's engine does
        block = {
            "enabled": True, "selection": "spread", "guard": {"enabled": False}, "replan_interval": options.replan_interval,
            "warmup_steps": WARMUP_STEPS, "profile_steps": PROFILE_STEPS_PER_STAGE * num_stages, "ramp_steps": RAMP_STEPS,
            "planning": {
                "schedule": schedule, "most_held": int(most_held) if most_held else None,
                "max_freeze_ratio": ratio, "time_slack": options.time_slack,
            },
        }  # fmt: skip
        engines[f"{name}, ratio {ratio:g}"] = rlfreeze_ds.initialize(model=model(), config={**config, "rlfreeze": block})[0]
    return engines


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """One rank: all engines in turn; rank 0 writes the record."""
    emulated, pace = Emulated.read(options), Pace()
    engines = make_engines(options, emulated, pace)
    watches = {name: Watch(engine, pace) for name, engine in engines.items()}
    data = [(torch.zeros(1, WIDTH), torch.ones(1, WIDTH))] * len(emulated.seconds[0])
    names = list(engines)
    steps: dict[str, list[Step]] = {name: [] for name in names}
    settled = WARMUP_STEPS + PROFILE_STEPS_PER_STAGE * len(emulated.seconds) + RAMP_STEPS + 1
    for step in range(settled + options.steps):
        if step + RAMP_STEPS + 1 == settled:  # they asked for their first plans: those that search for orders take seconds
            for name in names[1:]:
                engines[name].freeze_controller.settle()
        turn = step % len(names)
        for name in names[turn:] + names[:turn]:
            taken = train_step(engines[name], watches[name], emulated, pace, data)
            if step >= settled:
                steps[name].append(taken)
        if rank == 0 and (step % 10 == 9 or step + 1 == settled + options.steps):
            print(f"emulated: step {step + 1} of {settled + options.steps}; {progress(steps)}", flush=True)
    stage_id = engines["stock"].stage_id
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    own = {name: seconds_beyond_profile(emulated, stage_id, rows) for name, rows in steps.items()}
    torch.distributed.gather_object(own, parts if rank == 0 else None)
    if rank == 0:
        write_report(options, emulated, steps, parts)


def progress(steps: dict[str, list[Step]]) -> str:
    """Medians so far."""
    if not steps["stock"]:
        return "the engines still measure and plan"
    median = {name: statistics.median(step.batch_s for step in rows) for name, rows in steps.items()}
    return ", ".join(f"{name} {seconds:.4f} s ({median['stock'] / seconds:.2f}x)" for name, seconds in median.items())


def seconds_beyond_profile(emulated: Emulated, stage_id: int, steps: Sequence[Step]) -> dict[str, list[float]]:
    """Of one engine on this rank: F and B less what they should take, sends, last sleeps, and what no F, B or wait explains;
    and the most micro-batches held at a time."""
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "send": [], "late_sleep": [], "outside": [], "held": []}
    for step in steps:
        counts: Counter[str] = Counter()
        ends: list[float] = []
        held = most_held = 0
        last = "W" if any("BackwardWeight" in name for name, _, _ in step.rows) else "B"
        for name, start, end in step.rows:
            kind = next((kind for suffix, kind in KINDS.items() if name.endswith(suffix)), None)
            if kind is not None:
                m = counts[kind]
                expected = emulated.duration(kind, stage_id, m, step.masks[stage_id][m])
                parts["forward" if kind == "F" else "backward"].append(end - start - expected)
                counts[kind] += 1
                ends += [start, end]
                held -= kind == last
            held += name == "RecvActivation" or (stage_id == 0 and kind == "F")
            most_held = max(most_held, held)
        parts["held"].append(most_held)
        parts["send"] += [end - start for name, start, end in step.rows if name.startswith("Send")]
        parts["late_sleep"] += step.late_s
        parts["outside"].append(step.batch_s - (max(ends) - min(ends)))
    return parts


def write_report(options: argparse.Namespace, emulated: Emulated, steps: dict[str, list[Step]], parts: list[Any]) -> None:
    """The figures, in words and as a record."""
    figures: dict[str, Any] = {}
    stock = [step.batch_s for step in steps["stock"]]
    for name, rows in steps.items():
        batch = [step.batch_s for step in rows]
        plain = [step.batch_s for step in rows if not step.replanned]
        # What freezes nothing is predicted by an engine that watched the same order unfrozen; with none there is no prediction.
        schedule = name.split(",")[0]
        predicted = [step.decision.predicted_makespan_s for step in rows if step.decision is not None] or [
            step.decision.unfrozen_makespan_s
            for other, own in steps.items()
            for step in own
            if other.startswith(f"{schedule},") and step.decision is not None
        ]
        predicted_s = statistics.median(predicted) if predicted else math.nan
        dag_s = statistics.median(emulated.makespan(step.masks, schedule, step.decision) for step in rows)
        beyond = {part: [s for of_rank in parts for s in of_rank[name][part]] for part in parts[0][name]}
        figure = {
            "batch_s": spread(batch),
            "batches_per_second_over_stock": spread([s / ours for s, ours in zip(stock, batch, strict=True)]),
            "predicted_s": round(predicted_s, 4),
            "predicted_over_measured": round(predicted_s / statistics.median(batch), 4),
            "freeze_ratio_of_seconds": round(statistics.fmean(emulated.freeze_ratio(step.masks)[0] for step in rows), 4),
            "most_micro_batches_held": max(beyond["held"]),
            "freeze_ratio_mean_of_masks": round(statistics.fmean(emulated.freeze_ratio(step.masks)[1] for step in rows), 4),
            "where_the_seconds_go": {
                "dag_of_profile_and_masks_s": round(dag_s, 4),
                "before_first_forward_and_after_last_backward_s": round(statistics.median(parts[0][name]["outside"]), 4),
                "forward_beyond_profile_s": spread(beyond["forward"]),
                "backward_beyond_profile_s": spread(beyond["backward"]),
                "send_s_lower_quartile": round(float(np.quantile(beyond["send"], 0.25)), 6),
                "sleep_late_s": spread(beyond["late_sleep"]),
            },
        }  # fmt: skip
        replans = [step.batch_s for step in rows if step.replanned]
        if replans:
            figure["replan_takes_s"] = round(statistics.median(replans) - statistics.median(plain), 4)
        figures[name] = figure
        print(
            f"emulated: {name}: {figure['batch_s']['median']:.4f} s a batch, "
            f"{figure['batches_per_second_over_stock']['median']:.3f}x stock's batches per second, "
            f"freeze ratio {figure['freeze_ratio_of_seconds']:.3f} of W seconds, predicted {figure['predicted_s']:.4f} s "
            f"({figure['predicted_over_measured'] - 1:+.1%})"
        )
    options.profile = Path(options.profile).name
    write_record(
        "EMULATED, layers sleep for a profile's seconds: ours against stock, predicted against measured",
        "benchmarks/emulated_pipeline.py", options, {"emulated": True, "stages": len(emulated.seconds), "figures": figures},
    )  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return {"median": round(float(middle), 6), "quartiles": [round(float(low), 6), round(float(high), 6)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=str(PROFILE), help="CSV, see benchmarks/profiles/README.md")
    parser.add_argument("--scale", type=float, default=1.0, help="times all seconds of the profile")
    parser.add_argument("--first-stage-input", type=float, default=0.0, help="share of I in the first stage's B, see above")
    parser.add_argument("--blocks", type=int, default=8, help="of the model on each stage: 8 of LLaMA-8B's 32 on 4 stages")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipeline")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8], help="max_freeze_ratio of each of our engines")
    parser.add_argument(
        "--schedule", nargs="+", default=["stock"], help="of our engines: stock, zb-h1, planned, planned:5 (may hold 5)"
    )
    parser.add_argument("--time-slack", type=float, default=0.02)
    parser.add_argument("--replan-interval", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="counted steps of every engine")
    parser.add_argument("--json", help="where the record goes")
    options = parser.parse_args()
    # Plans are of emulated seconds too, and the package's own lines do not say so.
    os.environ.setdefault("RLFREEZE_LOG_LEVEL", "WARNING")
    spawn(rank_main, len(Emulated.read(options).seconds) * options.dp, options)


if __name__ == "__main__":
    main()
