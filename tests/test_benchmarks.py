"""Every benchmark runs, in a smoke version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_small(tmp_path: Path, script: str, *flags: str) -> dict[str, Any]:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--steps", "4", "--warmup", "1", "--width", "16", *flags, "--json", str(record)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(record.read_text())


def test_overhead_smoke(tmp_path: Path) -> None:
    figures = run_small(tmp_path, "overhead.py")
    assert figures["median_ratio"] > 0 and figures["options"]["steps"] == 4


def test_savings_smoke(tmp_path: Path) -> None:
    """Bytes are exact, whatever the machine: what is frozen is not reduced."""
    for job, engines in run_small(tmp_path, "savings.py", "--rows", "8")["figures"].items():
        reduced = {name: figures["mib_reduced"] for name, figures in engines.items()}
        # Under ZeRO the criterion sums two numbers per unit over the replicas.
        assert 0 <= reduced["ratio 0.0"] - reduced["stock"] <= 0.002 and reduced["stock"] > 0, job
        assert all(figures["peak_mib"] >= 0 and figures["activations_kept_mib"] > 0 for figures in engines.values())
        assert reduced["ratio 0.8"] < 0.5 * reduced["stock"] and reduced["ratio 0.5"] < 0.8 * reduced["stock"], job
