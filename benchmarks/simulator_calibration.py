"""Whether the jobs on paper that the policy learns from look like a real one: losses and gradient statistics, side by side.

What it does: trains the main job's GPT three times on the same batches: with nothing frozen, under the default thresholds, and
with every unit frozen in half of the micro-batches at random, which tells signal from noise best. Then draws simulated jobs that
train from scratch, runs them under the same thresholds, and compares at the same shares of the run: the loss and its noise, the
mixed criterion's G and V over the units, the noise scale B.

How to run: OMP_NUM_THREADS=1 python benchmarks/simulator_calibration.py --json benchmarks/records/simulator_calibration.json
``--curves RECORD`` takes the real job's curves from a record in place of training.
What to expect: a quarter of an hour of training and two minutes of simulation. The record holds the real curves and, for each
statistic and share of the run, the real value, the simulated jobs' median and 5 and 95 %, and the value of that drawn job which
is nearest to the real one.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from jobs import spawn, train_gpt, write_record
from tqdm import tqdm

NUM_STAGES = 2
LEVELS = (0.1, 0.5, 0.9)
"""Quantiles over the units."""

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Of the run, at which real and simulated jobs are compared."""

FROZEN_SHARE = 0.5
"""Of the micro-batches, where masks are drawn at random."""

VARIANTS = ("never", "default", "random")
SMALLEST = 0.01  # a threshold that nothing is below


def block(variant: str) -> dict[str, Any]:
    """The main job's, planned within the step so that a second run is the same but for the plan."""
    thresholds = {"gradient_threshold": SMALLEST, "variation_threshold": SMALLEST} if variant == "never" else {}
    planning = {"max_freeze_ratio": 0.5, "time_slack": 0.04, "background": False}
    phases = {"warmup_steps": 10, "profile_steps": 4, "ramp_steps": 6}
    return {"enabled": True, **phases, "criterion": thresholds, "planning": planning}


