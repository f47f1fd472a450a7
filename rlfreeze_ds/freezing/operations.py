"""The operations whose weight gradient can wait: how each gets its input's gradient at once, and its parameters' later.

Both are computed as autograd computes them, so that they are the same bits (read in torch's ``derivatives.yaml`` and
``FunctionsManual.cpp``, tried on 2.13): a matrix product by the same operands in the same layout, or the same ATen function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Parameter = torch.nn.Parameter


class Operation(Protocol):
    """One call of a function on parameters. ``parameters``: those whose gradient may wait. ``bias``: one whose gradient, if it
    needs any, comes with the input's."""

    parameters: tuple[Parameter, ...]
    bias: Tensor | None

    def output(self, x: Tensor) -> Tensor:
        """What the caught function returns, to the bit."""

    def saved_weight(self) -> Tensor | None:
        """What the input's gradient needs besides the output's."""

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Of ``x``, whose shape it has."""

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Of ``bias``."""

    def weight_gradients(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """One per parameter."""


class Linear:
    """``linear(x, weight, bias)`` with x [..., in], weight [out, in], bias [out].

    The bias does not wait: cheap, and where its weight is masked for some micro-batches and not for others it would be added up
    in another order.
    """

    def __init__(self, stock: Callable[..., Tensor], weight: Parameter, bias: Tensor | None) -> None:
        self._stock, self._weight, self.bias = stock, weight, bias
        self.parameters = (weight,)

    def output(self, x: Tensor) -> Tensor:
        return self._stock(x, self._weight, self.bias)

    def saved_weight(self) -> Tensor:
        return self._weight

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.size(0):
            # For a column-major matrix autograd computes the transposed gradient.
            return weight.t().mm(gradient.t()).t()
        return gradient.reshape(-1, weight.size(0)).mm(weight).view(x.shape)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, gradient.size(-1)).sum(0)

    def weight_gradients(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (gradient.reshape(-1, gradient.size(-1)).t().mm(x.reshape(-1, x.size(-1))),)


class Embedding:
    """``embedding(indices, weight)`` with a dense gradient."""

    bias = None

    def __init__(
        self, stock: Callable[..., Tensor], weight: Parameter, padding_idx: int | None, scale_grad_by_freq: bool
    ) -> None:
        self._stock, self._weight = stock, weight
        self._padding_idx, self._scale_grad_by_freq = padding_idx, scale_grad_by_freq
        self.parameters = (weight,)

    def output(self, x: Tensor) -> Tensor:
        return self._stock(x, self._weight, self._padding_idx, scale_grad_by_freq=self._scale_grad_by_freq)

    def saved_weight(self) -> None:
        return None

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        raise AssertionError("there is no bias")

    def weight_gradients(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        rows = self._weight.size(0)
        # As in embedding(): a negative index counts from the end, and ATen knows "none" as -1.
        padding_idx = -1 if self._padding_idx is None else self._padding_idx % rows
        of_weight = torch.ops.aten.embedding_dense_backward(gradient, x, rows, padding_idx, self._scale_grad_by_freq)
        return (of_weight,)


class Convolution:
    """``conv1d``, ``conv2d`` or ``conv3d`` on a batch. A live bias waits with its weight: some backends compute the two together,
    even where only the bias is asked for."""

    bias = None

    def __init__(
        self,
        stock: Callable[..., Tensor],
        weight: Parameter,
        bias: Tensor | None,
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        groups: int,
    ) -> None:
        self._stock, self._weight, self._bias = stock, weight, bias
        self._with_bias = bias is not None and bias.requires_grad
        self.parameters = (weight, bias) if self._with_bias else (weight,)
        self._geometry = (stride, padding, dilation, groups)

    def output(self, x: Tensor) -> Tensor:
        # Some backends are for inference only, and chosen where no gradient is recorded.
        with torch.enable_grad():
            return self._stock(x, self._weight, self._bias, *self._geometry).detach()

    def saved_weight(self) -> Tensor:
        return self._weight

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, x, weight, [True, False, False])[0]

    def weight_gradients(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        _, of_weight, of_bias = self._backward(gradient, x, self._weight, [False, True, self._with_bias])
        return (of_weight, of_bias) if self._with_bias else (of_weight,)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        raise AssertionError("the bias waits with its weight")

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Any, Any, Any]:
        num_dims = x.dim() - 2
        stride, padding, dilation, groups = self._geometry
        lists = [[n] * num_dims if isinstance(n, int) else list(n) for n in (stride, padding, dilation)]
        sizes = None if self._bias is None else list(self._bias.shape)
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, sizes, *(n * num_dims if len(n) == 1 else n for n in lists),
            False, [0] * num_dims, groups, wanted,
        )  # fmt: skip
