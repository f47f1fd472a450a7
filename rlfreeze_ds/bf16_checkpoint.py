"""Loading the optimizer state of a bf16 job without ZeRO.

DeepSpeed saves every rank's partition of it. 0.16.9 loads them again; 0.18.9 and 0.19.8 look elsewhere and fail (``KeyError`` in
``_load_legacy_checkpoint``), and a load without optimizer states leaves the fp32 masters as they were, so that the next step
undoes it. With ZeRO-1 all of it works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlfreeze_ds.errors import RLFreezeError

_MASTERS, _STATE = "single_partition_of_fp32_groups", "base_optimizer_state"  # DeepSpeed's keys


def needed(engine: Any) -> bool:
    """Whether the engine is one of those jobs."""
    return hasattr(engine.optimizer, "fp32_groups_has_gradients") and not engine.zero_optimization()


@contextmanager
def loading_partitions(engine: Any) -> Iterator[None]:
    """Within the block the engine's ``load_checkpoint`` takes this rank's partition from where DeepSpeed saved it."""
    stock = engine.optimizer.load_state_dict

    def load(state: Any = None, **kwargs: Any) -> None:
        if state is None:  # 0.16.9, which found the partitions itself
            stock(**kwargs)
            return
        path = engine._get_zero_ckpt_name(*os.path.split(engine._curr_ckpt_path))
        if os.path.exists(path):
            # DeepSpeed's own file, read as DeepSpeed reads it.
            state = torch.load(path, map_location="cpu", weights_only=False)["optimizer_state_dict"]
        elif engine.dp_world_size > 1:
            raise RLFreezeError(
                f"{path}: not found, so the optimizer state of this rank is missing. Was the checkpoint copied whole, and saved "
                "with as many stages and replicas? Without its optimizer state it loads with load_optimizer_states=False."
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
