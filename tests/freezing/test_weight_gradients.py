"""A backward in two against autograd's own: the same bits, and nothing left behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlfreeze_ds.errors import UnsupportedError
from rlfreeze_ds.freezing.weight_gradients import WeightGradients

STOCK = {name: getattr(functional, name) for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d")}
Model = Callable[[torch.Tensor], torch.Tensor]
Gradients = dict[str, torch.Tensor | None]


@pytest.fixture(autouse=True)
def _functions_are_put_back() -> Any:
    yield
    assert all(getattr(functional, name) is function for name, function in STOCK.items())


def gradients(model: nn.Module, x: torch.Tensor) -> Gradients:
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.to_dense() if gradient is not None else None for name, gradient in {"x": x.grad, **named}.items()}


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.long:
        return torch.randint(0, 11, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def output_gradient(y: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + seed)).to(y.dtype)


def compare(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, call: Model | None = None) -> list[int]:
    """Two micro-batches, whole and in two; all gradients must be the same bits. Returns the number of pairs that each kept."""
    call = call or model
    outputs, expected, kept = [], [], []
    for m in range(2):
        x = inputs(shape, dtype, m)
        y = call(x)
        y.backward(output_gradient(y, m))
        outputs.append(y.detach())
        expected.append({k: None if v is None else v.clone() for k, v in gradients(model, x).items()})
    model.zero_grad()
    split = WeightGradients(list(model.parameters()))
    for m in range(2):
        x = inputs(shape, dtype, m)
        with split.forward():
            y = call(x)
        assert torch.equal(y, outputs[m])
        with split.backward(m, []):
            y.backward(output_gradient(y, m))
        assert x.grad is None if expected[m]["x"] is None else torch.equal(x.grad, expected[m]["x"])
        kept.append(split.num_kept)
        waiting = {id(parameter) for parameter in split.waiting(m)}
        if m == 0:
            assert all(p.grad is None for p in model.parameters() if id(p) in waiting), "W was not left for later"
        split.run(m)
        assert split.num_kept == 0
        for name, gradient in gradients(model, x).items():
            assert (gradient is None) == (expected[m][name] is None), name
            assert gradient is None or torch.equal(gradient, expected[m][name]), f"micro-batch {m}, {name}"
            assert gradient is None or gradient.stride() == expected[m][name].stride(), name
    return kept


class Called(nn.Module):
    """Parameters, and what is done with them."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(7)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def shared(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(functional.linear(x, m.w, m.b))
    return x


