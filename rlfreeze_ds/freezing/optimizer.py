"""A step that leaves wholly frozen parameters and their optimizer state untouched: fp32 without ZeRO.

There the optimizer works on the parameters themselves and skips one whose gradient is None, with its weight decay and
momentum. So what was frozen in every micro-batch must have no gradient, from before the reduction (which would fill in zeros)
until after the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rlfreeze_ds.errors import UnsupportedError
from rlfreeze_ds.freezing.units import FreezeUnit

SUPPORTED_OPTIMIZERS: tuple[type, ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer whose step would touch a parameter that has no gradient, or is not known not to.

    Raises:
        UnsupportedError
    """
    if type(optimizer) not in SUPPORTED_OPTIMIZERS:
        raise _unsupported(f"{type(optimizer).__module__}.{type(optimizer).__name__}")


def check_optimizer_config(name: str | None, params: Mapping[str, Any]) -> None:
    """The part of :func:`check_optimizer` that needs no optimizer: DeepSpeed compiles its own Adam for most of a minute.

    Raises:
        UnsupportedError
    """
    if (name or "").lower() in ("adam", "adamw") and not params.get("torch_adam", False):
        raise _unsupported(f'"{name}" (DeepSpeed\'s FusedAdam)')


def _unsupported(optimizer: str) -> UnsupportedError:
    allowed = ", ".join(kind.__name__ for kind in SUPPORTED_OPTIMIZERS)
    return UnsupportedError(
        f"optimizer {optimizer}: a wholly frozen parameter is left exactly alone by torch.optim's {allowed} only so far. In the "
        'DeepSpeed JSON add "torch_adam": true to optimizer.params of Adam or AdamW, or use "SGD", or disable "rlfreeze".'
    )


@torch.no_grad()
def settle_gradients(
    units: Sequence[FreezeUnit], live_counts: Sequence[int], num_micro_batches: int, rescale: bool
) -> list[torch.nn.Parameter]:
    """Finish the accumulated gradients of a step, before any reduction.

    A unit live in m of M micro-batches holds a sum over m terms, each already divided by M: times M / m it is their mean. A
    unit live in none loses its gradient and does not require one until :func:`thaw`.

    Returns:
        The parameters of the wholly frozen units.
    """
    wholly_frozen = []
    for unit, live in zip(units, live_counts, strict=True):
        if live == num_micro_batches:
            continue
        for parameter in unit.parameters:
            if live == 0:
                parameter.grad = None
                parameter.requires_grad_(False)
                wholly_frozen.append(parameter)
            elif rescale and parameter.grad is not None:
                parameter.grad.mul_(num_micro_batches / live)
    return wholly_frozen


def thaw(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let the parameters that :func:`settle_gradients` returned require gradients again."""
    for parameter in parameters:
        parameter.requires_grad_(True)
