"""A step that leaves wholly frozen parameters, their fp32 masters and their optimizer state untouched, mode by mode.

fp32 without ZeRO: the optimizer works on the parameters themselves and skips one whose gradient is None, with its weight
decay and momentum. Only DeepSpeed's FusedAdam needs help there (:class:`GroupStepCount`).

ZeRO-1 and bf16: the optimizer works on one flat fp32 tensor per parameter group, where a zero gradient still moves weights
and moments. For the length of its ``step`` it is given views of the live segments instead (:class:`LiveViews`), so the
frozen share costs neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rlfreeze_ds.errors import UnsupportedError

# Each element's update depends on that element's gradient and state alone, so a flat tensor may be cut anywhere.
_ELEMENTWISE_TORCH: tuple[type, ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)
_ELEMENTWISE_DEEPSPEED = ("FusedAdam", "DeepSpeedCPUAdam")

# Vectorised kernels treat the last few elements of a tensor differently from the others, by a rounding: a cut elsewhere than
# at a multiple of this would move elements between the two.
ALIGNMENT = 16


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer whose step could touch a parameter that is frozen.

    Args:
        optimizer: the innermost one, that holds the moments.

    Raises:
        UnsupportedError
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE_TORCH or (kind.__module__.startswith("deepspeed.") and kind.__name__ in _ELEMENTWISE_DEEPSPEED):
        return
    raise _unsupported(f"{kind.__module__}.{kind.__name__}")


def check_optimizer_config(name: str | None) -> None:
    """The part of :func:`check_optimizer` that needs no optimizer: DeepSpeed compiles some of its own for most of a minute.

    Args:
        name: ``optimizer.type`` of the DeepSpeed config.

    Raises:
        UnsupportedError
    """
    known = {kind.__name__.lower() for kind in _ELEMENTWISE_TORCH}
    if name is not None and name.lower() not in known:
        raise _unsupported(f'"{name}"')


def _unsupported(optimizer: str) -> UnsupportedError:
    allowed = ", ".join([*(kind.__name__ for kind in _ELEMENTWISE_TORCH), *_ELEMENTWISE_DEEPSPEED])
    return UnsupportedError(
        f"optimizer {optimizer}: frozen parameters are left exactly alone only by optimizers that treat every element by itself, "
        f'and that were tried: {allowed}. Use one of them, such as "AdamW", or disable "rlfreeze".'
    )


def _register(optimizer: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Innermost, so that a user's own hooks never see an optimizer that is not whole."""
    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(after)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


