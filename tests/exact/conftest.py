"""Writes the matrix as a table of what passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.cells import MODES

_results: dict[str, str] = {}

HEAD = """# Exact in every mode

Written by `pytest tests/exact/test_matrix.py --matrix --matrix-table docs/exact_modes.md` from what passed in that run; do not
edit. Every cell trains a small job for five steps on the engine, with masks that change every step unless the row says
otherwise, and compares it with a single-process loop in plain torch ([tests/exact/reference.py](../tests/exact/reference.py)):

- frozen in every micro-batch of a step: weight, fp32 master and both moments are the same bits after it;
- thawed: moves again, with the moments that it had;
- live and partly frozen: equal to the loop. To the bit, except with clipping (the norm is summed stage by stage, not at once)
  and with DeepSpeed's native Adam kernels (they fuse multiply and add): there within 1e-5 in fp32 and one rounding in bf16;
- loss and gradient norm equal to the loop's (in fp32 without ZeRO, where stock does not tell the norm, by what clipping does);
- data-parallel replicas: the same bits.

PP: pipeline stages. DP: data-parallel replicas. M: micro-batches.

"""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "test_matrix.py::test_cell[" in report.nodeid and (report.when == "call" or report.failed):
        _results[report.nodeid.split("[", 1)[1][:-1]] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--matrix-table")
    if path is None or not _results:
        return
    rows: dict[str, dict[str, str]] = {}
    for name, outcome in _results.items():
        mode, rest = name.split(", ", 1)
        rows.setdefault(rest, {})[mode] = "yes" if outcome == "passed" else "**NO**"
    modes = list(MODES)
    lines = ["| job | " + " | ".join(modes) + " |", "| --- " * (len(modes) + 1) + "|"]
    lines += [f"| {rest} | " + " | ".join(found.get(mode, "") for mode in modes) + " |" for rest, found in rows.items()]
    passed = sum(outcome == "passed" for outcome in _results.values())
    Path(path).write_text(f"{HEAD}{passed} of {len(_results)} cells passed.\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
