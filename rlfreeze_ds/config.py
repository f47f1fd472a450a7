"""The ``"rlfreeze"`` block of a DeepSpeed JSON: a strict model, every field with its default, unit and bounds."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlfreeze_ds.errors import ConfigError

BLOCK = "rlfreeze"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CriterionConfig(_Strict):
    """WHAT may freeze: the mixed criterion on gradient and gradient variation."""

    name: Literal["mixed"] = Field("mixed", description="criterion; only the mixed one exists so far")
    interval: int = Field(1, ge=1, description="steps between two looks at the gradients' norms")
    gradient_threshold: float = Field(
        2.0,
        gt=0,
        description="a unit may freeze while its gradient norm, over its level at the end of warm-up, is at most this",
    )
    variation_threshold: float = Field(
        1.0,
        gt=0,
        description="a unit may freeze while the change of its gradient norm from look to look, over the norm, is at most this",
    )
    ema: float = Field(0.9, ge=0, lt=1, description="weight of the past in the moving averages of the norms")


class PlanningConfig(_Strict):
    """WHERE and HOW MUCH: the linear program over the schedule's DAG."""

    schedule: Literal["stock", "zb-h1", "planned"] = Field(
        "stock",
        description="stock: DeepSpeed's 1F1B; zb-h1: each backward in two, so that a stage does weight gradients where it would "
        "wait, with no more activations alive than the first stage of 1F1B has; planned: zb-h1 until the first plan, then an "
        "order searched for the measured seconds",
    )
    most_held: int | None = Field(
        None,
        ge=1,
        description="planned: micro-batches whose activations a stage may hold; at least, and by default, what the first stage "
        "of 1F1B holds",
    )
    memory_limit_bytes: int | None = Field(
        None,
        ge=1,
        description="bytes of activations, and of what a W waits with, that a rank may hold, as the first step measures them: "
        "planned keeps to it, zb-h1 goes back to the stock order where it would not, stock says so",
    )
    max_freeze_ratio: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of a stage's weight-gradient time that may be skipped; 0 freezes nothing, profiling included",
    )
    time_slack: float = Field(
        0.02,
        ge=0,
        le=1,
        description="share of the shortest batch time given back in exchange for less freezing; up to half of it may go to what "
        "real batches take beyond their plan",
    )
    objective: Literal["makespan", "progress"] = Field(
        "makespan",
        description="makespan: the shortest batch, then the least freezing for it; progress: the most expected loss decrease per "
        "second, from the measured signal and noise of the gradients",
    )
    target_speedup: float | None = Field(
        None, gt=1, le=100, description="least freezing for a batch so many times as fast, in place of time_slack"
    )
    plan_file: str | None = Field(
        None, description="a plan.json of `python -m rlfreeze_ds plan`: its ratios are used and nothing is solved"
    )
    drift_tolerance: float = Field(
        0.1, gt=0, description="share by which measured batches may differ from the predicted one before a new plan is made"
    )
    solver: Literal["auto", "highs", "cbc"] = Field("auto", description="auto: HiGHS where installed, else CBC")
    time_limit_s: float = Field(10.0, gt=0, le=600, description="seconds a solve may take before the last plan is kept")
    background: bool = Field(
        True,
        description="solve beside training; false: wait for the answer in the step that asks, for runs that must be reproducible "
        "to the bit",
    )


class GuardConfig(_Strict):
    """The loss guard: thaws everything for a while when the loss leaves its trend."""

    enabled: bool = Field(True, description="whether the loss is watched")
    tolerance: float = Field(0.2, gt=0, description="share by which the loss may exceed its own moving average")
    patience: int = Field(5, ge=1, description="steps in a row beyond the tolerance before everything thaws")
    cooldown_steps: int = Field(50, ge=1, description="steps without freezing after the guard has acted")


