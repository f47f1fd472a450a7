"""Train a byte-level GPT on real text with DeepSpeed's pipeline engine.

What it does: a decoder-only transformer (pre-norm, causal attention, no dropout) over the 256 byte values, cut into
pipeline stages, trained with the optimizer of the DeepSpeed JSON on every ``.py`` file of the running Python's own
standard library, or on the text files of any folder given with ``--data``. Some files are held out for validation.

How to run, on two stages:

    deepspeed --num_gpus 2 scripts/train_gpt.py --deepspeed --deepspeed_config ds_configs/gpt_stock.json

On a machine without accelerators put ``LOCAL_SIZE=2 OMP_NUM_THREADS=1`` in front: DeepSpeed then counts two devices.

What to expect: the validation loss, in nats per byte, falls from 5.5 to about 1.7 in the default number of steps. Rank 0
writes ``metrics.jsonl`` under ``--output``: one line per step (step, loss, seconds, tokens) and one per evaluation
(step, val_loss, train_seconds: the wall clock spent in training steps so far). The same ``--seed`` gives the same
initial weights and the same data order on any number of stages; ``--resume`` goes on from the latest checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # byte values
VALIDATION_SHARE = 0.05  # of the corpus' bytes
FINAL_LR_SHARE = 0.1  # the cosine decays to this share of the peak
INIT_STD = 0.02
ROTARY_BASE = 1000.0  # wavelengths from 2 pi up to 2 pi x this, in bytes

Batch = tuple[torch.Tensor, torch.Tensor]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    import deepspeed  # late: the corpus and sampler functions of this file work without it

    parser = argparse.ArgumentParser(description="Train a byte-level GPT with DeepSpeed's pipeline engine.")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages; the other ranks are data parallel")
    parser.add_argument("--steps", type=int, default=180, help="training steps (batches) in all")
    parser.add_argument("--data", type=Path, default=None, help="folder of text files; default: Python's own library")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="most text to load, whole files in hash order")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--layers", type=int, default=5, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128, help="bytes per sample")
    parser.add_argument("--lr", type=float, default=None, help="peak learning rate; default: the JSON's")
    parser.add_argument("--warmup", type=int, default=15, help="steps of linear warm-up")
    parser.add_argument("--lr-steps", type=int, default=None, help="steps until the final rate; default: --steps")
    parser.add_argument("--eval-interval", type=int, default=10, help="steps between evaluations; one follows the last")
    parser.add_argument("--eval-batches", type=int, default=2, help="batches per evaluation, always the same ones")
    parser.add_argument("--output", type=Path, default=Path("runs/train_gpt"))
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint under --output")
    parser.add_argument("--stop-at-val-loss", type=float, default=None, help="stop at the first evaluation this low")
    parser.add_argument("--max-train-seconds", type=float, default=None, help="stop once training has taken this long")
    parser.add_argument("--min-steps", type=int, default=0, help="the two early stops act from this step on")
    parser = deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.width % (2 * arguments.heads):
        parser.error(f"--width {arguments.width} must be an even multiple of --heads {arguments.heads}")
    if arguments.lr_steps is None:
        arguments.lr_steps = arguments.steps
    return arguments


# Text ----------------------------------------------------------------------------------------------------------------


def list_text_files(folder: Path | None) -> tuple[Path, list[Path]]:
    """The corpus folder and its files, relative to it, in an order that depends on their names alone.

    Args:
        folder: any folder of text files; None is the standard library of the running Python, ``.py`` files only.

    Raises:
        ValueError: there are fewer than two files, so none could be held out.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        # Installed packages lie inside the standard library's folder but are not part of it.
        subdirectories[:] = [
            name
            for name in subdirectories
            if not name.startswith(".") and name not in ("site-packages", "dist-packages", "__pycache__")
        ]
        for name in names:
            path = Path(directory, name)
            if name.endswith(".py") if folder is None else not name.startswith(".") and _looks_like_text(path):
                found.append(path.relative_to(root))
    if len(found) < 2:
        raise ValueError(f"--data {root}: found {len(found)} text files; at least two are needed, one is held out")
    return root, sorted(found, key=_name_hash)


