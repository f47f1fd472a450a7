"""Where a step's gradients are, mode by mode, and what becomes of them before the reduction.

DeepSpeed keeps accumulated gradients in one of three places (read and tried on 0.16.9 to 0.19.8):

- fp32 without ZeRO: ``parameter.grad``. The reduction fills in zeros where a parameter that requires a gradient has none.
- ZeRO-1: ``parameter.grad``, or ``parameter.grad_accum`` where it accumulates in another precision. The reduction skips a
  parameter that has none and leaves each replica with the averages of its own partition only.
- ``BF16_Optimizer``: a flat buffer for every parameter, always reduced whole, with a flag that says whether anything came in.

A unit that was frozen in every micro-batch takes part in none of it: no gradient, no share in the reduction, none in the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from rlfreeze_ds.freezing.units import FreezeUnit

Parameter = torch.nn.Parameter

STAND_IN = 1e-10
"""Its square, times the elements of a parameter, is lost in any other norm; yet it is not zero in fp32."""


class GradientStore(Protocol):
    """One of the three places. ``sharded``: after the reduction each data-parallel rank holds a part."""

    sharded: bool

    def parameters(self) -> set[int]:
        """``id`` of every parameter that the optimizer updates."""

    def accumulated(self, parameter: Parameter) -> torch.Tensor | None:
        """Before the reduction: the sum over the micro-batches so far, or None."""

    def drop(self, parameter: Parameter) -> None:
        """Leave the parameter out of this step's reduction, norm and update."""

    def reduced(self, parameter: Parameter) -> torch.Tensor | None:
        """After the reduction: the mean over the replicas, or this rank's part of it, or None."""

    def late_backward(self, parameters: Sequence[Parameter]) -> AbstractContextManager[None]:
        """Around a backward that the engine does not run itself, and that gives ``parameters`` a gradient."""

    def finish(self) -> None:
        """After the step, or after an error in it."""