def tied(m: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(torch.tanh(functional.embedding(x, m.w)), m.w)


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.relu(functional.linear(x, m.w, m.b), inplace=True) * 2


def lora(m: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, m.w.detach()) + functional.linear(functional.linear(x, m.a), m.b)


def transposed_output(m: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, m.w, m.b).transpose(-1, -2) * torch.arange(1.0, 6.0).reshape(5, 1)


def as_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ functional.linear(m.table, m.w).t()


LONG, FP32, BF16, FP64 = torch.long, torch.float32, torch.bfloat16, torch.float64
LIN = {"w": (5, 8), "b": (5,)}
# What is called, the shape of its input, the pairs that it keeps.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype, int]] = {
    "2-D": (lambda: nn.Linear(8, 5), (6, 8), FP32, 1),
    "3-D": (lambda: nn.Linear(8, 5), (3, 7, 8), FP32, 1),
    "4-D": (lambda: nn.Linear(8, 5), (2, 3, 7, 8), FP32, 1),
    "2-D without bias": (lambda: nn.Linear(8, 5, bias=False), (6, 8), FP32, 1),
    "3-D without bias": (lambda: nn.Linear(8, 5, bias=False), (3, 7, 8), FP32, 1),
    "large": (lambda: nn.Linear(192, 320), (4, 64, 192), FP32, 1),
    "large bf16": (lambda: nn.Linear(192, 320).bfloat16(), (4, 64, 192), BF16, 1),
    "bf16 2-D": (lambda: nn.Linear(8, 5).bfloat16(), (33, 8), BF16, 1),
    "fp64": (lambda: nn.Linear(8, 5).double(), (3, 7, 8), FP64, 1),
    "one row": (lambda: nn.Linear(8, 5), (1, 8), FP32, 1),
    "no row": (lambda: nn.Linear(8, 5), (0, 8), FP32, 1),
    "1-D: whole": (lambda: nn.Linear(8, 5), (8,), FP32, 0),
    "transposed input": (lambda: Called(lambda m, x: functional.linear(x.mT, m.w, m.b), **LIN), (3, 8, 7), FP32, 1),
    "transposed input without bias": (lambda: Called(lambda m, x: functional.linear(x.mT, m.w), w=(5, 8)), (3, 8, 7), FP32, 1),
    "column-major input": (lambda: Called(lambda m, x: functional.linear(x.t(), m.w), w=(5, 8)), (8, 7), FP32, 1),
    "large column-major": (lambda: Called(lambda m, x: functional.linear(x.t(), m.w), w=(320, 192)), (192, 256), FP32, 1),
    "transposed output": (lambda: Called(transposed_output, **LIN), (3, 7, 8), FP32, 1),
    "expanded gradient": (lambda: Called(lambda m, x: functional.linear(x, m.w).sum(0), w=(5, 8)), (3, 7, 8), FP32, 1),
    "computed bias": (lambda: Called(lambda m, x: functional.linear(x, m.w, 2 * m.b), **LIN), (6, 8), FP32, 1),
    "broadcast bias: whole": (lambda: Called(lambda m, x: functional.linear(x, m.w, m.b), w=(5, 8), b=(1,)), (6, 8), FP32, 0),
    "computed bias of conv1d: whole": (
        lambda: Called(lambda m, x: functional.conv1d(x, m.w, 2 * m.b), w=(5, 4, 3), b=(5,)), (2, 4, 9), FP32, 0,
    ),
    "view of a weight: whole": (lambda: Called(lambda m, x: functional.linear(x, m.w.t()), w=(8, 5)), (6, 8), FP32, 0),
    "column-major weight: whole": (lambda: Transposed(), (6, 8), FP32, 0),
    "matmul: whole": (lambda: Called(lambda m, x: x @ m.w, w=(8, 5)), (6, 8), FP32, 0),
    "by keywords": (lambda: Called(lambda m, x: functional.linear(bias=m.b, weight=m.w, input=x), **LIN), (6, 8), FP32, 1),
    "a weight used four times": (lambda: Called(shared, w=(8, 8), b=(8,)), (6, 8), FP32, 4),
    "tied embedding": (lambda: Called(tied, w=(11, 8)), (6, 4), LONG, 2),
    "then in place": (lambda: Called(in_place, **LIN), (6, 8), FP32, 1),
    "lora": (lambda: Called(lora, w=(5, 8), a=(2, 8), b=(5, 2)), (6, 8), FP32, 2),
    "a parameter as input": (lambda: Called(as_input, table=(5, 8), w=(8, 8)), (6, 8), FP32, 1),
    "embedding": (lambda: nn.Embedding(11, 8), (6, 4), LONG, 1),
    "embedding with padding": (lambda: nn.Embedding(11, 8, padding_idx=3), (6, 40), LONG, 1),
    "embedding, padding counted from the end": (
        lambda: Called(lambda m, x: functional.embedding(x, m.w, padding_idx=-2), w=(11, 8)), (6, 40), LONG, 1,
    ),
    "embedding by frequency": (lambda: nn.Embedding(11, 8, scale_grad_by_freq=True), (6, 40), LONG, 1),
    "sparse embedding: whole": (lambda: nn.Embedding(11, 8, sparse=True), (6, 4), LONG, 0),
    "embedding with max_norm: whole": (lambda: nn.Embedding(11, 8, max_norm=1.0), (6, 4), LONG, 0),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9), FP32, 1),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, dilation=2), (2, 4, 9, 9), FP32, 1),
    "conv2d without bias": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), bias=False), (2, 4, 9, 9), FP32, 1),
    "conv2d in groups": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 9, 9), FP32, 1),
    "conv2d bf16": (lambda: nn.Conv2d(4, 6, 3).bfloat16(), (2, 4, 9, 9), BF16, 1),
    "conv2d channels last": (lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (2, 4, 9, 9), FP32, 1),
    "large conv2d": (lambda: nn.Conv2d(32, 48, 3, padding=1), (17, 32, 28, 28), FP32, 1),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), FP32, 1),
    "conv2d, padding in words: whole": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 9), FP32, 0),
    "conv2d without a batch: whole": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9), FP32, 0),
    "self-attention": (lambda: SelfAttention(), (3, 7, 8), FP32, 2),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (3, 7, 8), FP32, 4),
    "encoder layer, norm first": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True), (3, 7, 8), FP32, 4),
    "convolutional net": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 5)),
        (2, 3, 8, 8), FP32, 2,
    ),
    "lstm: whole but for its head": (lambda: Recurrent(), (3, 7, 8), FP32, 1),
}  # fmt: skip


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.w)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_bits(name: str) -> None:
    make, shape, dtype, pairs = CASES[name]
    torch.manual_seed(3)
    assert compare(make(), shape, dtype) == [pairs, pairs]


