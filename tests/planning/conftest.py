"""What several tests of the planner start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@pytest.fixture(scope="session")
def torch_schedule() -> Callable[..., Any]:
    """torch's own schedule class, built without a process group: ``(name, num_ranks, num_micro_batches, num_chunks)``.

    Its ``pipeline_order`` has the order of every rank. The stages hold no module; an order does not depend on one.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

    def build(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int) -> Any:
        stage = SimpleNamespace(group_size=num_ranks, group_rank=0, num_stages=num_ranks * num_chunks, submod=None)
        return getattr(schedules, name)([stage] * num_chunks, num_micro_batches)

    return build
