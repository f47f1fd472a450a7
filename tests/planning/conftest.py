"""What several tests of the planner start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlfreeze_ds.planning.cost_model import Costs
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.profile import read_profile

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "profiles" / "llama8b_h200_pp4_1f1b.csv"


@pytest.fixture(scope="session")
def published() -> tuple[PipelineDag, Costs]:
    """The published profile of LLaMA-8B on four stages."""
    schedule, costs = read_profile(PUBLISHED)
    return PipelineDag(schedule), costs
