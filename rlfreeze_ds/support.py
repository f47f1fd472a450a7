"""What rlfreeze refuses, and says so on every rank before a job has cost anything: where frozen would not be exactly frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.module import PipelineModule

from rlfreeze_ds.control_group import ControlGroup
from rlfreeze_ds.errors import UnsupportedError
from rlfreeze_ds.freezing.optimizer import check_optimizer


def check_supported_call(model: Any) -> None:
    """Refuse a model that has no pipeline schedule.

    Raises:
        UnsupportedError
    """
    if not isinstance(model, PipelineModule):
        raise UnsupportedError(
            f'"rlfreeze" is enabled, but the model is a {type(model).__name__}: masks are put into a pipeline schedule, so the '
            'model must be a deepspeed.pipe.PipelineModule (one stage is enough). Wrap it, or set "rlfreeze": {"enabled": false}.'
        )
    if type(model).__name__ == "DualPipeVModule":
        raise UnsupportedError(
            '"rlfreeze" does not drive the DualPipeV schedule; use a PipelineModule, or disable "rlfreeze".'
        )


def check_something_to_train(module: Any, config: Any, model_parameters: Sequence[Any] | None) -> None:
    """An optimizer over nothing fails, and would leave the ranks of the other stages waiting. Collective where that can be.

    Raises:
        UnsupportedError: on every rank.
    """
    zero_stage = int(getattr(config, "zero_optimization_stage", 0) or 0)
    low = _enabled(config, "bfloat16_config", "bfloat16_enabled") or _enabled(config, "float16_config", "fp16_enabled")
    if model_parameters is not None:
        count, what = len(model_parameters), "model_parameters is empty"
        instead = "Leave model_parameters out (then frozen parameters stay as they are)"
    elif zero_stage or low:
        count, what = sum(p.requires_grad for p in module.parameters()), "no parameter requires a gradient"
        instead = "Use fp32 without ZeRO"
    else:
        return
    group = ControlGroup()
    reports = group.broadcast(group.gather((module.stage_id, count)))
    empty = sorted({stage for stage, found in reports if found == 0})
    if empty:
        raise UnsupportedError(
            f"{what} on stage {', '.join(map(str, empty))}: all of its parameters have requires_grad False, and DeepSpeed cannot "
            f"make an optimizer there. {instead}, cut the stages differently, or train something of the stage."
        )


def check_supported_config(config: Any) -> None:
    """Refuse, before anything is built, a mode in which frozen would not be exactly frozen.

    Raises:
        UnsupportedError
    """
    zero_stage = int(getattr(config, "zero_optimization_stage", 0) or 0)
    if zero_stage > 1:
        raise UnsupportedError(
            f"zero_optimization.stage = {zero_stage}: DeepSpeed's pipeline engine works with stages 0 and 1 only. Set "
            '"zero_optimization": {"stage": 1}.'
        )
    zero = getattr(config, "zero_config", None)
    offload = getattr(getattr(zero, "offload_optimizer", None), "device", None)
    if offload is not None and str(getattr(offload, "value", offload)) != "none":
        raise UnsupportedError(
            f"zero_optimization.offload_optimizer.device = {getattr(offload, 'value', offload)}: an offloaded step takes another "
            'way, on which freezing was not tried. Remove "offload_optimizer", or disable "rlfreeze".'
        )
    if getattr(zero, "zenflow", None) is not None:
        raise UnsupportedError(
            'zero_optimization.zenflow: it updates parameters out of step. Remove "zenflow", or disable "rlfreeze".'
        )
    if zero_stage == 1 and getattr(zero, "round_robin_gradients", False):
        raise UnsupportedError(
            "zero_optimization.round_robin_gradients = true: it reorders the flat copy, and DeepSpeed's record of where a "
            'parameter lies does not follow. Remove it (with pipelines it brings nothing), or disable "rlfreeze".'
        )
    if _enabled(config, "float16_config", "fp16_enabled") and zero_stage == 0:
        raise UnsupportedError(
            "fp16.enabled = true without ZeRO: DeepSpeed's FP16_Optimizer keeps no record of where a parameter lies in its flat "
            'copy, so it cannot be left alone there. Add "zero_optimization": {"stage": 1}, or use bf16.'
        )
    if getattr(config, "amp_enabled", False):
        raise UnsupportedError('amp.enabled = true: freezing was not tried with Apex. Use "bf16": {"enabled": true}.')
    if getattr(config, "torch_autocast_enabled", False):
        raise UnsupportedError(
            'torch_autocast.enabled = true: freezing was not tried with it. Use "bf16": {"enabled": true}, or disable "rlfreeze".'
        )


def check_split_backward(config: Any) -> None:
    """Refuse a mode in which what a W needs would be overwritten before it runs.

    Raises:
        UnsupportedError
    """
    checkpointing = getattr(config, "activation_checkpointing_config", None)
    # The second: by deepspeed.checkpointing.configure, with no such key in the config.
    if getattr(checkpointing, "contiguous_memory_optimization", False) or ds_checkpointing.CONTIGUOUS_CHECKPOINTING:
        raise UnsupportedError(
            "activation_checkpointing.contiguous_memory_optimization = true: it reuses the memory of inputs, which "
            "a split backward still needs. Set it to false, or leave the backward whole."
        )


def _enabled(config: Any, section: str, flag: str) -> bool:
    """DeepSpeed 0.16 has the flag, later versions the section."""
    enabled = getattr(getattr(config, section, None), "enabled", None)
    return bool(getattr(config, flag, False) if enabled is None else enabled)


def check_supported_engine(engine: Any) -> None:
    """Refuse what only the built engine shows: tensor parallelism, experts, the optimizer.

    Raises:
        UnsupportedError
    """
    if engine.is_model_parallel:
        raise UnsupportedError(
            'tensor parallelism inside a stage: not supported so far. Use one slice, or disable "rlfreeze".'
        )
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedError('mixture-of-experts layers: not supported so far. Disable "rlfreeze".')
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if optimizer is not None and type(optimizer).__name__ != "DummyOptim":  # else the engine only evaluates
        check_optimizer(optimizer)