@pytest.mark.parametrize("name", ["2-D", "3-D", "conv2d", "a weight used four times", "encoder layer"])
def test_an_input_without_gradient_leaves_nothing_but_w(name: str) -> None:
    make, shape, dtype, pairs = CASES[name]
    model = make()
    assert compare(model, shape, dtype, lambda x: model(x.detach())) == [pairs, pairs]


# -- what surrounds a call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_caught(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))

    def call(x: torch.Tensor) -> torch.Tensor:
        once = checkpoint(model[:2], x, use_reentrant=reentrant)
        return checkpoint(model[1:], checkpoint(model[:2], once, use_reentrant=reentrant), use_reentrant=reentrant)

    assert compare(model, (6, 8), FP32, call) == [3, 3]


def test_a_column_major_input_gets_a_column_major_gradient() -> None:
    """As autograd gives it: whoever comes next in the backward computes with it as it lies."""
    model = nn.Linear(8, 5)
    split = WeightGradients(list(model.parameters()))
    strides = []
    for catching in (nullcontext(), split.forward()):
        x = inputs((8, 6)).t()
        x.register_hook(lambda gradient: strides.append(gradient.stride()))
        with catching:
            y = model(x)
        with split.backward(0, []):
            y.square().sum().backward()
    assert strides == [(1, 6), (1, 6)]


def test_several_backwards_in_one_i_accumulate_one_by_one() -> None:
    """As DeepSpeed does with a stage of several outputs."""
    torch.manual_seed(3)
    model = Called(shared, w=(8, 8), b=(8,))
    x = inputs((6, 8))

    def backward(y: torch.Tensor) -> None:
        for part, retain in ((y.sin(), True), (y.cos(), True), (y, False)):
            part.backward(output_gradient(part, int(retain)), retain_graph=retain)

    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    backward(model(x))
    expected = gradients(model, x)
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    split = WeightGradients(list(model.parameters()))
    with split.forward():
        y = model(x)
    with split.backward(0, []):
        backward(y)
    split.run(0)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model, x).items())


def test_a_masked_parameter_is_never_kept_nor_given_a_gradient() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    split = WeightGradients(list(model.parameters()))
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    with split.forward():
        y = model(inputs((6, 8)))
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # the next micro-batch's mask
    with split.backward(0, []):
        y.sum().backward()
    kept = {id(parameter) for parameter in split.waiting(0)}
    assert kept == {id(model[0].weight), id(model[2].weight)} and split.num_kept == 2
    split.run(0)
    got = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert got == ["0.weight", "0.bias", "1.bias", "2.weight"]


