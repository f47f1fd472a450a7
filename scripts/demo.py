"""The main job on the stock pipeline engine and on ours, in turn on the same seeds, and what came of it.

What it does: runs scripts/train_gpt.py twice per seed through the ``deepspeed`` launcher, once as it is and once with
``--module rlfreeze_ds.launch``. The second run goes on past the last step of the first, up to 1.5 times the first
one's training time, to see when it reaches the first one's final validation loss.

How to run: bash scripts/demo.sh, or ``python scripts/demo.py`` in an environment that has the package;
``--quick`` is a tiny model for a few steps, which shows that everything works but measures nothing;
``--config ds_configs/gpt_policy.json`` lets a policy server move the thresholds (needs the ``server`` extra).

What to expect: about ten minutes on two CPU cores with a progress line, then a table; the same figures are in
``runs/demo/summary.json``, the logs and metrics of each run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STOCK_CONFIG = ROOT / "ds_configs/gpt_stock.json"
RLFREEZE_CONFIG = ROOT / "ds_configs/gpt_rlfreeze.json"

LOSS_CLOCK_LIMIT = 1.5  # how much longer than stock our run may take to reach stock's loss
UNTIMED_STEPS = 2  # the first steps open connections and size buffers; both runs are timed without them
POLL_SECONDS = 1.0
PLAIN_PROGRESS_SECONDS = 20.0  # between two progress lines where the output is not a terminal
LOG_TAIL_LINES = 40

FIGURES = {
    "stock_tokens_per_s": "tokens per second, stock",
    "rlfreeze_tokens_per_s": "tokens per second, rlfreeze",
    "speedup": "speed-up, all steps",
    "steady_speedup": "speed-up, median step once planned",
    "predicted_makespan_s": "batch time the plan predicts (s)",
    "measured_makespan_s": "batch time measured (s)",
    "mean_freeze_ratio": "mean freeze ratio",
    "stock_val_loss": "validation loss, stock",
    "rlfreeze_val_loss": "validation loss, rlfreeze, same steps",
    "time_to_stock_loss_ratio": "time to stock's loss, ours / stock's",
}


@dataclass(frozen=True)
class Size:
    """How large a demonstration is."""

    steps: int
    eval_interval: int
    flags: tuple[str, ...]


FULL = Size(steps=180, eval_interval=10, flags=())
QUICK = Size(
    steps=80,
    eval_interval=20,
    flags=(
        "--layers=2", "--width=64", "--heads=2", "--seq-len=32", "--warmup=4", "--eval-batches=1", "--max-bytes=1000000"
    ),
)


@dataclass(frozen=True)
class Run:
    """What one training run wrote."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    engine_events: list[dict[str, Any]]

    def clock(self, step: int) -> float:
        """Seconds of training up to and with ``step``, the untimed first steps left out."""
        return sum(record["seconds"] for record in self.steps if UNTIMED_STEPS < record["step"] <= step)

    def tokens_per_s(self, step: int) -> float:
        tokens = sum(record["tokens"] for record in self.steps if UNTIMED_STEPS < record["step"] <= step)
        return tokens / self.clock(step)

    def val_loss(self, step: int) -> float:
        return next(record["val_loss"] for record in self.evaluations if record["step"] == step)


