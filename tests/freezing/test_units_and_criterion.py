"""Units, their shares and prefixes; the criterion against its formula written out."""

from __future__ import annotations

import math

import pytest
import torch

from rlfreeze_ds.freezing.criterion import MixedCriterion, eligible_units
from rlfreeze_ds.freezing.gradients import ParameterGradients, settle_gradients, unit_norms
from rlfreeze_ds.freezing.units import find_units, shape_of


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def test_layers_exclusions_and_prefix_shares() -> None:
    units, barrier = find_units(model().named_parameters(), "layer", ["1.bias"])
    shape = shape_of(0, units, barrier)
    assert shape.names == ("0", "1", "2") and shape.starts == (0, 2, 4) and barrier == 3
    total = 16 + 16 + 10
    assert shape.weights == pytest.approx((16 / total, 16 / total, 10 / total))
    assert shape.share((0, 2)) == pytest.approx(26 / total)
    # The excluded 1.bias lies before layer 2, so no prefix reaches that.
    assert shape.prefix_share((0, 1, 2)) == pytest.approx(32 / total)
    assert shape.prefix_share((1, 2)) == 0.0 and shape.prefix_share((0, 2)) == pytest.approx(16 / total)


def test_criterion_equals_its_formula_and_ignores_missing_and_infinite_gradients() -> None:
    net, ema = model(), 0.8
    store = ParameterGradients(torch.optim.SGD(net.parameters(), lr=1.0))
    units, _ = find_units(net.named_parameters(), "parameter", [])
    criterion = MixedCriterion(len(units), ema, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    norm = change = last = reference = None
    for step in range(12):
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if step == 4:
            units[0].parameters[0].grad = None
        if step == 7:
            units[0].parameters[0].grad[0, 0] = math.inf
        if step not in (4, 7):
            value = float(units[0].parameters[0].grad.norm())
            norm = value if norm is None else ema * norm + (1 - ema) * value
            if last is not None:
                jump = abs(value - last)
                change = jump if change is None else ema * change + (1 - ema) * jump
            last = value
        criterion.observe(unit_norms(store, units, [1] * len(units), torch.device("cpu"), 1.0, lambda tensor: None))
        if step == 5:
            criterion.set_reference()
            reference = norm
    gradient, variation = criterion.statistics()
    assert gradient[0] == pytest.approx(norm / reference, rel=1e-5)
    assert variation[0] == pytest.approx(change / norm, rel=1e-5)
    restored = MixedCriterion(len(units), ema, torch.device("cpu"))
    restored.load_state_dict(criterion.state_dict())
    assert restored.statistics() == criterion.statistics()


def test_both_conditions_must_hold_and_the_unknown_is_not_eligible() -> None:
    statistics = ([0.5, 0.5, 3.0, math.nan], [0.1, 0.9, 0.1, math.nan])
    assert eligible_units(statistics, 1.0, 0.5) == [True, False, False, False]


def test_settled_gradients_are_means_over_the_live_micro_batches() -> None:
    net = model()
    units, _ = find_units(net.named_parameters(), "parameter", [])
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    store = ParameterGradients(torch.optim.SGD(net.parameters(), lr=1.0))
    dropped = settle_gradients(store, units, [8, 4, 0, 2, 8, 1], 8, rescale=True)
    values = [None if u.parameters[0].grad is None else float(u.parameters[0].grad.flatten()[0]) for u in units]
    assert values == [1.0, 2.0, None, 4.0, 1.0, 8.0]
    assert dropped == [units[2].parameters[0]] and not dropped[0].requires_grad
    store.finish()
    assert dropped[0].requires_grad


def test_a_skipped_step_leaves_no_trace_in_the_criterion() -> None:
    criterion = MixedCriterion(2, 0.5, torch.device("cpu"))
    criterion.observe(torch.tensor([1.0, 2.0]))
    criterion.observe(torch.tensor([3.0, 2.5]))
    criterion.set_reference()
    before = criterion.state_dict()
    criterion.observe(torch.tensor([9.0, math.inf]))
    criterion.forget_last()
    assert criterion.state_dict() == before


def test_what_the_optimizer_does_not_hold_is_no_unit_and_stops_a_prefix() -> None:
    net = model()
    names = [name for name, _ in net.named_parameters()]
    held = {id(p) for name, p in net.named_parameters() if name != names[1]}
    units, barrier = find_units(net.named_parameters(), "parameter", [], held)
    assert [unit.name for unit in units] == [name for name in names if name != names[1]] and barrier == 1