class GroupStepCount:
    """FusedAdam without ZeRO counts steps on the last live parameter of a group, and for all of them. The count must go on
    whichever that is: before the step it is carried there, afterwards back to the last one of the group."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        _register(optimizer, self._carry, self._bring_back)
        self._carried: list[tuple[dict[str, Any], Any, torch.Tensor, Any, int]] = []

    def freeze(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to do: what is frozen has no gradient."""

    def finish(self) -> None:
        """Also after a step that failed half-way."""
        self._carried.clear()

    def _carry(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            live = [parameter for parameter in group["params"] if parameter.grad is not None]
            counts = [state["step"] for p in group["params"] if (state := optimizer.state.get(p))]
            if not live or not counts:
                continue
            carrier, count = optimizer.state[live[-1]], max(counts)
            self._carried.append((group, group.get("step"), live[-1], carrier.get("step", 0), count))
            group["step"] = count  # what a parameter without state begins with
            if carrier:
                carrier["step"] = count

    def _bring_back(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, group_step, carrier, before, count in self._carried:
            group["step"] = 0 if group_step is None else group_step
            last = optimizer.state.get(group["params"][-1])
            if last and carrier is not group["params"][-1]:
                optimizer.state[carrier]["step"] = before
                last["step"] = count + 1
        self._carried.clear()


class LiveViews:
    """Hooks on the inner optimizer of ZeRO-1 or ``BF16_Optimizer``.

    Args:
        optimizer: the inner optimizer; each of its groups holds one flat fp32 tensor, this rank's partition.
        flats: those tensors by parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._flats = flats
        self._frozen: list[list[tuple[int, int]]] = [[] for _ in flats]
        self._narrowed: list[_Narrowed] = []
        _register(optimizer, self._narrow, self._widen)

    def freeze(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """What the next step leaves alone. Where a parameter lies is DeepSpeed's own record, ``_hp_mapping``."""
        self._frozen = [[] for _ in self._flats]
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:  # else another rank has all of it
                address = mapping.hp_fragment_address
                self._frozen[mapping.param_group_index].append((address.start, address.start + address.numel))

    def finish(self) -> None:
        """Also after a step that failed half-way."""
        self._widen(self._optimizer)
        self._frozen = [[] for _ in self._flats]

    def _narrow(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # ZeRO calls step once per group, with that group alone.
        for group in optimizer.param_groups:
            (flat,) = group["params"]
            frozen = next(f for candidate, f in zip(self._flats, self._frozen, strict=True) if candidate is flat)
            if frozen and flat.grad is not None:
                self._narrowed.append(_Narrowed(optimizer, group, flat, frozen))

    def _widen(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        while self._narrowed:
            self._narrowed.pop().widen(optimizer)


class _Narrowed:
    """One parameter group that holds views of the live segments of its flat tensor, state included."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        flat: torch.Tensor,
        frozen: Sequence[tuple[int, int]],
    ) -> None:
        self._group, self._flat = group, flat
        segments, fringe = live_segments(frozen, flat.numel())
        state = optimizer.state.get(flat, {})
        self._views: list[tuple[int, int, torch.Tensor]] = []
        for start, end in segments:
            view = flat.data[start:end]
            view.grad = flat.grad[start:end]
            if state:
                optimizer.state[view] = {
                    key: value[start:end] if self._is_flat(value) else _copy(value) for key, value in state.items()
                }
            self._views.append((start, end, view))
        self._fringe = [
            (tensor[start:end], tensor[start:end].clone())
            for tensor in [flat.data, *(value for value in state.values() if self._is_flat(value))]
            for start, end in fringe
        ]
        self._new_state_fringe = fringe if not state else []
        group["params"] = [view for _, _, view in self._views]

    def _is_flat(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.shape == self._flat.shape

    def widen(self, optimizer: torch.optim.Optimizer) -> None:
        """The flat tensor again, with what the step did to the views."""
        self._group["params"] = [self._flat]
        states = [(start, end, optimizer.state.pop(view, {})) for start, end, view in self._views]
        state = optimizer.state[self._flat]
        for start, end, part in states:
            for key, value in part.items():
                if torch.is_tensor(value) and value.shape == (end - start,):
                    if state.get(key) is None:  # the very first step: what was frozen begins at zero
                        state[key] = torch.zeros_like(self._flat, dtype=value.dtype)
                    if state[key].data_ptr() + start * value.element_size() != value.data_ptr():
                        state[key][start:end] = value
                else:
                    state[key] = value  # a count: the same for all, and of FusedAdam's views only the last one's goes on
        for now, before in self._fringe:
            now.copy_(before)
        for start, end in self._new_state_fringe:
            for value in state.values():
                if self._is_flat(value):
                    value[start:end] = 0


def live_segments(
    frozen: Sequence[tuple[int, int]], size: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What is left of ``[0, size)``, rounded outward to :data:`ALIGNMENT`, and the frozen elements that the rounding took in.

    Never without a segment: an empty one stands where everything is frozen, so that steps are still counted.
    """
    segments: list[list[int]] = []
    at = 0
    for start, end in [*sorted(frozen), (size, size)]:
        if start > at:
            low, high = at // ALIGNMENT * ALIGNMENT, min(size, -(-start // ALIGNMENT) * ALIGNMENT)
            if segments and low <= segments[-1][1]:
                segments[-1][1] = high
            else:
                segments.append([low, high])
        at = max(at, end)
    fringe = [
        (max(start, low), min(end, high))
        for low, high in segments
        for start, end in sorted(frozen)
        if max(start, low) < min(end, high)
    ]
    return [(low, high) for low, high in segments] or [(0, 0)], fringe


def _copy(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def find_step_hooks(optimizer: Any) -> LiveViews | GroupStepCount | None:
    """What an engine's ``optimizer`` needs so that its step leaves frozen parameters alone."""
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name) and isinstance(optimizer.optimizer, torch.optim.Optimizer):
            return LiveViews(optimizer.optimizer, getattr(optimizer, name))
    return GroupStepCount(optimizer) if type(optimizer).__name__ == "FusedAdam" else None