class ParameterGradients:
    """fp32 without ZeRO. A dropped parameter requires no gradient until the step is over, else zeros would be filled in."""

    sharded = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._dropped: list[Parameter] = []

    def parameters(self) -> set[int]:
        groups = self._optimizer.param_groups if self._optimizer is not None else ()  # None: an engine that only evaluates
        return {id(parameter) for group in groups for parameter in group["params"]}

    def accumulated(self, parameter: Parameter) -> torch.Tensor | None:
        return parameter.grad

    reduced = accumulated

    def drop(self, parameter: Parameter) -> None:
        parameter.grad = None
        if parameter.requires_grad:  # else the user froze it meanwhile
            parameter.requires_grad_(False)
            self._dropped.append(parameter)

    def late_backward(self, parameters: Sequence[Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        for parameter in self._dropped:
            parameter.requires_grad_(True)
        self._dropped.clear()


class ZeroGradients:
    """ZeRO-1."""

    sharded = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._attribute = "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"

    def parameters(self) -> set[int]:
        return {id(parameter) for group in self._optimizer.bit16_groups for parameter in group}

    def accumulated(self, parameter: Parameter) -> torch.Tensor | None:
        return getattr(parameter, self._attribute)

    def drop(self, parameter: Parameter) -> None:
        setattr(parameter, self._attribute, None)

    def reduced(self, parameter: Parameter) -> torch.Tensor | None:
        mapping = parameter._hp_mapping
        if mapping is None:  # another rank has all of it
            return None
        # Not through the mapping: 0.16.9 puts another dict in the place of this one after an overflow.
        return self._optimizer.averaged_gradients[mapping.param_group_index][parameter._index_in_param_group]

    def late_backward(self, parameters: Sequence[Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        pass


class Bf16Gradients:
    """``BF16_Optimizer``. It would reduce its buffers whole, so it is shown what is live of them. Its norm fails on a stage
    where nothing came in, so there a frozen unit's gradient stands in with nearly nothing."""

    sharded = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._place = {
            id(parameter): (i, j) for i, group in enumerate(optimizer.bf16_groups) for j, parameter in enumerate(group)
        }
        self._dropped: set[tuple[int, int]] = set()

    def parameters(self) -> set[int]:
        return set(self._place)

    def accumulated(self, parameter: Parameter) -> torch.Tensor | None:
        i, j = self._place[id(parameter)]
        return self._optimizer.fp32_groups_gradients[i][j] if self._optimizer.fp32_groups_has_gradients[i][j] else None

    reduced = accumulated

    def drop(self, parameter: Parameter) -> None:
        i, j = self._place[id(parameter)]
        if self._optimizer.fp32_groups_has_gradients[i][j]:
            self._optimizer.fp32_groups_gradients[i][j].zero_()
            self._optimizer.fp32_groups_has_gradients[i][j] = False
        self._dropped.add((i, j))
        # On the instance, in front of the method of the class.
        self._optimizer.get_grads_for_reduction = self._live_runs

    def _live_runs(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """In place of ``get_grads_for_reduction``: neighbours that are live, as one view each."""
        runs = []
        for i, gradients in enumerate(self._optimizer.fp32_groups_gradients):
            start = at = 0
            for j, gradient in enumerate(gradients):
                end = at + gradient.numel()
                if (i, j) in self._dropped:
                    runs.append((i, start, at))
                    start = end
                at = end
            runs.append((i, start, at))
        return [self._optimizer.fp32_groups_gradients_flat[i][start:end] for i, start, end in runs if start < end], {}

    def stand_in(self) -> None:
        """Call between the reduction and the step."""
        # A tied copy is no part of this stage's norm: the first stage counts it.
        counted = [
            (i, j)
            for i, group in enumerate(self._optimizer.bf16_groups)
            for j, parameter in enumerate(group)
            if not getattr(parameter, "ds_pipe_replicated", False)
        ]
        if any(self._optimizer.fp32_groups_has_gradients[i][j] for i, j in counted):
            return
        for i, j in sorted(self._dropped & set(counted)):
            # Up to 0.18 a norm of zero is an error, so nearly nothing stands in; the step leaves it alone, for it is frozen.
            self._optimizer.fp32_groups_gradients[i][j].fill_(STAND_IN)
            self._optimizer.fp32_groups_has_gradients[i][j] = True
            return

    @contextmanager
    def late_backward(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        # DeepSpeed adds what a backward left in ``grad`` to the buffer, of all parameters at once; here, of these alone.
        if not self._optimizer.immediate_grad_update:
            for parameter in parameters:
                parameter.grad = None
        yield
        if not self._optimizer.immediate_grad_update:
            for parameter in parameters:
                self._optimizer._update_hp_grad(parameter, *self._place[id(parameter)], clear_lp_grads=False)
                parameter.grad = None  # else the next whole backward would look at it too

    def finish(self) -> None:
        if self._dropped:
            self._dropped.clear()
            del self._optimizer.get_grads_for_reduction


def find_gradients(optimizer: Any) -> GradientStore:
    """The place that belongs to an engine's ``optimizer``."""
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return Bf16Gradients(optimizer)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return ZeroGradients(optimizer)
    return ParameterGradients(optimizer)


@torch.no_grad()
def settle_gradients(
    store: GradientStore, units: Sequence[FreezeUnit], live_counts: Sequence[int], num_micro_batches: int, rescale: bool
) -> list[Parameter]:
    """Finish the accumulated gradients of a step, before any reduction.

    A unit live in m of M micro-batches holds a sum over m terms, each already divided by M: times M / m it is their mean. A
    unit live in none is dropped.

    Returns:
        The parameters of the wholly frozen units.
    """
    wholly_frozen = []
    for unit, live in zip(units, live_counts, strict=True):
        if live == num_micro_batches:
            continue
        for parameter in unit.parameters:
            if live == 0:
                store.drop(parameter)
                wholly_frozen.append(parameter)
            elif rescale and (gradient := store.accumulated(parameter)) is not None:
                gradient.mul_(num_micro_batches / live)
    return wholly_frozen


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host, without a wait for what the device still has to do."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@torch.no_grad()
def unit_norms(
    store: GradientStore,
    units: Sequence[FreezeUnit],
    live_counts: Sequence[int],
    device: torch.device,
    loss_scale: float,
    sum_over_replicas: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """Norm of every unit's reduced gradient, [num_units] in fp32; NaN where a unit has none or was wholly frozen.

    Waits for no device.

    Collective over the replicas of the stage where the gradients are sharded: one sum of a short vector.
    """
    gradients = [
        [g for p in unit.parameters if (g := store.reduced(p)) is not None] if live else []
        for unit, live in zip(units, live_counts, strict=True)
    ]
    flat = [gradient for row in gradients for gradient in row]
    total = torch.zeros(len(units), device=device)
    if flat:
        squares = torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float32)).square()
        if any(len(row) > 1 for row in gradients):
            squares = torch.stack([part.sum() for part in squares.split([len(row) for row in gradients if row])])
        total[on_device([unit for unit, row in enumerate(gradients) if row], torch.long, device)] = squares
    # Whether there is a gradient is known here, without looking at the device: under ZeRO every live unit has one somewhere.
    known = [bool(live and (row or store.sharded)) for row, live in zip(gradients, live_counts, strict=True)]
    total = torch.where(on_device(known, torch.bool, device), total, torch.nan)
    if store.sharded:
        sum_over_replicas(total)
    return total.sqrt() / loss_scale