class PolicyConfig(_Strict):
    """HOW FAR: who moves the criterion's thresholds."""

    type: Literal["fixed", "random", "pretrained", "rllib"] = Field(
        "fixed",
        description="fixed: the thresholds stay as configured; random: they walk at random, a baseline for policies; pretrained: "
        "a small network moves them; rllib: a policy server does, and learns from it",
    )
    interval: int = Field(20, ge=1, description="steps of a window: between two decisions, each of which asks for a new plan")
    total_steps: int | None = Field(None, ge=1, description="steps of the run, if known: a policy may act otherwise near its end")
    patience_steps: int = Field(10, ge=0, description="steps to wait for an answer before the thresholds stay as they are")
    file: str | None = Field(
        None,
        description="policy file in place of the one that comes with the package; pretrained: what moves the thresholds; rllib, "
        'server "auto": what learning begins with',
    )
    server: str = Field(
        "auto", description='rllib: where the server is, such as "http://host:port"; "auto": rank 0 starts one for this job'
    )
    token_file: str | None = Field(None, description='rllib, server not "auto": the file with its token, readable by you alone')
    run_id: str | None = Field(None, description="rllib: names the job's episode, also after a restart; default: drawn anew")
    deadline_s: float = Field(5.0, gt=0, le=3600, description="rllib: seconds for one request, beside training")
    checkpoint_dir: str | None = Field(None, description='rllib, server "auto": where the policy is kept and gone on from')
    train_batch: int = Field(64, ge=8, le=100_000, description='rllib, server "auto": windows that an update learns from')

    @model_validator(mode="after")
    def _complete(self) -> PolicyConfig:
        if self.type == "rllib" and self.server != "auto" and self.token_file is None:
            raise ValueError("server other than \"auto\" needs token_file, the file that the server was given with --token-file")
        return self


class FreezeConfig(_Strict):
    """The whole block. Only ``enabled`` is required."""

    enabled: bool = Field(description="true: train on FreezePipelineEngine; false: the stock engine")
    seed: int = Field(0, ge=0, description="seed of every random choice")
    warmup_steps: int = Field(20, ge=1, description="steps at the start in which nothing is frozen")
    profile_steps: int = Field(
        8, ge=1, description="steps in which frozen and unfrozen durations are measured side by side"
    )
    ramp_steps: int = Field(20, ge=0, description="steps over which the ratio grows from zero to the plan's")
    replan_interval: int = Field(100, ge=1, description="steps between two plans")
    unit: Literal["parameter", "layer"] = Field(
        "parameter", description="what freezes as one: a parameter tensor or a layer"
    )
    mask_scope: Literal["micro_batch", "step"] = Field(
        "micro_batch",
        description="micro_batch: each has a mask of its own, which costs the least progress; step: one mask for all, which "
        "also saves gradient traffic and optimizer time",
    )
    exclude: list[str] = Field(default_factory=list, description="globs of parameter names that never freeze")
    gradient_rescale: bool = Field(
        True, description="scale a partly frozen unit's gradient to the mean over its live micro-batches"
    )
    selection: Literal["strict", "prefer", "spread"] = Field(
        "strict", description="strict: only eligible units; prefer: eligible ones first; spread: eligibility ignored"
    )
    criterion: CriterionConfig = Field(default_factory=CriterionConfig)
    planning: PlanningConfig = Field(default_factory=PlanningConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)


def parse_block(ds_config: Mapping[str, Any]) -> FreezeConfig | None:
    """The validated block of a DeepSpeed config, or None where there is none.

    Raises:
        ConfigError: names the key, the value found, what is allowed and, for a wrong key, the nearest right one.
    """
    if BLOCK not in ds_config:
        for key in ds_config:
            # DeepSpeed ignores unknown top-level keys without a word, so a misspelt block would silently do nothing.
            if isinstance(key, str) and difflib.get_close_matches(key.lower(), [BLOCK], cutoff=0.85):
                raise ConfigError(f'"{key}" in the DeepSpeed config: no such block; did you mean "{BLOCK}"?')
        return None
    block = ds_config[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigError(f'{BLOCK} = {block!r}: must be an object such as {{"enabled": true}}')
    try:
        return FreezeConfig.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None


def _explain(detail: Any) -> str:
    path = [str(part) for part in detail["loc"]]
    where = ".".join([BLOCK, *path])
    if detail["type"] == "extra_forbidden":
        fields = _fields_of(path[:-1])
        nearest = difflib.get_close_matches(path[-1], fields, n=1, cutoff=0.5)
        hint = f'did you mean "{nearest[0]}"?' if nearest else f"allowed here: {', '.join(sorted(fields))}"
        return f"{where}: no such key; {hint}"
    if detail["type"] == "missing":
        return f'{where}: missing; write {{"{BLOCK}": {{"{path[-1]}": true}}}} or false'
    if detail["type"] == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    field = _model_of(path[:-1]).model_fields.get(path[-1]) if path else None
    meaning = f" ({field.description})" if field is not None and field.description else ""
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{where} = {detail['input']!r}: {message.replace('input should', 'must')}{meaning}"


def _model_of(path: list[str]) -> type[BaseModel]:
    model: type[BaseModel] = FreezeConfig
    for part in path:
        field = model.model_fields.get(part)
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            break
        model = field.annotation
    return model


def _fields_of(path: list[str]) -> list[str]:
    return list(_model_of(path).model_fields)
