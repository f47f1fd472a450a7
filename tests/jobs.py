"""Small pipeline jobs that the multi-process tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    """Linear and tanh: the smallest layer with a weight and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def ds_config(
    micro_batches: int = 4, *, rlfreeze: dict[str, Any] | None = None, dp: int = 1, **changes: Any
) -> dict[str, Any]:
    """A complete DeepSpeed config; ``changes`` replace top-level keys."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": 2 * micro_batches * dp,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
    }
    if rlfreeze is not None:
        config["rlfreeze"] = rlfreeze
    config.update(changes)
    return config


def pipeline(num_stages: int, num_layers: int = 4, layers: list[Any] | None = None, **kwargs: Any) -> Any:
    """A seeded PipelineModule of ``num_layers`` blocks (or of ``layers``); the weights do not depend on the number of stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    return PipelineModule(
        layers or [LayerSpec(Block) for _ in range(num_layers)],
        num_stages=num_stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        seed_layers=True,
        base_seed=7,
        **kwargs,
    )


def micro_batch(step: int, micro_batch_id: int, dp_rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, each [2, WIDTH]: a pure function of its place in the run."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * micro_batch_id + dp_rank)
    return torch.randn(2, WIDTH, generator=generator), torch.rand(2, WIDTH, generator=generator) * 1.6 - 0.8


def batches(step: int, micro_batches: int, dp_rank: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one step."""
    return iter([micro_batch(step, m, dp_rank) for m in range(micro_batches)])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