class JobFailed(Exception):
    """A training run ended with an error; the message holds the end of its log."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Stock engine against ours on the same job and seeds.")
    parser.add_argument("--quick", action="store_true", help="tiny model, few steps: shows that it works")
    parser.add_argument("--steps", type=int, default=None, help="training steps of both runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="one pair of runs each; figures are means")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages, one process each")
    parser.add_argument("--data", type=Path, default=None, help="folder of text files; default: Python's own library")
    parser.add_argument("--config", type=Path, default=RLFREEZE_CONFIG, help="DeepSpeed JSON of our run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/demo", help="where logs and results go")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the ranks are ended too
    size = QUICK if arguments.quick else FULL
    steps = arguments.steps or size.steps

    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    (output / "summary.json").unlink(missing_ok=True)  # no old result beside a run that failed
    environment = child_environment(arguments.stages)
    started = time.monotonic()
    pairs, windows = [], []
    try:
        for seed in arguments.seeds:
            flags = [
                f"--stages={arguments.stages}", f"--seed={seed}", f"--lr-steps={steps}",
                f"--eval-interval={size.eval_interval}", *size.flags,
            ]
            if arguments.data is not None:
                flags.append(f"--data={arguments.data.resolve()}")
            suffix = "" if len(arguments.seeds) == 1 else f"-seed{seed}"
            stock = run_job(
                "stock", [], STOCK_CONFIG, [*flags, f"--steps={steps}"], output / f"stock{suffix}", environment, steps
            )
            ours = run_job(
                "rlfreeze",
                ["--module", "rlfreeze_ds.launch"],
                arguments.config.resolve(),
                # Steps without limit: the clock ends this run, or stock's loss, but neither before the same steps.
                [
                    *flags, f"--steps={4 * steps}", f"--min-steps={steps}",
                    f"--max-train-seconds={LOSS_CLOCK_LIMIT * stock.clock(steps):.3f}",
                    f"--stop-at-val-loss={stock.val_loss(steps)!r}",
                ],
                output / f"rlfreeze{suffix}",
                environment,
                steps,
            )
            pairs.append(compare(stock, ours, steps))
            windows.append([event for event in ours.engine_events if event["event"] in ("policy", "guard")])
    except JobFailed as failure:
        print(f"\ndemo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130

    summary: dict[str, Any] = {key: mean_or_none([pair[key] for pair in pairs]) for key in FIGURES}
    summary |= {"steps": steps, "seeds": arguments.seeds, "quick": arguments.quick, "versions": versions()}
    if len(pairs) > 1:
        summary["per_seed"] = pairs
    if any(windows):
        summary["policy"] = windows
    write_atomically(output / "summary.json", summary)
    print_table(summary)
    print(f"demo: {time.monotonic() - started:.0f} s in all; figures in {output / 'summary.json'}")
    return 0


# Running a job -------------------------------------------------------------------------------------------------------


def child_environment(num_ranks: int) -> dict[str, str]:
    """The environment of the launcher: one thread per rank, and as many devices as ranks where there are too few."""
    import torch

    environment = dict(os.environ)
    # The launcher starts python, and DeepSpeed's build of its CPU communication op starts ninja, from the PATH.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["OMP_NUM_THREADS"] = "1"
    if torch.cuda.device_count() < num_ranks:
        environment["DS_ACCELERATOR"] = "cpu"
        environment["LOCAL_SIZE"] = str(num_ranks)  # else DeepSpeed counts one device per NUMA node
    environment["NUM_RANKS"] = str(num_ranks)
    return environment


def run_job(
    name: str,
    launcher_flags: list[str],
    config: Path,
    script_flags: list[str],
    folder: Path,
    environment: dict[str, str],
    steps: int,
) -> Run:
    """One training run from start to end, with a progress line.

    Raises:
        JobFailed: it exited with an error, or without the evaluation that the comparison needs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launcher = shutil.which("deepspeed", path=environment["PATH"])
    if launcher is None:
        raise JobFailed("the deepspeed launcher is not installed; run scripts/demo.sh, which installs it")
    port = free_port()
    command = [
        launcher, "--num_gpus", environment["NUM_RANKS"], "--master_port", str(port), *launcher_flags,
        "scripts/train_gpt.py", "--deepspeed", "--deepspeed_config", os.path.relpath(config, ROOT),
        f"--output={folder}", *script_flags,
    ]  # fmt: skip
    log_path, metrics_path = folder / "log.txt", folder / "metrics.jsonl"
    with log_path.open("w", encoding="utf-8") as log:
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"RLFREEZE_RUN_DIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        progress = Progress(name, steps)
        try:
            while job.poll() is None:
                progress.show(read_json_lines(metrics_path))
                time.sleep(POLL_SECONDS)
        finally:
            progress.close()
            end_session(job)
            free_shared_memory(port)
    records = read_json_lines(metrics_path)
    run = Run(
        steps=[record for record in records if "loss" in record],
        evaluations=[record for record in records if "val_loss" in record],
        engine_events=read_json_lines(folder / "rlfreeze.jsonl"),
    )
    if job.returncode != 0 or not any(record["step"] == steps for record in run.evaluations):
        tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        what = f"the {name} run ended with exit code {job.returncode} after step {len(run.steps)} of {steps}"
        raise JobFailed("\n".join([f"{what}; the end of {log_path}:", *tail]))
    return run


def end_session(job: subprocess.Popen[bytes]) -> None:
    """End whatever is left of a job's session; the ``deepspeed`` command alone would leave its ranks behind."""
    for sign, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + patience_s
        to_send: int = sign
        while True:
            try:
                os.killpg(job.pid, to_send)
            except ProcessLookupError:
                return
            to_send = 0  # from here on it only asks whether anything is left
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
            job.poll()  # reaps it, else its group would never be seen as gone