def test_what_is_not_ours_or_needs_no_gradient_is_left_alone() -> None:
    ours, theirs = nn.Linear(8, 8), nn.Linear(8, 8)
    split = WeightGradients(list(ours.parameters()))
    x = inputs((6, 8))
    with split.forward():
        with torch.no_grad():
            assert not ours(x).requires_grad
        theirs(ours(x)).sum().backward  # noqa: B018
        theirs(x).sum().backward()  # a model that trains by itself within our forward
    assert theirs.weight.grad is not None
    assert split.num_kept == 0
    with split.forward(), torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    assert "Caught" not in type(y.grad_fn).__name__
    assert "Caught" not in type(ours(x).grad_fn).__name__, "caught outside of a forward"
    with split.forward():
        assert "Caught" in type(ours(x).grad_fn).__name__


def test_a_weight_whose_uses_are_caught_in_part_is_right_to_a_rounding() -> None:
    model = Called(lambda m, x: functional.linear(x, m.w) + x @ m.w.t(), w=(5, 8))
    x = inputs((6, 8))
    for m in range(2):
        y = model(x)
        y.backward(output_gradient(y, m))
    expected = model.w.grad.clone()
    model.zero_grad()
    split = WeightGradients([model.w])
    for m in range(2):
        with split.forward():
            y = model(x)
        with split.backward(m, []):
            y.backward(output_gradient(y, m))
        split.run(m)
    torch.testing.assert_close(model.w.grad, expected, rtol=1e-6, atol=1e-6)


def test_hooks_fire_once_a_micro_batch_and_in_w() -> None:
    model = Called(shared, w=(8, 8), b=(8,))
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired.append(name) or 2 * gradient)
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: fired.append(f"{name} accumulated"))
    split = WeightGradients(list(model.parameters()))
    with split.forward():
        y = model(inputs((6, 8)))
    with split.backward(0, []):
        y.sum().backward()
    assert fired == ["b", "b accumulated"]
    split.run(0)
    assert fired == ["b", "b accumulated", "w", "w accumulated"]
    doubled = model.w.grad.clone()
    model.w._backward_hooks.clear()
    model.zero_grad()
    model(inputs((6, 8))).sum().backward()
    assert torch.equal(doubled, 2 * model.w.grad)


def test_saved_tensor_hooks_see_what_is_saved_for_a_caught_call() -> None:
    model = nn.Linear(8, 5)
    split = WeightGradients(list(model.parameters()))
    x, packed = inputs((6, 8)), []
    with split.forward(), torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        y = model(x)
    assert [tensor.data_ptr() for tensor in packed] == [x.data_ptr(), model.weight.data_ptr()]
    with split.backward(0, []):
        y.sum().backward()
    split.run(0)
    assert torch.equal(model.weight.grad, torch.ones(6, 5).t() @ x)


def test_a_compiled_module_stays_whole_and_is_compiled_once() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph

    model = nn.Linear(8, 5)
    module = torch.compile(model, backend=backend)
    split = WeightGradients(list(model.parameters()))
    for m in range(4):
        x = inputs((6, 8), seed=m)
        model.zero_grad()
        with split.forward():
            y = module(x)
        with split.backward(m, []):
            y.sum().backward()
        assert split.num_kept == 0 and torch.equal(model.weight.grad, torch.ones(6, 5).t() @ x)
    assert len(compiled) == 1


