"""The matrix: one cell is one small job, run on the engine and in the single-process reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests import jobs

LAYERS = 5
LR, DECAY = 0.01, 0.1

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 zero1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16 zero1 fp32-accum": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}
# Only where the test has persuaded DeepSpeed that the device can; not part of the matrix.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}, "zero_optimization": {"stage": 1}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": LR, "weight_decay": DECAY}},
    "momentum": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9, "weight_decay": DECAY}},
    "adam": {
        "type": "Adam",
        "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True, "adam_w_mode": False},
    },
    "adamw": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
    "rmsprop": {"type": "RMSprop", "params": {"lr": LR, "weight_decay": DECAY, "momentum": 0.9}},
    "fused adamw": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
    # Objects and groups are made by the job.
    "client adamw": {},
    "cpu adam": {},
    "groups": {},
}


@dataclass(frozen=True)
class Cell:
    """One combination. ``clip`` None leaves DeepSpeed's default of 1.0; ``checkpointing``: (interval, reentrant)."""

    mode: str = "fp32"
    optimizer: str = "adamw"
    stages: int = 2
    dp: int = 1
    micro_batches: int = 4
    clip: float | None = 0.0
    masks: str = "random"
    checkpointing: tuple[int, bool] | None = None
    tied: bool = False
    user_frozen: str = ""
    scheduler: bool = False
    uneven: bool = False
    mask_scope: str = "micro_batch"
    settings: tuple[tuple[str, Any], ...] = ()
    schedule: str = "stock"

    @property
    def name(self) -> str:
        """For pytest and for the table."""
        parts = [self.mode, self.optimizer, f"PP{self.stages}" + (f" x DP{self.dp}" if self.dp > 1 else "")]
        parts.append(f"M{self.micro_batches}")
        if self.masks != "random":
            parts.append(f"{self.masks} masks")
        if self.clip != 0:
            parts.append("default clipping" if self.clip is None else f"clip {self.clip}")
        if self.checkpointing:
            interval, reentrant = self.checkpointing
            parts.append(f"checkpoint {interval} {'reentrant' if reentrant else 'non-reentrant'}")
        if self.tied:
            parts.append("tied ends")
        if self.user_frozen:
            parts.append(f"user-frozen {self.user_frozen}")
        if self.scheduler:
            parts.append("scheduler")
        if self.uneven:
            parts.append("uneven")
        parts += [f"{key}" for key, _ in self.settings]
        if self.schedule != "stock":
            parts.append(self.schedule)
        return ", ".join(parts)

    @property
    def world_size(self) -> int:
        return self.stages * self.dp

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mode[:4], torch.float32)

    @property
    def flat(self) -> bool:
        """Whether the optimizer works on flat fp32 partitions."""
        return self.mode != "fp32"

    def config(self) -> dict[str, Any]:
        """The DeepSpeed config."""
        mode = FP16 if self.mode.startswith("fp16") else MODES[self.mode]
        if self.mode.endswith("fp32-accum"):
            mode = {**mode, "data_types": {"grad_accum_dtype": "fp32"}}
        block: dict[str, Any] = {"enabled": True}
        if self.schedule != "stock":
            block["planning"] = {"schedule": self.schedule}
        config = jobs.ds_config(self.micro_batches, rlfreeze=block, dp=self.dp, **mode)
        del config["optimizer"]
        if OPTIMIZERS[self.optimizer]:
            config["optimizer"] = {**OPTIMIZERS[self.optimizer], "params": dict(OPTIMIZERS[self.optimizer]["params"])}
        if "zero_optimization" in config:
            config["zero_optimization"] = {
                "stage": 1, "reduce_bucket_size": 100, "allgather_bucket_size": 1000,
                **{key: value for key, value in self.settings if key != "immediate_grad_update"},
            }  # fmt: skip
            config["zero_allow_untested_optimizer"] = True
        if "immediate_grad_update" in dict(self.settings):
            config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        if self.clip is not None:
            config["gradient_clipping"] = self.clip
        if self.scheduler:
            config["scheduler"] = {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0.001, "warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"},
            }
        if self.checkpointing:
            interval, reentrant = self.checkpointing
            config["pipeline"] = {"activation_checkpoint_interval": interval, "use_reentrant": reentrant}
        return config


STEPS = 5


class Layer(nn.Module):
    """Odd sizes, so that parameters straddle partitions and segments begin anywhere; and a buffer."""

    def __init__(self, width: int = jobs.WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((1,), 0.125))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.gain + self.shift.to(x.dtype)