def free_shared_memory(port: int) -> None:
    """Remove what DeepSpeed's CPU communication op leaves behind for ever: 66 MiB per rank and start."""
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        leftover.unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be growing, or may not exist yet."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Progress:
    """A line that is rewritten on a terminal, or a new line now and then elsewhere."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps
        self._started = self._shown = time.monotonic()
        self._terminal = sys.stdout.isatty()
        self._print("starting ...")

    def show(self, records: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        if not self._terminal and now - self._shown < PLAIN_PROGRESS_SECONDS:
            return
        self._shown = now
        steps = [record for record in records if "loss" in record]
        if not steps:
            self._print(f"starting ... {now - self._started:.0f} s")
            return
        recent = statistics.median(record["seconds"] for record in steps[-20:])
        evaluations = [record["val_loss"] for record in records if "val_loss" in record]
        validation = f", validation {evaluations[-1]:.3f}" if evaluations else ""
        past = " (on towards stock's loss)" if steps[-1]["step"] > self._steps else ""
        self._print(
            f"step {steps[-1]['step']}/{self._steps}{past}, {recent:.2f} s/step, loss {steps[-1]['loss']:.3f}"
            f"{validation}, {now - self._started:.0f} s"
        )

    def close(self) -> None:
        if self._terminal:
            print(flush=True)

    def _print(self, text: str) -> None:
        start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
        print(f"{start}{self._name:>8}: {text}", end=end, flush=True)


# Comparing -----------------------------------------------------------------------------------------------------------


def compare(stock: Run, ours: Run, steps: int) -> dict[str, float | None]:
    """The figures of one pair of runs, all over the same ``steps``; only the time to stock's loss looks further.

    What could not be measured is None.
    """
    # The engine's log counts the steps done before, the training script the steps done.
    events = [event for event in ours.engine_events if event.get("event") == "step" and event["step"] < steps]
    steady = [event for event in events if event.get("phase") == "steady"]
    steady_steps = {event["step"] + 1 for event in steady}
    steady_seconds = [record["seconds"] for record in ours.steps if record["step"] in steady_steps]
    stock_seconds = [record["seconds"] for record in stock.steps if record["step"] > UNTIMED_STEPS]
    return {
        "stock_tokens_per_s": stock.tokens_per_s(steps),
        "rlfreeze_tokens_per_s": ours.tokens_per_s(steps),
        "speedup": stock.clock(steps) / ours.clock(steps),
        "steady_speedup": statistics.median(stock_seconds) / statistics.median(steady_seconds)
        if steady_seconds
        else None,
        "predicted_makespan_s": median_or_none([event.get("predicted_makespan_s") for event in steady]),
        "measured_makespan_s": median_or_none([event.get("makespan_s") for event in steady]),
        "mean_freeze_ratio": mean_or_none([event.get("mean_freeze_ratio") or 0.0 for event in events]),
        "stock_val_loss": stock.val_loss(steps),
        "rlfreeze_val_loss": ours.val_loss(steps),
        "time_to_stock_loss_ratio": time_to_stock_loss_ratio(stock, ours, steps),
    }


def time_to_stock_loss_ratio(stock: Run, ours: Run, steps: int) -> float | None:
    """Our training time until the first evaluation at or below stock's final loss, over stock's training time."""
    target = stock.val_loss(steps)
    for record in ours.evaluations:
        if record["val_loss"] <= target:
            ratio = ours.clock(record["step"]) / stock.clock(steps)
            return ratio if ratio <= LOSS_CLOCK_LIMIT else None
    return None


def mean_or_none(values: list[float | None]) -> float | None:
    """The mean; None where a value is missing, since a mean over the others would flatter."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def median_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "rlfreeze_ds", "pulp", "highspy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["rlfreeze_ds"] is None:  # run from the repository without an install
        sys.path.insert(0, str(ROOT))
        import rlfreeze_ds

        found["rlfreeze_ds"] = rlfreeze_ds.__version__
    return found


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def print_table(summary: dict[str, Any]) -> None:
    width = max(map(len, FIGURES.values()))
    print()
    for key, label in FIGURES.items():
        value = summary[key]
        missing = "not reached" if key == "time_to_stock_loss_ratio" else "-"
        text = missing if value is None else f"{value:.4g}"
        print(f"  {label:<{width}}  {text:>12}")
    print(f"  {'steps':<{width}}  {summary['steps']:>12}")
    print("  " + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