def _name_hash(relative: Path) -> bytes:
    return hashlib.blake2b(relative.as_posix().encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _looks_like_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return bool(head) and b"\0" not in head


def load_corpus(folder: Path | None, max_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation text as two uint8 arrays that share no file.

    Files are taken in hash order, the first ones for validation, until ``max_bytes`` are full.
    """
    root, files = list_text_files(folder)
    sizes = [(root / path).stat().st_size for path in files]
    validation_bytes = VALIDATION_SHARE * min(max_bytes, sum(sizes))
    split: tuple[list[bytes], list[bytes]] = ([], [])
    taken = [0, 0]
    for index, path in enumerate(files):
        into_validation = taken[1] < validation_bytes and index < len(files) - 1
        text = (root / path).read_bytes()
        if sum(taken) + len(text) > max_bytes and all(taken):
            break
        split[into_validation].append(text)
        taken[into_validation] += len(text)
    train, validation = (np.frombuffer(b"\n".join(part), dtype=np.uint8) for part in split)
    return train, validation


def sample_offsets(
    seed: int, step: int, text_length: int, seq_len: int, num_replicas: int, num_micro_batches: int, micro_batch: int
) -> np.ndarray:
    """Where the samples of one training step start: a pure function of its arguments.

    Returns:
        Integers of shape [num_replicas, num_micro_batches, micro_batch]; each sample needs seq_len + 1 bytes.
    """
    generator = np.random.default_rng([seed, step])
    return generator.integers(0, text_length - seq_len, size=(num_replicas, num_micro_batches, micro_batch))


def validation_offsets(
    text_length: int, seq_len: int, num_batches: int, num_replicas: int, num_micro_batches: int, micro_batch: int
) -> np.ndarray:
    """Evenly spaced samples, the same at every evaluation.

    Returns:
        Integers of shape [num_batches, num_replicas, num_micro_batches, micro_batch].
    """
    shape = (num_batches, num_replicas, num_micro_batches, micro_batch)
    return np.linspace(0, text_length - seq_len - 1, num=math.prod(shape), dtype=np.int64).reshape(shape)


def cut_samples(text: np.ndarray, offsets: np.ndarray, seq_len: int) -> Batch:
    """Inputs and labels, both [len(offsets), seq_len]; a label is the byte that follows."""
    windows = text[offsets[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


# Model ---------------------------------------------------------------------------------------------------------------
# Every layer draws its weights from a generator of its own, so that they do not depend on how the layers are cut.


class Embedding(nn.Module):
    """Byte embeddings: [batch, time] -> [batch, time, width]. Positions enter in the attention."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.byte.weight, std=INIT_STD, generator=torch.Generator().manual_seed(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.byte(tokens)


class Rotary(nn.Module):
    """Rotary position embedding: turns pairs of channels by angles that grow with the position. [..., time, width]."""

    def __init__(self, width: int, seq_len: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(seq_len)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: vectors.shape[-2]], self.sin[: vectors.shape[-2]]
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention with normed queries and keys, then a four times wider MLP."""

    def __init__(self, width: int, heads: int, seq_len: int, num_layers: int, seed: int) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = Rotary(width // heads, seq_len)
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        draw = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * num_layers)  # keeps the residual stream's variance level over depth
        for linear, std in (
            (self.query_key_value, INIT_STD),
            (self.attention_out, residual_std),
            (self.mlp_in, INIT_STD),
            (self.mlp_out, residual_std),
        ):
            nn.init.normal_(linear.weight, std=std, generator=draw)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time_, width = hidden.shape
        projected = self.query_key_value(self.norm_attention(hidden))
        # [batch, time, 3 * width] -> three of [batch, heads, time, width / heads]
        query, key, value = projected.view(batch, time_, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key = (self.rotary(F.rms_norm(part, (part.shape[-1],))) for part in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, time_, width))
        return hidden + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(hidden))))


class Head(nn.Module):
    """Final norm and output projection: [batch, time, width] -> [batch, time, 256]."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.projection.weight, std=INIT_STD, generator=torch.Generator().manual_seed(seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(self.norm(hidden))


def next_byte_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def build_model(arguments: argparse.Namespace) -> nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule

    seeds = [int(word) for word in np.random.SeedSequence(arguments.seed).generate_state(arguments.layers + 2)]
    layers = [
        LayerSpec(Embedding, arguments.width, seeds[0]),
        *(
            LayerSpec(Block, arguments.width, arguments.heads, arguments.seq_len, arguments.layers, seed)
            for seed in seeds[1:-1]
        ),
        LayerSpec(Head, arguments.width, seeds[-1]),
    ]
    # Blocks hold nearly all of the time. Where they do not divide evenly the last stage gets the odd one (the embedding is
    # counted as if it were one): it has nothing to wait for between a forward and its backward.
    return PipelineModule(
        layers=layers, num_stages=arguments.stages, loss_fn=next_byte_loss, partition_method="type:embedding|block"
    )


# Training ------------------------------------------------------------------------------------------------------------


def learning_rate_factor(step: int, warmup: int, horizon: int) -> float:
    """Share of the peak rate at a step: linear warm-up, cosine decay up to ``horizon``, then level."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


class Metrics:
    """The run's ``metrics.jsonl``, one flushed line per event. Written on rank 0 only."""

    def __init__(self, output: Path, write: bool, resume_step: int) -> None:
        self._file = None
        if not write:
            return
        output.mkdir(parents=True, exist_ok=True)
        path = output / "metrics.jsonl"
        kept: list[str] = []
        if resume_step and path.exists():
            # Steps after the checkpoint are about to be trained again.
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= resume_step]
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(kept)

    def write(self, **record: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def main() -> None:
    arguments = parse_arguments()
    # The module, not its functions: whoever wraps deepspeed.initialize is then respected.
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed()
    get_accelerator().set_device(max(arguments.local_rank, 0))
    train_text, validation_text = load_corpus(arguments.data, arguments.max_bytes)
    for name, text in (("training", train_text), ("validation", validation_text)):
        if len(text) <= arguments.seq_len:
            raise SystemExit(f"train_gpt: only {len(text)} bytes of {name} text; --seq-len is {arguments.seq_len}")
    model = build_model(arguments)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        if arguments.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, arguments.warmup, arguments.lr_steps)
        )

    engine, *_ = deepspeed.initialize(
        args=arguments,
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        lr_scheduler=schedule,
    )

    checkpoints = arguments.output / "checkpoints"
    step, train_seconds = 0, 0.0
    if arguments.resume:
        loaded, state = engine.load_checkpoint(str(checkpoints)) if (checkpoints / "latest").exists() else (None, {})
        if loaded is not None:
            step, train_seconds = state["step"], state["train_seconds"]
        if dist.get_rank() == 0:
            print(f"train_gpt: resumed at step {step}" if loaded else f"train_gpt: no checkpoint under {checkpoints}")

    metrics = Metrics(arguments.output, write=dist.get_rank() == 0, resume_step=step)
    replica, num_replicas = engine.mpu.get_data_parallel_rank(), engine.mpu.get_data_parallel_world_size()
    per_replica = (num_replicas, engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu())
    tokens_per_step = math.prod(per_replica) * arguments.seq_len
    held_out = validation_offsets(len(validation_text), arguments.seq_len, arguments.eval_batches, *per_replica)

    def train_batches(at_step: int) -> Iterator[Batch]:
        offsets = sample_offsets(arguments.seed, at_step, len(train_text), arguments.seq_len, *per_replica)
        return iter([cut_samples(train_text, row, arguments.seq_len) for row in offsets[replica]])

    def evaluate() -> float:
        losses = []
        for batch in held_out:
            samples = iter([cut_samples(validation_text, row, arguments.seq_len) for row in batch[replica]])
            losses.append(engine.eval_batch(samples).item())
        return sum(losses) / len(losses)

    def agreed(*numbers: float) -> list[float]:
        """Rank 0's numbers, on every rank: ranks that decided from their own clocks could part ways and hang."""
        shared = torch.tensor(numbers, dtype=torch.float32, device=get_accelerator().current_device_name())
        dist.broadcast(shared, src=0)
        return shared.tolist()

    while step < arguments.steps:
        batches = train_batches(step)
        get_accelerator().synchronize()
        started = time.perf_counter()
        loss = engine.train_batch(data_iter=batches).item()
        seconds = time.perf_counter() - started
        step += 1
        train_seconds += seconds
        metrics.write(step=step, loss=loss, seconds=round(seconds, 6), tokens=tokens_per_step)

        (clock,) = agreed(train_seconds)
        over_time = arguments.max_train_seconds is not None and clock >= arguments.max_train_seconds
        last = step >= arguments.steps or (over_time and step >= arguments.min_steps)
        if last or step % arguments.eval_interval == 0:
            (val_loss,) = agreed(evaluate())
            metrics.write(step=step, val_loss=val_loss, train_seconds=round(train_seconds, 6))
            low_enough = arguments.stop_at_val_loss is not None and val_loss <= arguments.stop_at_val_loss
            last = last or (low_enough and step >= arguments.min_steps)
        if arguments.save_interval and (last or step % arguments.save_interval == 0):
            engine.save_checkpoint(
                str(checkpoints), tag=f"step{step}", client_state={"step": step, "train_seconds": train_seconds}
            )
        if last:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
