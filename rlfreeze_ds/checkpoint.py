"""The controller's state beside a DeepSpeed checkpoint.

One JSON file for all stages in the checkpoint's folder; DeepSpeed's own files stay as stock writes them, so the stock engine
loads our checkpoints and we load stock's. Replicas of a stage share one state: their masks and statistics are equal, and of
their timings the first replica's are kept.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlfreeze_ds.controller import FreezeController
from rlfreeze_ds.decision import Decision
from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.log import log_rank0, logger
from rlfreeze_ds.planning.atomic_write import write_text
from rlfreeze_ds.planning.memory import StageMemory

FILE_NAME = "rlfreeze_state.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Timing(_Strict):
    step: int
    makespan_s: float
    tail_s: float
    phase: str
    masks: list[list[int]]
    seconds: list[tuple[Literal["F", "B", "I", "W"], int, float]]


class _Criterion(_Strict):
    norm: list[float]
    change: list[float]
    last: list[float]
    reference: list[float]


class _Guard(_Strict):
    average: float | None
    beyond: int


class _Window(_Strict):
    losses: list[float]
    seconds: list[float]
    reference: float | None
    trend: float | None
    spread: float
    deviations: list[float]
    before: float | None


class _Thresholds(_Strict):
    gradient: float = Field(gt=0)
    variation: float = Field(gt=0)


class _Tuner(_Strict):
    thresholds: _Thresholds
    number: int
    window: _Window
    run_id: str | None = None


class _StageState(_Strict):
    """What :meth:`FreezeController.state_dict` returns."""

    phase: Literal["warmup", "profile", "ramp", "steady", "cooldown"]
    phase_step: int
    step: int
    transfer_s: float
    asked: tuple[int, int] | None
    planned: int
    drifted: bool
    tuner: _Tuner | None = None
    decision: str | None
    config: dict[str, Any]
    criterion: _Criterion
    noise: dict[str, list[float]]
    losses: list[tuple[int, float]]
    guard: _Guard
    shape: dict[str, Any]
    calibration: list[_Timing]
    recent: list[_Timing]
    memory: list[dict[str, int]] = []

    @field_validator("decision")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                Decision.from_json(text)
            except (TypeError, KeyError) as error:
                raise ValueError(f"not a decision: {error}") from None
        return text

    @field_validator("memory")
    @classmethod
    def _of_stages(cls, stages: list[dict[str, int]]) -> list[dict[str, int]]:
        for stage in stages:
            try:
                StageMemory.from_fields(stage)
            except TypeError as error:
                raise ValueError(f"not the memory of a stage: {error}") from None
        return stages


class _Document(_Strict):
    format: Literal[1]
    stages: list[_StageState]


def save_state(controller: FreezeController, folder: str) -> None:
    """Collective. Write the state of all stages into ``folder``; a disk that refuses is a warning, never an error.

    A plan that is being made is waited for, so that this run and a resumed one go on alike.
    """
    controller.settle()
    reports = controller.group.gather((controller.shape.stage_id, controller.state_dict()))
    if controller.group.rank != 0:
        return
    stages: dict[int, Any] = {}
    for stage_id, state in reports:
        stages.setdefault(stage_id, state)
    document = {"format": 1, "stages": [stages[stage_id] for stage_id in sorted(stages)]}
    try:
        os.makedirs(folder, exist_ok=True)
        write_text(os.path.join(folder, FILE_NAME), json.dumps(document))
    except (OSError, RLFreezeError) as error:
        logger.warning(f"the freeze state was not saved, a resumed run will plan afresh: {error}")


def load_state(controller: FreezeController, folder: str, step: int) -> None:
    """Collective. Go on from the state in ``folder``; where it does not fit, say why and start afresh at ``step``."""
    found = _read(controller, os.path.join(folder, FILE_NAME)) if controller.group.rank == 0 else None
    stages, reason = controller.group.broadcast(found)
    if reason:
        controller.start_afresh(step)
        log_rank0(f"{folder}: {reason}; warming up and profiling afresh")
        return
    controller.load_state_dict(stages[controller.shape.stage_id])
    log_rank0(f"{folder}: goes on at step {controller.step} in phase {controller.phase}")


def _read(controller: FreezeController, path: str) -> tuple[list[dict[str, Any]], str]:
    """The states by stage, or why there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        stages = _Document.model_validate(document).stages
    except FileNotFoundError:
        return [], f"no {FILE_NAME}, so another engine wrote the checkpoint"
    except ValidationError as error:
        first = error.errors()[0]
        return [], f"{FILE_NAME} cannot be used ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    except (OSError, ValueError) as error:
        return [], f"{FILE_NAME} cannot be read ({error})"
    # Through JSON, so that tuples compare as the lists they were saved as.
    shapes = json.loads(json.dumps([asdict(shape) for shape in controller.shapes]))
    if [state.shape for state in stages] != shapes:
        return [], f"{FILE_NAME} is of another partition or choice of units ({len(stages)} stages, now {len(shapes)})"
    return document["stages"], ""
