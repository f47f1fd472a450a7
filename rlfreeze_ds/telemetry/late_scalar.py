"""A device scalar's value on the host, without a wait in the step that computes it."""

from __future__ import annotations

import torch


class LateScalar:
    """Starts the copy at once; :meth:`read`, a step later, hardly ever has to wait for it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._copied = None
        if value.device.type == "cuda":
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = value.detach().clone()

    def read(self) -> float:
        """The value."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host)
