"""Run a function on several ranks (gloo, CPU) and get every rank's result, or the first failing rank's traceback."""

from __future__ import annotations

import io
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

TIMEOUT_S = 240.0  # against hangs: a busy machine may be many times slower than an idle one


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """``[function(*args) on rank 0, on rank 1, ...]``; ``function`` must be importable and its results picklable.

    Raises:
        AssertionError: with the traceback of the rank that failed first, or which ranks hung.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(function, rank, world_size, port, results, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    deadline = time.monotonic() + timeout_s
    try:
        while len(answers) + len(failures) < world_size and time.monotonic() < deadline:
            try:
                rank, failed_at, value = results.get(timeout=0.2)
            except queue.Empty:
                if any(p.exitcode not in (None, 0) for p in processes) and results.empty():
                    break
                continue
            if failed_at is None:
                answers[rank] = torch.load(io.BytesIO(value), weights_only=False)
            else:
                failures.append((failed_at, rank, value))
                # The peers of a failed rank fail too, a little later: give the earliest time to come in.
                deadline = min(deadline, time.monotonic() + 5)
    finally:
        for process in processes:
            process.join(timeout=0.5 if failures else 5)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        _, rank, text = min(failures)
        raise AssertionError(f"rank {rank} failed first:\n{text}")
    missing = [rank for rank in range(world_size) if rank not in answers]
    assert not missing, f"ranks {missing} gave no result (exit codes {[p.exitcode for p in processes]}): hung or killed"
    return [answers[rank] for rank in range(world_size)]


def rank_main(function: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    # No LOCAL_SIZE: with it DeepSpeed's CPU communication op leaves 66 MiB of shared memory per rank and start behind for ever.
    os.environ.pop("LOCAL_SIZE", None)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    try:
        torch.set_num_threads(1)
        import deepspeed

        deepspeed.init_distributed("gloo")
        # Serialised here: a queue would hand tensors over as handles that die with this process.
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        results.put((rank, None, buffer.getvalue()))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent reports it
        results.put((rank, time.time(), traceback.format_exc()))
