"""Optimizer state of bf16 jobs without ZeRO, in and out of a checkpoint.

DeepSpeed (0.16.9 to 0.19.8) shards that state over the data-parallel ranks but saves the first rank's part only, and fails on
loading it (``KeyError`` in ``_load_legacy_checkpoint``); without the state it leaves the fp32 masters as they were. So every
rank keeps its part in a file of its own beside DeepSpeed's, and loads that. With ZeRO-1 DeepSpeed does all of it itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlfreeze_ds.errors import RLFreezeError

_MASTERS, _STATE = "single_partition_of_fp32_groups", "base_optimizer_state"  # DeepSpeed's own keys


def needed(engine: Any) -> bool:
    """Whether the engine is one of those jobs."""
    return hasattr(engine.optimizer, "fp32_groups_has_gradients") and not engine.zero_optimization()


def _path(engine: Any, folder: str) -> str:
    replica = engine.grid.get_data_parallel_id()
    return os.path.join(folder, f"rlfreeze_bf16_optimizer_pp{engine.stage_id:02d}_dp{replica:02d}.pt")


def save_partition(engine: Any, folder: str) -> None:
    """Write this rank's masters and moments into ``folder``."""
    os.makedirs(folder, exist_ok=True)
    optimizer = engine.optimizer
    content = {
        _MASTERS: [partition.detach() for partition in optimizer.fp32_groups_flat_partition],
        _STATE: optimizer.optimizer.state_dict(),
    }
    path = _path(engine, folder)
    torch.save(content, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


@contextmanager
def loading_partitions(engine: Any) -> Iterator[None]:
    """Within the block the engine's ``load_checkpoint`` takes this rank's part."""

    def load(state: Any, **_: Any) -> None:
        path = _path(engine, engine._curr_ckpt_path)
        if os.path.exists(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
        elif engine.dp_world_size > 1:
            raise RLFreezeError(
                f"{path}: not found. Without ZeRO, stock DeepSpeed saves a bf16 optimizer's first partition only, so the state "
                f"of the {engine.dp_world_size - 1} other replicas is lost. Load with load_optimizer_states=False; for "
                'later checkpoints add "zero_optimization": {"stage": 1}.'
            )
        _load(engine.optimizer, state, path)

    engine.optimizer.load_state_dict = load  # on the instance, in front of the method of the class
    try:
        yield
    finally:
        del engine.optimizer.load_state_dict


@torch.no_grad()
def _load(optimizer: Any, state: dict[str, Any], path: str) -> None:
    flats = optimizer.fp32_groups_flat_partition
    found, wanted = [saved.numel() for saved in state[_MASTERS]], [flat.numel() for flat in flats]
    if found != wanted:
        raise RLFreezeError(
            f"{path}: holds partitions of {found} elements, this job has {wanted}. It was saved with other stages, replicas or "
            "parameter groups: load it with load_optimizer_states=False."
        )
    optimizer.optimizer.load_state_dict(state[_STATE])
    for flat, saved in zip(flats, state[_MASTERS], strict=True):
        flat.copy_(saved)
    optimizer._link_all_hp_params()
    optimizer._hp_optimizer_states_linked = False