class Ends(nn.Module):
    """The layer at both ends of a tied model: only ``weight`` is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(jobs.WIDTH, jobs.WIDTH))
        nn.init.uniform_(self.weight, -0.3, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight))


def parameter_names(cell: Cell) -> list[str]:
    """Of the parameters that may freeze, in the order of the layers."""
    layers = range(1, LAYERS - 1) if cell.tied else range(LAYERS)
    names = [f"{layer}.{kind}" for layer in layers for kind in ("gain", "linear.weight", "linear.bias")]
    return [name for name in names if name not in user_frozen_names(cell)]


def user_frozen_names(cell: Cell) -> set[str]:
    """What the user froze before ``initialize``."""
    if cell.user_frozen == "biases":
        return {f"{layer}.linear.bias" for layer in range(LAYERS)}
    if cell.user_frozen == "adapters only":
        return {f"{layer}.linear.{kind}" for layer in range(LAYERS) for kind in ("weight", "bias")}
    if cell.user_frozen == "first stage":
        layers = range(partition(cell)[1])
        return {f"{layer}.{kind}" for layer in layers for kind in ("gain", "linear.weight", "linear.bias")}
    return set()


def partition(cell: Cell) -> list[int]:
    """First layer of every stage, and the number of layers."""
    if cell.uneven:
        return [0, 1, LAYERS] if cell.stages == 2 else [0, 1, LAYERS - 1, LAYERS]
    from deepspeed.runtime.utils import partition_uniform

    return [int(bound) for bound in partition_uniform(LAYERS, cell.stages)]


def masks_of(cell: Cell) -> list[list[set[str]]]:
    """Per step and micro-batch the names of what is frozen."""
    rng = random.Random(cell.name)
    names, bounds = parameter_names(cell), partition(cell)
    whole = {
        "first stage": {n for n in names if int(n.split(".")[0]) < bounds[1]},
        "middle stage": {n for n in names if bounds[1] <= int(n.split(".")[0]) < bounds[2]},
        "last stage": {n for n in names if int(n.split(".")[0]) >= bounds[-2]},
        "all stages": set(names),
    }
    nothing: set[str] = set()
    plan = []
    for step in range(STEPS):
        if cell.masks == "no":
            masks = [nothing] * cell.micro_batches
        elif cell.masks in whole:  # wholly frozen, then thawed
            masks = [whole[cell.masks] if step in (1, 2) else nothing] * cell.micro_batches
        elif cell.masks == "from the start":  # the optimizer has no state yet
            masks = [set(names[::2]) if step < 2 else nothing] * cell.micro_batches
        else:  # changing every step, always with some units frozen throughout
            always = set(rng.sample(names, len(names) // 3))
            masks = [
                always | {name for name in names if rng.random() < 0.3} for _ in range(cell.micro_batches)
            ]
        plan.append(masks)
    return plan


def all_cells() -> list[Cell]:
    """The whole matrix. Every axis is crossed with every mode; other pairs of axes are sampled."""
    cells: list[Cell] = []
    for mode in MODES:
        base = Cell(mode=mode)
        cells += [replace(base, optimizer=name) for name in OPTIMIZERS]
        cells += [replace(base, stages=1, dp=2), replace(base, stages=2, dp=2)]
        cells += [replace(base, stages=stages) for stages in (1, 3, 4)]
        cells += [replace(base, uneven=True), replace(base, stages=3, uneven=True)]
        cells += [replace(base, micro_batches=count) for count in (1, 2, 8)]
        cells += [replace(base, stages=4, micro_batches=2)]
        cells += [
            replace(base, checkpointing=(interval, reentrant)) for interval in (1, 2) for reentrant in (True, False)
        ]
        cells += [replace(base, tied=True), replace(base, tied=True, dp=2)]
        cells += [replace(base, user_frozen=what) for what in ("biases", "adapters only")]
        cells += [replace(base, clip=clip) for clip in (None, 0.05)]
        cells += [replace(base, clip=0.05, masks=masks) for masks in ("first stage", "last stage")]
        cells += [replace(base, scheduler=True)]
        cells += [replace(base, masks=masks) for masks in ("no", "first stage", "last stage", "all stages", "from the start")]
        cells += [replace(base, stages=3, masks="middle stage")]
        for masks in ("first stage", "last stage", "from the start"):
            cells += [replace(base, stages=2, dp=2, masks=masks, clip=None)]
        cells += [replace(base, dp=2, optimizer=name) for name in ("momentum", "fused adamw", "groups")]
        cells += [replace(base, masks="first stage", checkpointing=(1, True), clip=None)]
        split = replace(base, schedule="zb-h1")
        cells += [split, replace(split, optimizer="fused adamw"), replace(split, optimizer="groups"), replace(split, clip=0.05)]
        cells += [replace(split, stages=4, micro_batches=8), replace(split, dp=2), replace(split, stages=3, uneven=True)]
        cells += [replace(split, checkpointing=(1, reentrant)) for reentrant in (True, False)]
        cells += [replace(split, tied=True), replace(split, user_frozen="adapters only")]
        cells += [replace(split, masks=masks) for masks in ("first stage", "all stages", "from the start")]
    cells += [replace(Cell(mode=mode), user_frozen="first stage") for mode in ("fp32",)]
    cells += [
        replace(Cell(mode=mode), stages=1, dp=2, settings=((setting, value),))
        for mode in ("fp32 zero1", "bf16 zero1")
        for setting, value in (("contiguous_gradients", False), ("parameter_alignment", True))
    ]
    cells += [
        replace(Cell(mode=mode), dp=dp, settings=(("immediate_grad_update", True),))
        for mode in ("bf16", "bf16 zero1 fp32-accum")
        for dp in (1, 2)
    ]
    return list(dict.fromkeys(cells))


def quick_cells() -> list[Cell]:
    """A subset for every day: each kind of job, in one mode or another."""
    kinds: dict[Cell, list[Cell]] = {}
    for cell in all_cells():
        kinds.setdefault(replace(cell, mode=""), []).append(cell)
    return [cells[turn % len(cells)] for turn, cells in enumerate(kinds.values())]
