"""The same training in one process, from plain torch: what every cell of the matrix is compared with.

It follows the arithmetic of each DeepSpeed mode (where it accumulates, in which precision it reduces, clips and steps) and
holds a parameter still by putting it back after the step, which is another way than ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from tests import jobs
from tests.exact.cells import DECAY, LAYERS, LR, Cell, Ends, Layer, masks_of, partition, user_frozen_names


@dataclass
class Trace:
    """After every step: fp32 masters and weights by name, and the step's gradient norm, clipping factor and loss."""

    masters: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def inputs_of(cell: Cell, step: int, m: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch in the cell's precision."""
    inputs, labels = jobs.micro_batch(step, m, replica)
    return inputs.to(cell.dtype), labels.to(cell.dtype)


def run(cell: Cell, first: dict[str, torch.Tensor], learning_rates: list[float]) -> Trace:
    """Train ``STEPS`` steps from the weights ``first``."""
    layers: list[nn.Module] = [Layer() for _ in range(LAYERS)]
    if cell.tied:
        layers[0], layers[-1] = Ends(), Ends()
    model = nn.Sequential(*layers).to(cell.dtype)
    model.load_state_dict(first, strict=False)
    frozen_for_ever = user_frozen_names(cell)
    low = {name: p for name, p in model.named_parameters() if name not in frozen_for_ever}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen_for_ever)
    masters = {name: p if not cell.flat else p.detach().float().clone().requires_grad_() for name, p in low.items()}
    optimizer = _optimizer(cell, masters)
    trace = Trace()
    for step, masks in enumerate(masks_of(cell)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rates[step] * group.get("lr_factor", 1.0)
        gradients, loss = _gradients(cell, model, low, step, masks)
        wholly = set.intersection(*masks)
        live = {name: gradient for name, gradient in gradients.items() if name not in wholly}
        counted = [g for name, g in live.items() if not (cell.tied and name == f"{LAYERS - 1}.weight")]
        if not cell.flat:
            # Stock DeepSpeed's fp32 clipping looks at the first stage alone; with nothing live there, ours looks at all.
            first = [g for name, g in live.items() if int(name.split(".")[0]) < partition(cell)[1]]
            counted = first or counted
        norm = float(torch.stack([g.float().norm() for g in counted] or [torch.zeros(())]).norm())
        limit = 1.0 if cell.clip is None else cell.clip
        factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        if factor < 1:
            live = {name: gradient * factor for name, gradient in live.items()}
        _step(cell, optimizer, masters, live)
        with torch.no_grad():
            for name, parameter in low.items():
                if cell.flat:
                    parameter.copy_(masters[name])
        trace.masters.append({name: master.detach().clone() for name, master in masters.items()})
        trace.weights.append({name: parameter.detach().clone() for name, parameter in low.items()})
        trace.norms.append(norm)
        trace.factors.append(factor)
        trace.losses.append(loss)
    return trace


def _optimizer(cell: Cell, masters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    parameters = list(masters.values())
    if cell.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(
            parameters, lr=LR, weight_decay=DECAY, momentum=0.9 if cell.optimizer == "momentum" else 0.0
        )
    if cell.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=LR, weight_decay=DECAY, momentum=0.9)
    if cell.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=LR, weight_decay=DECAY)
    if cell.optimizer == "groups":
        gains = [p for name, p in masters.items() if p.numel() == 1]
        others = [p for name, p in masters.items() if p.numel() > 1]
        return torch.optim.AdamW(
            [{"params": gains, "weight_decay": 0.0, "lr_factor": 2.0}, {"params": others, "lr_factor": 1.0}],
            lr=LR,
            weight_decay=DECAY,
        )
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)


def _gradients(
    cell: Cell, model: nn.Module, low: dict[str, nn.Parameter], step: int, masks: list[set[str]]
) -> tuple[dict[str, torch.Tensor], float]:
    """Means over live micro-batches and replicas, as the mode accumulates and reduces them."""
    flat_buffer = cell.mode in ("bf16", "bf16 zero1 fp32-accum")
    accumulation = torch.float32 if cell.mode.endswith("fp32-accum") else cell.dtype
    replicas, losses = [], []
    for replica in range(cell.dp):
        sums: dict[str, torch.Tensor] = {}
        for m, mask in enumerate(masks):
            for name, parameter in low.items():
                parameter.requires_grad_(name not in mask)
                if flat_buffer or m == 0:
                    parameter.grad = None
            inputs, labels = inputs_of(cell, step, m, replica)
            loss = nn.functional.mse_loss(model(inputs), labels)
            losses.append(loss.detach().float())
            if loss.requires_grad:
                (loss / len(masks)).backward()
            for name, parameter in low.items():
                if flat_buffer and parameter.grad is not None:
                    zero = torch.zeros_like(parameter, dtype=accumulation)
                    sums[name] = sums.get(name, zero) + parameter.grad.to(accumulation)
        for name, parameter in low.items():
            if not flat_buffer and parameter.grad is not None:
                sums[name] = parameter.grad.clone()
            parameter.grad = None
            live = sum(name not in mask for mask in masks)
            if name in sums and live < len(masks):
                sums[name] = sums[name] * (len(masks) / live)
        if cell.tied:
            ends = ("0.weight", f"{LAYERS - 1}.weight")
            both = sums[ends[0]] + sums[ends[1]]
            sums.update({name: both.clone() for name in ends})
        replicas.append(sums)
    # bf16 jobs reduce in bf16, and through a flat buffer also where there is nothing to reduce.
    wire = cell.dtype
    reduced = {}
    for name in replicas[0]:
        total = replicas[0][name].to(wire)
        for sums in replicas[1:]:
            total = total + sums[name].to(wire)
        reduced[name] = (total * (1 / cell.dp)).to(accumulation)
    for parameter in low.values():
        parameter.requires_grad_(True)
    return reduced, float(torch.stack(losses).mean())


def counts_together(cell: Cell) -> bool:
    """Whether the step count behind the bias correction is a partition's or a group's, not each parameter's."""
    return cell.flat or cell.optimizer == "fused adamw"


@torch.no_grad()
def _step(
    cell: Cell, optimizer: torch.optim.Optimizer, masters: dict[str, torch.Tensor], live: dict[str, torch.Tensor]
) -> None:
    """Frozen: skipped where every parameter counts its own steps; put back where a partition counts for all."""
    before = {}
    for name, master in masters.items():
        gradient = live.get(name)
        if gradient is None and counts_together(cell):
            state = optimizer.state.get(master, {})
            kept = {key: value.clone() for key, value in state.items() if torch.is_tensor(value) and value.dim()}
            before[name] = (master.clone(), kept)
            gradient = torch.zeros_like(master)
        master.grad = None if gradient is None else gradient.float()
    optimizer.step()
    for name, (value, kept) in before.items():
        masters[name].copy_(value)
        for key, now in optimizer.state[masters[name]].items():
            if torch.is_tensor(now) and now.dim():
                now.copy_(kept[key]) if key in kept else now.zero_()