def freeze_at_random(engine: Any) -> None:
    """Every unit of every micro-batch for itself; the same on every replica."""
    from rlfreeze_ds.history import StepMasks

    controller = engine.freeze_controller
    num_units, stage_id = len(controller.units), controller.shape.stage_id

    def begin_step(num_micro_batches: int) -> StepMasks:
        draw = np.random.default_rng([stage_id, controller.step])
        frozen = draw.random((num_micro_batches, num_units)) < FROZEN_SHARE
        return StepMasks(controller.step, "benchmark", tuple(tuple(np.flatnonzero(row).tolist()) for row in frozen))

    controller.begin_step = begin_step


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """Train all three; rank 0 writes the curves."""
    import torch

    import rlfreeze_ds

    gpt = train_gpt()
    flags = [f"--steps={options.steps}", f"--width={options.width}", f"--layers={options.layers}", f"--seq-len={options.seq_len}"]
    arguments = gpt.parse_arguments(flags)
    text, _ = gpt.load_corpus(None, arguments.max_bytes)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: gpt.learning_rate_factor(step, arguments.warmup, arguments.lr_steps)
        )

    config = json.loads((Path(__file__).parents[1] / "ds_configs" / "gpt_stock.json").read_text())
    engines = {}
    for variant in VARIANTS:
        model = gpt.build_model(arguments)
        full = config | {"steps_per_print": 10**9, "rlfreeze": block(variant)}
        parameters = list(model.parameters())
        engines[variant] = rlfreeze_ds.initialize(model=model, model_parameters=parameters, config=full, lr_scheduler=schedule)[0]
    shape = (1, config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"])
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for step in tqdm(range(options.steps), unit="step", disable=rank != 0):
        offsets = gpt.sample_offsets(arguments.seed, step, len(text), arguments.seq_len, *shape)[0]
        samples = [gpt.cut_samples(text, row, arguments.seq_len) for row in offsets]
        for variant, engine in engines.items():
            controller = engine.freeze_controller
            if variant == "random" and controller.phase == "ramp" and "begin_step" not in vars(controller):
                freeze_at_random(engine)
            loss = engine.train_batch(iter(samples)).item()
            found[variant].append({"loss": loss, "phase": controller.phase, **unit_statistics(controller)})
    curves = {variant: curve(engines[variant], steps) for variant, steps in found.items()}
    if rank != 0:
        return
    options.measured.write_text(json.dumps({"num_micro_batches": shape[1], "curves": curves}))


def unit_statistics(controller: Any) -> dict[str, list[float]]:
    """Of this rank's units after a step: G, V and B in micro-batches (NaN: not known), each [num_units]."""
    gradient, variation = controller.criterion.statistics()
    signal, noise = (np.array(values) for values in controller.noise.estimates())
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(signal > 0, noise / signal, np.where(noise > 0, np.inf, np.nan))
    return {"gradient": gradient, "variation": variation, "noise_scale": scale.tolist()}


def curve(engine: Any, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Collective. Quantiles over the units of all stages, step by step from the end of warm-up on."""
    group, first = engine.freeze_controller.group, block("default")["warmup_steps"]
    rows = group.gather([{key: row[key] for key in ("gradient", "variation", "noise_scale")} for row in steps])
    if group.rank != 0:
        return {}
    names = ("gradient", "variation", "noise_scale")
    whole = [{name: sum((list(part[i][name]) for part in rows), []) for name in names} for i in range(len(steps))]
    return {
        "first_step": first,
        "loss": [round(row["loss"], 5) for row in steps],
        **{name: [quantiles(row[name]) for row in whole[first:]] for name in names},
    }


def quantiles(values: list[float] | np.ndarray) -> list[float] | None:
    """Of the known values, where they are more than half; an infinite one counts as large."""
    known = np.array([value for value in values if not math.isnan(value)])
    if 2 * len(known) <= len(values):
        return None
    with np.errstate(invalid="ignore"):
        found = np.quantile(np.minimum(known, 1e6), LEVELS)
    return [float(f"{value:.4g}") for value in found]


# Comparing -----------------------------------------------------------------------------------------------------------


def real_row(curve: dict[str, Any], share: float) -> dict[str, float]:
    """The statistics at a share of the run after warm-up. Of the loss, of the steps around; its noise without its trend."""
    losses, first = np.array(curve["loss"]), curve["first_step"]
    num = len(losses) - first
    at, reach = min(num - 1, int(share * num)), max(2, num // 20)
    around = losses[first + max(0, at - reach) : first + min(num, at + reach) + 1]
    return {
        "loss_level": float(np.log(around.mean() / losses[max(0, first - 3) : first].mean())),
        "loss_noise": float(np.std(np.diff(around)) / math.sqrt(2) / around.mean()),
        **named("gradient", curve["gradient"][at]),
        **named("variation", curve["variation"][at]),
    }


def named(statistic: str, values: list[float] | None) -> dict[str, float]:
    """Each quantile by its name."""
    return {f"{statistic}_{level:.0%}": value for level, value in zip(LEVELS, values or (math.nan,) * len(LEVELS), strict=True)}


def simulated_rows(seed: int, thresholds: Any) -> dict[float, dict[str, float]]:
    """The same of a simulated job, by share of the run."""
    from rlfreeze_ds.policy.env import NUM_WINDOWS
    from rlfreeze_ds.policy.job_traits import draw_job
    from rlfreeze_ds.policy.simulated_job import SimulatedJob

    job = SimulatedJob(draw_job(seed, NUM_WINDOWS), NUM_WINDOWS)
    rows = {}
    for window in range(NUM_WINDOWS):
        found = job.run_window(thresholds)
        for share in SHARES:
            if window + 1 == round(share * NUM_WINDOWS):
                rows[share] = {
                    "loss_level": found.observation.loss_level,
                    "loss_noise": job.traits.loss_noise / found.loss,
                    **named("gradient", quantiles(job.statistics.gradient)),
                    **named("variation", quantiles(job.statistics.variation)),
                    **named("noise_scale", quantiles(job.noise_scale / job.traits.pipeline.num_micro_batches)),
                }
    return rows


def compare(curves: dict[str, Any], num_micro_batches: int, num_jobs: int) -> dict[str, Any]:
    """By variant, share of the run and statistic: the real value, the nearest job's, and the simulated jobs' 5, 50 and 95 %.
    B is in multiples of the micro-batches of a batch, which is how simulated jobs share it."""
    from rlfreeze_ds.policy.env import START
    from rlfreeze_ds.policy.job_traits import TRAINING_JOBS, draw_job
    from rlfreeze_ds.policy.observation import Thresholds

    chosen = {"never": Thresholds(SMALLEST, SMALLEST), "default": START}
    seeds = (seed for seed in range(*TRAINING_JOBS) if draw_job(seed, 1).from_scratch)
    found = [
        {name: simulated_rows(seed, thresholds) for name, thresholds in chosen.items()}
        for seed, _ in zip(seeds, tqdm(range(num_jobs), unit="job"), strict=False)
    ]
    noise_scale = {share: at_share(curves["random"], "noise_scale", share) for share in SHARES}
    real = {
        name: {
            share: real_row(curves[name], share)
            | named("noise_scale", [value / num_micro_batches for value in noise_scale[share] or ()] or None)
            for share in SHARES
        }
        for name in chosen
    }
    keys = [(name, share, key) for name in chosen for share in SHARES for key in real[name][share]]
    values = np.array([[job[name][share][key] for name, share, key in keys] for job in found])
    target = np.array([real[name][share][key] for name, share, key in keys])
    low, middle, high = np.nanquantile(values, (0.05, 0.5, 0.95), axis=0)
    distances = np.nanmean(((values - target) / (high - low)) ** 2, axis=1)
    nearest = values[int(np.argmin(distances))]
    table: dict[str, Any] = {name: {str(share): {} for share in SHARES} for name in chosen}
    inside = []
    for i, (name, share, key) in enumerate(keys):
        known = math.isfinite(target[i])
        if known:
            inside.append(bool(low[i] <= target[i] <= high[i]))
        row = {"real": target[i], "nearest": nearest[i], "5%": low[i], "50%": middle[i], "95%": high[i]}
        table[name][str(share)][key] = {which: rounded(value) for which, value in row.items()} | (
            {"inside": inside[-1]} if known else {}
        )
    return {
        "inside": sum(inside), "compared": len(inside), "nearest_distance": rounded(float(np.sqrt(distances.min()))),
        "table": table,
    }  # fmt: skip


def at_share(curve: dict[str, Any], name: str, share: float) -> list[float] | None:
    """Quantiles of one statistic at a share of the run after warm-up."""
    return curve[name][min(len(curve[name]) - 1, int(share * len(curve[name])))]


def rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=180, help="of each of the three runs")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=5, help="transformer blocks")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=200, help="simulated jobs")
    parser.add_argument("--curves", type=Path, help="record with the real job's curves, in place of training")
    parser.add_argument("--json", help="where the record goes")
    options = parser.parse_args()
    if options.curves is None:
        with tempfile.TemporaryDirectory() as folder:
            options.measured = Path(folder) / "curves.json"
            spawn(rank_main, NUM_STAGES, options)
            figures = json.loads(options.measured.read_text())
            del options.measured
    else:
        record = json.loads(options.curves.read_text())
        figures = {key: record[key] for key in ("num_micro_batches", "curves")}
    del options.curves
    figures = {**compare(figures["curves"], figures["num_micro_batches"], options.jobs), **figures}
    write_record("simulated jobs look like a real one", "benchmarks/simulator_calibration.py", options, figures)


if __name__ == "__main__":
    main()
