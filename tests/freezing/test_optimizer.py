"""A step over the live views of a flat tensor, against the whole step with the frozen elements put back afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlfreeze_ds.errors import UnsupportedError
from rlfreeze_ds.freezing.optimizer import (
    ALIGNMENT,
    GroupStepCount,
    LiveViews,
    check_optimizer,
    check_optimizer_config,
    live_segments,
)

SIZE = 1003
STEPS = 6


def fused_adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(parameters, lr=0.1, weight_decay=0.1)


def cpu_adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, lr=0.1, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "FusedAdam": fused_adam,
    "DeepSpeedCPUAdam": cpu_adam,
}


@dataclass
class Address:
    """As DeepSpeed's."""

    start: int
    numel: int


class Piece:
    """A parameter with DeepSpeed's record of where it lies in the flat tensor."""

    def __init__(self, start: int, end: int) -> None:
        self._hp_mapping = self
        self.param_group_index = 0
        self.hp_fragment_address = Address(start, end - start)


def frozen_pieces(rng: random.Random, step: int) -> list[tuple[int, int]]:
    if step == 3:
        return [(0, SIZE)]
    cuts = sorted(rng.sample(range(SIZE + 1), 12))
    return [piece for piece in itertools.pairwise(cuts) if rng.random() < 0.5]


def moments(optimizer: torch.optim.Optimizer, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in optimizer.state.get(flat, {}).items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            yield key, value


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first_step_frozen", [False, True])
def test_live_elements_step_as_in_the_whole_and_frozen_ones_do_not_move(name: str, first_step_frozen: bool) -> None:
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(SIZE, generator=generator)
    flat, whole = (start.clone().requires_grad_() for _ in range(2))
    optimizer, reference = OPTIMIZERS[name]([flat]), OPTIMIZERS[name]([whole])
    views = LiveViews(optimizer, [flat])
    for step in range(STEPS):
        frozen = frozen_pieces(rng, step) if step or first_step_frozen else []
        live = torch.ones(SIZE, dtype=torch.bool)
        for begin, end in frozen:
            live[begin:end] = False
        gradient = torch.randn(SIZE, generator=generator) * live
        before = whole.detach().clone()
        before_state = {key: value.clone() for key, value in moments(reference, whole)}
        flat.grad, whole.grad = gradient.clone(), gradient.clone()
        reference.step()
        with torch.no_grad():
            whole.copy_(torch.where(live, whole, before))
            for key, value in moments(reference, whole):
                value.copy_(torch.where(live, value, before_state.get(key, torch.zeros(SIZE))))
        views.freeze([Piece(begin, end) for begin, end in frozen])  # type: ignore[list-item]
        optimizer.step()
        views.finish()
        assert torch.equal(flat, whole), f"step {step}"
        assert optimizer.param_groups[0]["params"][0] is flat
        assert set(optimizer.state) <= {flat}  # plain SGD has none
        expected = dict(moments(reference, whole))
        assert dict(moments(optimizer, flat)).keys() == expected.keys()
        for key, value in moments(optimizer, flat):
            assert torch.equal(value, expected[key]), f"step {step}, {key}"
        counts = [state.get("step") for state in (optimizer.state.get(flat, {}), reference.state.get(whole, {}))]
        assert counts[0] is None or float(counts[0]) == float(counts[1]) == step + 1


def test_no_memory_is_taken_for_what_is_frozen() -> None:
    size = 1 << 20
    flat = torch.randn(size).requires_grad_()
    optimizer = torch.optim.AdamW([flat], foreach=False)
    views = LiveViews(optimizer, [flat])
    flat.grad = torch.randn(size)
    optimizer.step()
    taken: list[int] = []

    def look(optimizer: Any, *_: Any) -> None:
        storages = {id(flat.untyped_storage()): 0}
        for view in optimizer.param_groups[0]["params"]:
            for tensor in (view, view.grad, *optimizer.state[view].values()):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        owned = {t.untyped_storage().data_ptr() for t in (flat, flat.grad, *optimizer.state[flat].values())}
        taken.append(sum(n for pointer, n in storages.items() if pointer not in owned))
        taken.append(sum(t.nbytes for narrowed in views._narrowed for _, t in narrowed._fringe))

    optimizer.register_step_pre_hook(look)
    views.freeze([Piece(1000, 300_001), Piece(400_003, 900_007)])  # type: ignore[list-item]
    optimizer.step()
    assert sum(taken) <= 4096  # step counts, and at most 2 x 15 elements at either end of a live segment


def test_a_step_that_fails_leaves_the_optimizer_whole() -> None:
    flat = torch.randn(64).requires_grad_()
    optimizer = torch.optim.AdamW([flat])
    views = LiveViews(optimizer, [flat])
    flat.grad = torch.randn(64)
    optimizer.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = optimizer.register_step_pre_hook(fail)
    views.freeze([Piece(0, 32)])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    views.finish()
    handle.remove()
    assert optimizer.param_groups[0]["params"][0] is flat and set(optimizer.state) == {flat}


def test_a_users_own_hooks_see_the_whole_optimizer() -> None:
    flat = torch.randn(64).requires_grad_()
    optimizer = torch.optim.AdamW([flat])
    seen = []

    def look(optimizer: Any, *_: Any) -> None:
        seen.append([len(p) for p in optimizer.param_groups[0]["params"]] + [len(optimizer.state[flat].get("exp_avg", []))])

    optimizer.register_step_post_hook(look)
    views = LiveViews(optimizer, [flat])
    for _ in range(2):
        flat.grad = torch.randn(64)
        views.freeze([Piece(16, 48)])  # type: ignore[list-item]
        optimizer.step()
    assert seen == [[64, 64]] * 2


@pytest.mark.parametrize("seed", range(20))
def test_segments_cover_what_is_live_and_name_the_frozen_elements_they_took_in(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 15, 16, 17, 200])
    cuts = sorted(rng.randrange(size + 1) for _ in range(10))
    frozen = [piece for piece in itertools.pairwise(cuts) if piece[0] < piece[1] and rng.random() < 0.6]
    rng.shuffle(frozen)
    segments, fringe = live_segments(frozen, size)
    is_frozen = [any(start <= i < end for start, end in frozen) for i in range(size)]
    inside = [any(start <= i < end for start, end in segments) for i in range(size)]
    named = [any(start <= i < end for start, end in fringe) for i in range(size)]
    for i in range(size):
        assert inside[i] or is_frozen[i]
        assert named[i] == (inside[i] and is_frozen[i])
    assert all(start % ALIGNMENT == 0 and (end % ALIGNMENT == 0 or end == size) for start, end in segments)
    assert segments == sorted(segments) and all(a[1] < b[0] for a, b in itertools.pairwise(segments))
    assert segments


