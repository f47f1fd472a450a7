"""What the benchmarks share: a model, ranks on this machine, and a record of what came out."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def pipeline(num_layers: int, width: int, num_stages: int) -> Any:
    """A seeded pipeline of blocks; call it on every rank."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(Block, width) for _ in range(num_layers)]
    return PipelineModule(
        layers, num_stages=num_stages, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=True
    )


def train_gpt() -> ModuleType:
    """The main job's script, as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", Path(__file__).parents[1] / "scripts" / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spawn(rank_main: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run ``rank_main(rank, *args)`` on every rank, over gloo, one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_start, (rank_main, world_size, port, args), nprocs=world_size)


def _start(rank: int, rank_main: Callable[..., None], world_size: int, port: int, args: tuple[Any, ...]) -> None:
    # No LOCAL_SIZE: with it DeepSpeed's CPU communication op leaves shared memory behind for ever.
    os.environ.pop("LOCAL_SIZE", None)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    rank_main(rank, *args)
    deepspeed.comm.barrier()


def write_record(claim: str, script: str, options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print the record, and put it where ``--json`` says."""
    import deepspeed

    record = {
        "claim": claim, "script": script, "options": {k: v for k, v in vars(options).items() if k != "json"}, **figures,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__},
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread a rank, gloo",
    }  # fmt: skip
    print(json.dumps(record, indent=2))
    if options.json:
        partial = Path(f"{options.json}.tmp")
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(options.json)