def test_whoever_replaced_a_function_is_still_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's flops profiler does for the length of a forward, and others for good."""
    calls = []

    def wrap(name: str) -> Any:
        inner = functional.linear

        def linear(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(name)
            return inner(*args, **kwargs)

        return linear

    model = nn.Linear(8, 5)
    split = WeightGradients(list(model.parameters()))
    monkeypatch.setattr(functional, "linear", wrap("before"))
    with split.forward():
        ours = functional.linear
        functional.linear = wrap("within")
        assert "Caught" in type(model(inputs((6, 8))).grad_fn).__name__
        functional.linear = ours
    assert calls == ["within", "before"]
    with split.forward():
        functional.linear = wrap("for good")
    for _ in range(2):
        calls.clear()
        with split.forward():
            assert "Caught" in type(model(inputs((6, 8))).grad_fn).__name__
        assert "Caught" not in type(model(inputs((6, 8))).grad_fn).__name__
        assert calls == ["for good", "before"] * 2
    functional.linear = ours
    with split.forward():
        pass


# -- between I and W -----------------------------------------------------------------------------------------------------


def run_two(model: nn.Module, buffer: torch.Tensor | None, late: bool) -> Gradients:
    """Two micro-batches of one sample, whose output gradients are received in the same ``buffer``."""
    model.zero_grad()
    split = WeightGradients(list(model.parameters()))
    for m in range(2):
        with split.forward():
            y = model(inputs((1, 7, 8), seed=m))
        gradient = output_gradient(y, m)
        if buffer is not None:
            gradient = buffer.copy_(gradient)
        with split.backward(m, [] if buffer is None else [buffer]):
            y.backward(gradient)
        if not late:
            split.run(m)
    for m in range(2 * late):
        split.run(m)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_receive_buffer_may_be_written_to_before_w() -> None:
    model = nn.Linear(8, 5)
    early, late = (run_two(model, torch.empty(1, 7, 5), late) for late in (False, True))
    assert all(torch.equal(early[name], late[name]) for name in early)


def test_a_gradient_that_became_an_accumulator_is_copied() -> None:
    """With one sample the gradient of a position embedding is the very memory of the projection's output gradient, and the next
    micro-batch is added in it."""

    def embed(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.linear(x, m.w) + m.positions.unsqueeze(0))

    model = Called(embed, w=(5, 8), positions=(7, 5))
    early, late = (run_two(model, None, late) for late in (False, True))
    assert all(torch.equal(early[name], late[name]) for name in early)


def test_a_change_in_place_between_i_and_w_is_refused() -> None:
    model = nn.Linear(8, 5)
    split = WeightGradients(list(model.parameters()))
    x = inputs((6, 8))
    with split.forward():
        y = model(x)
    with split.backward(0, []):
        y.sum().backward()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(UnsupportedError, match=r"Linear with weight \[5, 8\] was modified in place"):
        split.run(0)
    assert split.num_kept == 0


def test_what_the_user_froze_meanwhile_gets_no_gradient() -> None:
    model = nn.Linear(8, 5)
    split = WeightGradients(list(model.parameters()))
    with split.forward():
        y = model(inputs((6, 8)))
    with split.backward(0, []):
        y.sum().backward()
    model.weight.requires_grad_(False)
    split.run(0)
    assert model.weight.grad is None and split.num_kept == 0


@pytest.mark.parametrize("inner", ["input's gradient", "training by itself", "gradient of a gradient"])
def test_another_backward_through_the_layers_is_refused(inner: str) -> None:
    model = nn.Linear(8, 5)
    split = WeightGradients(list(model.parameters()))
    x = inputs((6, 8))
    with split.forward():
        y = torch.tanh(model(x)).sum()
        with pytest.raises(UnsupportedError, match="create_graph" if inner.startswith("grad") else "torch.autograd.grad within"):
            if inner == "training by itself":
                y.backward()
            else:
                torch.autograd.grad(y, x, create_graph=inner.startswith("grad"))
    assert split.num_kept == 0 and model.weight.grad is None


def test_an_error_in_i_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))
    split = WeightGradients(list(model.parameters()))
    with split.forward():
        hidden = model[0](inputs((6, 8)))
        hidden.register_hook(lambda gradient: 1 / 0)
        y = model[1](hidden)
    with pytest.raises(ZeroDivisionError), split.backward(0, []):
        y.sum().backward()
    assert split.num_kept == 1
    split.clear()
    assert split.num_kept == 0
    with split.forward():
        y = model(inputs((6, 8)))
    with split.backward(0, []):
        y.sum().backward()
    split.run(0)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("checkpointed", [False, True])
def test_w_lets_go_of_each_pair_once_it_is_used(checkpointed: bool) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    split = WeightGradients(list(model.parameters()))
    x = inputs((6, 8))
    with split.forward():
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True) if checkpointed else layer(x)
    with split.backward(0, []):
        x.square().sum().backward()
    del x
    kept = [weakref.ref(pair) for pair in split._kept[0]]
    alive: list[int] = []
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda _: alive.append(sum(ref() is not None for ref in kept)))
    split.run(0)
    assert alive == [3, 2, 1, 0]
