"""How the controllers of all ranks talk: rank 0 collects and decides, everyone acts on the same bytes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class ControlGroup:
    """All ranks of the job, over gloo on the host: no device synchronisation, and any picklable object fits."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    @property
    def alone(self) -> bool:
        """The job has one rank."""
        return self._group is None

    def gather(self, value: Any) -> list[Any]:
        """Collective. Every rank's value by rank, on rank 0; nothing of use elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Collective. Rank 0's value, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