@pytest.mark.parametrize("masks", ["last frozen", "first frozen", "changing", "last frozen from the start"])
def test_fused_adam_counts_on_whichever_parameter_is_frozen(masks: str) -> None:
    """Against one FusedAdam per parameter, where no count can go astray; each counts the steps of the group."""
    from deepspeed.ops.adam import FusedAdam

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(32, generator=generator) for _ in range(3)]
    parameters = [p.clone().requires_grad_() for p in start]
    alone = [p.clone().requires_grad_() for p in start]
    optimizer = FusedAdam(parameters, lr=0.1)
    hooks = GroupStepCount(optimizer)
    singles = [FusedAdam([p], lr=0.1) for p in alone]
    frozen = {
        "last frozen": [set(), {2}, {2}, set(), set()],
        "first frozen": [set(), {0}, {0}, set(), set()],
        "changing": [{0}, {1, 2}, {0, 2}, {1}, set()],
        "last frozen from the start": [{2}, {2}, {1}, set(), set()],
    }[masks]
    for step, out in enumerate(frozen):
        gradients = [torch.randn(32, generator=generator) for _ in parameters]
        for index, (p, q) in enumerate(zip(parameters, alone, strict=True)):
            p.grad = None if index in out else gradients[index].clone()
            q.grad = None if index in out else gradients[index].clone()
            state = singles[index].state[q]
            if state:
                state["step"] = step
            singles[index].param_groups[0]["step"] = step
        optimizer.step()
        hooks.finish()
        for single in singles:
            single.step()
        for index, (p, q) in enumerate(zip(parameters, alone, strict=True)):
            assert torch.equal(p, q), (step, index)


class Lamb(torch.optim.Adam):
    """Stands for an optimizer of a name that nobody tried."""


def test_an_optimizer_that_was_not_tried_is_refused_by_name() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    for refused in (Lamb([parameter]), torch.optim.Rprop([parameter])):
        with pytest.raises(UnsupportedError, match=f"{type(refused).__name__}.*AdamW"):
            check_optimizer(refused)
    for name in ("Lamb", "OneBitAdam", "Muon"):
        with pytest.raises(UnsupportedError, match=f'"{name}".*AdamW'):
            check_optimizer_config(name)
    for name in ("Adam", "adamw", "SGD", None):
        check_optimizer_config(name)
