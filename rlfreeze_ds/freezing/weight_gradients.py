"""The backward of a micro-batch in two: the input's gradient at once (I), the gradients of the weights when asked for (W).

While a forward runs, the functions of ``torch.nn.functional`` that are caught are replaced by ones that record the same result
with another backward: it returns the input's gradient and keeps the pair (input, output gradient) for W. What is not caught
(biases, norms, weights through views, other functions, anything under autocast or ``torch.compile``) has its whole backward
in I, which is always right.

W is a small backward of its own, so that autograd accumulates, and hooks fire, as they would have in the whole one.

Replaced by name, rather than seen by a ``TorchFunctionMode``: such a mode is blind within ``multi_head_attention_forward``
and the like, is in the way of fused inference paths, and costs every call of every function (1.3 % of a small GPT block).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlfreeze_ds.errors import UnsupportedError
from rlfreeze_ds.freezing.operations import Convolution, Embedding, Linear, Operation

Parameter = torch.nn.Parameter


@dataclass
class KeptPair:
    """What W needs of one caught call. ``backward_id`` tells apart the backwards that an I consists of (several outputs,
    reentrant checkpoints): autograd adds up each by itself before it accumulates."""

    operation: Operation
    x: Tensor
    gradient: Tensor
    backward_id: int
    versions: tuple[int, int]

    def weight_gradients(self) -> tuple[Tensor, ...]:
        if (self.x._version, self.gradient._version) != self.versions:
            raise UnsupportedError(
                f"split backward: the input or the output gradient of a {type(self.operation).__name__} with weight "
                f"{list(self.operation.parameters[0].shape)} was modified in place between its I and its W. Give it a copy."
            )
        return self.operation.weight_gradients(self.gradient, self.x)


class WeightGradients:
    """Of one engine.

    Args:
        parameters: whose gradient may wait. A model of somebody else's, such as a discriminator that the loss trains by
            itself, is never touched.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in parameters}
        self._kept: dict[int, list[KeptPair]] = {}
        self._backward_of: int | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    # -- the three instructions ---------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Catch what is called within the block."""
        with _replaced_by(self):
            yield

    @contextmanager
    def backward(self, micro_batch_id: int, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Keep, within the block, the pairs of ``micro_batch_id``; catch what checkpoints compute again.

        Args:
            buffers: that are written to again before its W, such as the one that gradients are received in.
        """
        self._backward_of = micro_batch_id
        without = [parameter for parameter in self._parameters if parameter.grad is None]
        try:
            with self.forward():
                yield
        finally:
            self._backward_of = None
        # Autograd may pass its own tensor on to a parameter that has no gradient yet; to another it adds.
        first = [parameter.grad for parameter in without if parameter.grad is not None]
        self._copy_shared(self._kept.get(micro_batch_id, ()), [*buffers, *first])

    def waiting(self, micro_batch_id: int) -> list[Parameter]:
        """The parameters that the W of ``micro_batch_id`` gives a gradient."""
        pairs = self._kept.get(micro_batch_id, ())
        return list({id(parameter): parameter for pair in pairs for parameter in pair.operation.parameters}.values())

    def run(self, micro_batch_id: int) -> None:
        """W: accumulate what was kept of ``micro_batch_id``."""
        kept = self._kept.pop(micro_batch_id, [])
        while kept:
            pairs = list(takewhile(lambda pair: pair.backward_id == kept[0].backward_id, kept))
            del kept[: len(pairs)]
            # Autograd takes the youngest node first: made last to first, they run as in the whole backward, so that the terms
            # of a weight that was used twice are added in the same order. Each lets go of its pair: nothing else holds it.
            with torch.enable_grad():
                ends, held = [], []
                while pairs:
                    parameters = pairs[-1].operation.parameters
                    held.append([pairs.pop()])
                    ends.append(_Weights.apply(held[-1], *parameters))
            ends = [end for end in ends if end.requires_grad]  # else the user froze it meanwhile
            if ends:
                blank = {end.dtype: end for end in ends}  # a value that nobody looks at
                blank = {dtype: end.detach() for dtype, end in blank.items()}
                try:
                    torch.autograd.backward(ends, [blank[end.dtype] for end in ends])
                finally:
                    for pair in held:  # after an error autograd keeps nodes until its next backward
                        pair.clear()

    def clear(self) -> None:
        """The batch is over, or ended with an error: nothing is kept."""
        self._kept.clear()

    @property
    def num_kept(self) -> int:
        """Pairs that wait for their W."""
        return sum(map(len, self._kept.values()))

    def kept(self, micro_batch_id: int | None = None) -> Iterator[Tensor]:
        """The inputs and output gradients of these pairs; of one micro-batch, or of all."""
        pairs = chain.from_iterable(self._kept.values()) if micro_batch_id is None else self._kept.get(micro_batch_id, ())
        for pair in pairs:
            yield pair.x
            yield pair.gradient

    # -- catching -----------------------------------------------------------------------------------------------------

    def catches(self, x: Any, weight: Any) -> bool:
        """Whether a call's gradients may wait: on a live parameter of ours, and nothing about it is out of the ordinary."""
        return (
            id(weight) in self._ids
            and weight.requires_grad
            and torch.is_grad_enabled()
            and type(x) in (Tensor, Parameter)
            and not weight.is_complex()
            and not torch.is_autocast_enabled(x.device.type)
            and not torch._C._are_functorch_transforms_active()
        )

    def record(self, operation: Operation, x: Tensor) -> Tensor:
        """The operation's result, with a backward in two."""
        # Not the parameters themselves: their hooks would fire in I, with no gradient. Yet the result must need one.
        anchor = None if x.requires_grad else self._anchor
        return _Caught.apply(x, operation.bias, anchor, operation, self)

    def keep(self, operation: Operation, x: Tensor, gradient: Tensor) -> None:
        """From the backward of a caught call."""
        if self._backward_of is None:
            raise UnsupportedError(
                "split backward: a backward through the layers of a stage outside of its backward instruction, such as "
                "torch.autograd.grad within a forward. Its weight gradients would be mixed up with the training loss's. Detach "
                "what it starts from, or leave the backward whole."
            )
        x = x.detach()  # else its graph stays, and what is at the end of that: the input that the stage received
        pair = KeptPair(operation, x, gradient, torch._C._current_graph_task_id(), (x._version, gradient._version))
        self._kept.setdefault(self._backward_of, []).append(pair)

    def _copy_shared(self, pairs: Sequence[KeptPair], others: Sequence[Tensor]) -> None:
        """Copy the gradients whose memory somebody else will write to: a buffer, or what a parameter accumulates in."""
        shared = {tensor.untyped_storage().data_ptr() for tensor in others if tensor.layout == torch.strided}
        if not shared:
            return
        for pair in pairs:
            if pair.gradient.untyped_storage().data_ptr() in shared:
                pair.gradient = pair.gradient.clone()
                pair.versions = (pair.versions[0], pair.gradient._version)


class _Caught(torch.autograd.Function):
    """A call whose backward gives the input's gradient and keeps the rest."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor | None, operation: Operation, owner: WeightGradients
    ) -> Tensor:
        ctx.operation, ctx.owner = operation, owner
        ctx.set_materialize_grads(False)
        # Saved as autograd would: seen by saved-tensor hooks, checked for changes in place.
        ctx.save_for_backward(x, operation.saved_weight() if x.requires_grad else None)
        return operation.output(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "split backward: a gradient of a gradient (create_graph=True) through the layers of a stage. Leave the backward "
                "whole."
            )
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        ctx.owner.keep(ctx.operation, x, gradient)
        of_input = ctx.operation.input_gradient(gradient, x, weight) if ctx.needs_input_grad[0] else None
        of_bias = ctx.operation.bias_gradient(gradient) if ctx.needs_input_grad[1] else None
        return of_input, of_bias, None, None, None


class _Weights(torch.autograd.Function):
    """A node whose backward gives the parameters of a kept pair their gradients, and lets go of the pair."""

    @staticmethod
    def forward(ctx: Any, pair: list[KeptPair], *parameters: Parameter) -> Tensor:
        ctx.pair = pair
        return parameters[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.pair.pop().weight_gradients()


# -- in place of torch.nn.functional's ------------------------------------------------------------------------------------
# These are always the same objects: torch.compile compiles anew for every other one that it meets.

_stock: dict[str, Callable[..., Tensor]] = {}
_wrapped: set[str] = set()
"""Names that somebody replaced meanwhile for good; what he put there calls ours."""
_catcher: WeightGradients | None = None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    stock = _stock["linear"]
    if (
        torch.compiler.is_compiling() or _catcher is None or not _catcher.catches(input, weight)
        or input.dim() < 2 or not weight.is_contiguous() or not (bias is None or bias.shape == weight.shape[:1])
    ):  # fmt: skip
        return stock(input, weight, bias)
    return _catcher.record(Linear(stock, weight, bias), input)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    stock = _stock["embedding"]
    if (
        torch.compiler.is_compiling() or _catcher is None or not _catcher.catches(input, weight)
        or sparse or max_norm is not None
    ):  # fmt: skip
        return stock(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _catcher.record(Embedding(stock, weight, padding_idx, scale_grad_by_freq), input)


def _convolution(name: str) -> Callable[..., Tensor]:
    num_dims = int(name[-2])

    def convolution(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:  # fmt: skip
        stock = _stock[name]
        if (
            torch.compiler.is_compiling() or _catcher is None or not _catcher.catches(input, weight)
            or isinstance(padding, str) or input.dim() != num_dims + 2
            or not (bias is None or not bias.requires_grad or _catcher.catches(input, bias))
        ):  # fmt: skip
            return stock(input, weight, bias, stride, padding, dilation, groups)
        return _catcher.record(Convolution(stock, weight, bias, stride, padding, dilation, groups), input)

    return convolution


_REPLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "embedding": _embedding,
    **{name: _convolution(name) for name in ("conv1d", "conv2d", "conv3d")},
}


@contextmanager
def _replaced_by(catcher: WeightGradients) -> Iterator[None]:
    """Within the block calls by name go to ``catcher``. Whoever replaced a function before us is still called, by us."""
    global _catcher
    outer = _catcher
    for name, replacement in _REPLACEMENTS.items():
        present = getattr(functional, name)
        if present is replacement:
            _wrapped.discard(name)
        elif name not in _wrapped:
            _stock[name] = present
            setattr(functional, name, replacement)
    _catcher = catcher
    try:
        yield
    finally:
        _catcher = outer
        if outer is None:
            for name, replacement in _REPLACEMENTS.items():
                if getattr(functional, name) is replacement:
                    setattr(functional, name, _stock[name])
                else:
                    _wrapped.add(name)
