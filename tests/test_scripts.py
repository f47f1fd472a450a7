"""The scripts: configs that differ in our block alone, a deterministic corpus and sampler, a demo that runs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


train_gpt = load_script("train_gpt")
demo = load_script("demo")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(40):
        path = tmp_path / f"part{index % 3}" / f"{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([65 + index]) * (100 + index))
    (tmp_path / "image.bin").write_bytes(b"\x00\x01\x02" * 50)
    (tmp_path / ".hidden").write_text("no")
    return tmp_path


def test_configs_differ_only_in_our_block() -> None:
    stock, ours = (json.loads((ROOT / f"ds_configs/gpt_{name}.json").read_text()) for name in ("stock", "rlfreeze"))
    block = ours.pop("rlfreeze")
    assert stock == ours
    assert block["enabled"] is True
    assert stock["optimizer"]["params"]["torch_adam"] is True


def test_our_block_is_valid() -> None:
    from rlfreeze_ds.config import parse_block

    config = parse_block(json.loads((ROOT / "ds_configs/gpt_rlfreeze.json").read_text()))
    assert config is not None and config.enabled


def test_training_script_is_an_ordinary_one() -> None:
    assert "rlfreeze" not in (ROOT / "scripts/train_gpt.py").read_text().lower()


def test_corpus_split_shares_no_file_and_keeps_every_text_byte(folder: Path) -> None:
    train, validation = (set(part.tolist()) - {10} for part in train_gpt.load_corpus(folder, max_bytes=1 << 20))
    assert train & validation == set()  # each file is one repeated byte of its own
    assert train | validation == set(range(65, 105))
    assert 1 <= len(validation) <= 4  # 5 % of the bytes in 40 files of like size


def test_corpus_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = tmp_path_factory.mktemp("elsewhere") / "copy"
    first = train_gpt.load_corpus(folder, max_bytes=2000)
    folder.rename(moved)
    second = train_gpt.load_corpus(moved, max_bytes=2000)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    assert 0 < sum(map(len, first)) <= 2000 + 40  # whole files and the newlines between them


def test_corpus_refuses_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("text")
    with pytest.raises(ValueError, match="at least two"):
        train_gpt.load_corpus(tmp_path, max_bytes=1000)


def test_default_corpus_is_the_standard_library_alone() -> None:
    _, files = train_gpt.list_text_files(None)
    assert Path("argparse.py") in files
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in files)


def test_sampler_is_a_pure_function_of_seed_and_step() -> None:
    arguments = {"text_length": 10_000, "seq_len": 64, "num_replicas": 2, "num_micro_batches": 8, "micro_batch": 4}
    later = train_gpt.sample_offsets(7, 30, **arguments)
    train_gpt.sample_offsets(7, 29, **arguments)
    assert np.array_equal(later, train_gpt.sample_offsets(7, 30, **arguments))
    assert not np.array_equal(later, train_gpt.sample_offsets(7, 31, **arguments))
    assert not np.array_equal(later, train_gpt.sample_offsets(8, 30, **arguments))
    assert later.shape == (2, 8, 4)
    assert not np.array_equal(later[0], later[1])  # replicas see different text
    assert later.min() >= 0 and later.max() + 64 + 1 <= 10_000


def test_validation_samples_fit_the_text() -> None:
    offsets = train_gpt.validation_offsets(1000, 64, num_batches=2, num_replicas=1, num_micro_batches=4, micro_batch=2)
    assert offsets.shape == (2, 1, 4, 2)
    assert offsets.min() == 0 and offsets.max() + 64 + 1 == 1000


def test_labels_are_the_following_bytes() -> None:
    inputs, labels = train_gpt.cut_samples(np.arange(50, dtype=np.uint8), np.array([3, 10]), seq_len=4)
    assert inputs.tolist() == [[3, 4, 5, 6], [10, 11, 12, 13]]
    assert labels.tolist() == [[4, 5, 6, 7], [11, 12, 13, 14]]


def test_learning_rate_warms_up_decays_and_stays() -> None:
    factors = [train_gpt.learning_rate_factor(step, warmup=10, horizon=110) for step in range(200)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == factors[10] == 1.0
    assert factors[60] == pytest.approx((1 + train_gpt.FINAL_LR_SHARE) / 2)
    assert set(factors[110:]) == {train_gpt.FINAL_LR_SHARE}


def test_attention_does_not_look_ahead() -> None:
    import torch

    block = train_gpt.Block(width=16, heads=2, seq_len=6, num_layers=1, seed=0)
    hidden = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    changed = hidden.clone()
    changed[:, 4:] += 1.0
    before, after = block(hidden), block(changed)
    assert torch.allclose(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_attention_sees_distances_not_places() -> None:
    import torch

    rotary = train_gpt.Rotary(width=8, seq_len=12)
    query, key = (torch.randn(8, generator=torch.Generator().manual_seed(seed)).expand(12, 8) for seed in (0, 1))
    scores = rotary(query) @ rotary(key).T
    for distance in range(1, 12):
        along = scores.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-5)
    assert scores.diagonal(-1)[0] != pytest.approx(float(scores.diagonal(-5)[0]))


def make_run(seconds: list[float], losses: dict[int, float]) -> object:
    return demo.Run(
        steps=[{"step": i + 1, "loss": 1.0, "seconds": s, "tokens": 10} for i, s in enumerate(seconds)],
        evaluations=[{"step": step, "val_loss": loss, "train_seconds": 0.0} for step, loss in losses.items()],
        engine_events=[],
    )


def test_time_to_stock_loss_takes_the_first_evaluation_at_or_below() -> None:
    stock = make_run([9.0, 9.0, 1.0, 1.0, 1.0, 1.0], {6: 2.0})
    assert demo.time_to_stock_loss_ratio(stock, make_run([9.0] * 2 + [0.5] * 8, {6: 2.1, 8: 2.0, 10: 1.9}), 6) == 0.75
    assert demo.time_to_stock_loss_ratio(stock, make_run([9.0] * 2 + [0.5] * 8, {10: 2.1}), 6) is None
    assert demo.time_to_stock_loss_ratio(stock, make_run([9.0] * 2 + [2.0] * 8, {10: 1.9}), 6) is None  # 4 x stock's


def test_a_missing_figure_is_not_averaged_away() -> None:
    assert demo.mean_or_none([1.0, None]) is None
    assert demo.mean_or_none([1.0, 2.0]) == 1.5


@pytest.mark.launcher
def test_resume_continues_exactly(tmp_path: Path) -> None:
    """Ten steps in one go, and six plus four after a resume, give the same losses."""

    def train(output: Path, *flags: str) -> list[float]:
        environment, port = demo.child_environment(2), demo.free_port()
        command = [
            "deepspeed", "--num_gpus", "2", "--master_port", str(port), "scripts/train_gpt.py",
            "--deepspeed", "--deepspeed_config", "ds_configs/gpt_stock.json", f"--output={output}",
            *demo.QUICK.flags, "--lr-steps=10", *flags,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
        finally:
            demo.free_shared_memory(port)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return [record["loss"] for record in demo.read_json_lines(output / "metrics.jsonl") if "loss" in record]

    whole = train(tmp_path / "whole", "--steps=10")
    train(tmp_path / "parts", "--steps=8", "--save-interval=6")
    # The run went two steps past its checkpoint of step 6, whose lines a resume from there replaces.
    (tmp_path / "parts/checkpoints/latest").write_text("step6")
    resumed = train(tmp_path / "parts", "--steps=10", "--resume")
    assert len(whole) == 10 and resumed == whole


@pytest.mark.launcher
def test_quick_demo_end_to_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/demo.py", "--quick", f"--output={tmp_path}"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(demo.FIGURES) | {"steps", "versions"} <= set(summary)
    assert summary["steps"] == demo.QUICK.steps
    for key in ("stock_tokens_per_s", "rlfreeze_tokens_per_s", "speedup", "stock_val_loss", "rlfreeze_val_loss"):
        assert math.isfinite(summary[key]) and summary[key] > 0
    assert 0 <= summary["mean_freeze_ratio"] <= 1
    assert summary["versions"]["rlfreeze_ds"]
    assert "speed-up" in done.stdout
