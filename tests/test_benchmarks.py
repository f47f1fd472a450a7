"""Every benchmark runs, in a smoke version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_overhead_smoke(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/overhead.py", "--steps", "4", "--warmup", "1", "--width", "16", "--json", str(record)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    figures = json.loads(record.read_text())
    assert figures["median_ratio"] > 0 and figures["options"]["steps"] == 4
