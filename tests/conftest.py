"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# DeepSpeed compiles its CPU communication op at its first start. A process that is killed meanwhile leaves a lock file behind,
# and every later start waits for it for ever: so the tests keep a build of their own, and begin without a lock.
_BUILDS = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parent.parent / ".cache" / "torch_extensions")))
for _lock in _BUILDS.glob("**/lock"):
    _lock.unlink(missing_ok=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The whole matrix of tests/exact, and all long runs, take minutes; without the flag a subset runs."""
    parser.addoption("--matrix", action="store_true", help="run all of test_matrix.py and test_split_runs.py")
    parser.addoption("--matrix-table", default=None, help="where to write the table of what passed")
