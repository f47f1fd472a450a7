"""FreezePipelineEngine: DeepSpeed's PipelineEngine with a freeze mask in every forward and backward of its schedule."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from rlfreeze_ds.checkpoint import load_state, save_state
from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.control_group import ControlGroup
from rlfreeze_ds.controller import FreezeController, StepMasks
from rlfreeze_ds.errors import UnsupportedError
from rlfreeze_ds.freezing.masks import Mask, masked
from rlfreeze_ds.freezing.optimizer import check_optimizer, check_optimizer_config, settle_gradients, thaw
from rlfreeze_ds.freezing.units import find_units, shape_of
from rlfreeze_ds.planning.schedule import Schedule, from_pipe_schedules
from rlfreeze_ds.telemetry.profiler import InstructionProfiler
from rlfreeze_ds.telemetry.run_log import RunLog

RUN_DIR_VARIABLE = "RLFREEZE_RUN_DIR"


class MaskedForwardPass(ds_schedule.ForwardPass):
    """A ForwardPass that knows its micro-batch and what is frozen for it."""

    def __init__(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        super().__init__(buffer_id, micro_batch_id=micro_batch_id, mask=mask)


class MaskedBackwardPass(ds_schedule.BackwardPass):
    """A BackwardPass that knows its micro-batch and what is frozen for it."""

    def __init__(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        super().__init__(buffer_id, micro_batch_id=micro_batch_id, mask=mask)


class MaskedSchedule:
    """A training schedule whose forward and backward passes carry masks; everything else passes through."""

    def __init__(self, pipe_schedule: ds_schedule.PipeSchedule, step_masks: StepMasks) -> None:
        self._schedule = pipe_schedule
        self._masks = step_masks.masks

    def num_pipe_buffers(self) -> int:
        """As the wrapped schedule."""
        return self._schedule.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[ds_schedule.PipeInstruction]]:
        # A mask belongs to a micro-batch, and stock instructions carry only a cyclic buffer_id: count them.
        num_forward = num_backward = 0
        for commands in self._schedule:
            masked_commands = []
            for command in commands:
                if type(command) is ds_schedule.ForwardPass:
                    command = MaskedForwardPass(command.buffer_id, num_forward, self._masks[num_forward])
                    num_forward += 1
                elif type(command) is ds_schedule.BackwardPass:
                    command = MaskedBackwardPass(command.buffer_id, num_backward, self._masks[num_backward])
                    num_backward += 1
                masked_commands.append(command)
            yield masked_commands


class FreezeEngineMixin:
    """What turns a DeepSpeed pipeline engine into a freezing one. ``freeze_config`` is bound by :func:`bind_config`."""

    freeze_config: FreezeConfig
    freeze_controller: FreezeController

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.freeze_config
        check_supported_engine(self)
        units, barrier = find_units(self.module.named_parameters(), config.unit, config.exclude)
        run_log = RunLog(os.environ.get(RUN_DIR_VARIABLE) if self.global_rank == 0 else None)
        self.freeze_controller = FreezeController(
            config, units, shape_of(self.stage_id, units, barrier), torch.device(self.device), run_log
        )
        self._freeze_profiler = InstructionProfiler(torch.device(self.device))
        self._step_masks: StepMasks | None = None
        self._settled: list[torch.nn.Parameter] | None = None

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _exec_schedule(self, pipe_schedule: ds_schedule.PipeSchedule) -> None:
        if isinstance(pipe_schedule, ds_schedule.InferenceSchedule):
            super()._exec_schedule(pipe_schedule)
            return
        self._step_masks = self.freeze_controller.begin_step(self.micro_batches)
        self._settled = None
        try:
            super()._exec_schedule(MaskedSchedule(pipe_schedule, self._step_masks))
        finally:
            thaw(self._settled or ())
        self._pipe_schedule_type = type(pipe_schedule)

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As stock; afterwards the controller takes the step's loss and timings."""
        loss = super().train_batch(data_iter)
        timings = self._freeze_profiler.finish_step(self._step_masks.step)
        self.freeze_controller.end_step(self._step_masks, loss, timings, self._instruction_order())
        return loss

    def _instruction_order(self) -> Schedule:
        """The instruction order of all stages, from the schedule class that the engine really ran."""
        key = (self._pipe_schedule_type, self.micro_batches)
        if getattr(self, "_order_key", None) != key:
            self._order = from_pipe_schedules(
                [
                    self._pipe_schedule_type(micro_batches=self.micro_batches, stages=self.num_stages, stage_id=stage)
                    for stage in range(self.num_stages)
                ]
            )
            self._order_key = key
        return self._order

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock, with the freeze state in a file of its own beside DeepSpeed's."""
        # First, so that "latest" never names a checkpoint that lacks it.
        save_state(self.freeze_controller, os.path.join(save_dir, str(tag or f"global_step{self.global_steps}")))
        return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def load_checkpoint(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """As stock; training then goes on with the plan and the statistics of the checkpoint, where it has them.

        A load without optimizer states begins a new training, so nothing is taken over.
        """
        stock = super().load_checkpoint
        call = inspect.signature(stock).bind(load_dir, *args, **kwargs)
        call.apply_defaults()
        path, client_state = stock(load_dir, *args, **kwargs)
        if path is not None and call.arguments["load_optimizer_states"] and not call.arguments["load_module_only"]:
            load_state(self.freeze_controller, os.path.dirname(path), self.global_steps)
        return path, client_state

    # -- instructions -------------------------------------------------------------------------------------------------

    def _exec_masked_forward(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        with masked(self.freeze_controller.units, mask), self._freeze_profiler.record("F", micro_batch_id):
            _stock(ds_schedule.ForwardPass)(self, buffer_id)

    def _exec_masked_backward(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        with masked(self.freeze_controller.units, mask), self._freeze_profiler.record("B", micro_batch_id):
            if self.is_last_stage():
                if self.loss.requires_grad:
                    _stock(ds_schedule.BackwardPass)(self, buffer_id)
                return
            self._backward_live_outputs(buffer_id)

    def _backward_live_outputs(self, buffer_id: int) -> None:
        """Stock's backward on the outputs that need a gradient. With its whole mask frozen a first stage has none: the
        gradient was received, and there is nothing to do with it."""
        outputs = self.pipe_buffers["outputs"][buffer_id]
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        if all(tensor.requires_grad for tensor in floating):
            _stock(ds_schedule.BackwardPass)(self, buffer_id)
            return
        if not any(tensor.requires_grad for tensor in floating):
            self.pipe_buffers["output_tensors"][buffer_id] = None
            self.pipe_buffers["outputs"][buffer_id] = None
            return
        received = self.grad_layer
        pairs = [(tensor, grad) for tensor, grad in zip(floating, received, strict=True) if tensor.requires_grad]
        self.pipe_buffers["outputs"][buffer_id] = tuple(tensor for tensor, _ in pairs)
        self.grad_layer = [grad for _, grad in pairs]
        try:
            _stock(ds_schedule.BackwardPass)(self, buffer_id)
        finally:
            self.grad_layer = received

    def _exec_settled_reduce_tied_grads(self) -> None:
        self._settle()
        _stock(ds_schedule.ReduceTiedGrads)(self)

    def _exec_settled_reduce_grads(self) -> None:
        self._settle()
        _stock(ds_schedule.ReduceGrads)(self)
        controller = self.freeze_controller
        if (
            controller.step % controller.config.criterion.interval == 0
            and controller.config.planning.max_freeze_ratio > 0
        ):
            controller.criterion.observe(controller.units)

    def _settle(self) -> None:
        """Once a step, before any reduction: the sums of live micro-batches become means, the wholly frozen drop out."""
        if self._settled is None:
            controller = self.freeze_controller
            self._settled = settle_gradients(
                controller.units,
                self._step_masks.live_counts(len(controller.units)),
                len(self._step_masks.masks),
                controller.config.gradient_rescale,
            )

    def clip_fp32_gradients(self) -> None:
        """As stock, also on a stage without a single gradient: it takes part in the collective norm with a zero."""
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            super().clip_fp32_gradients()
            return
        stand_in = next(self.module.parameters())
        stand_in.grad = torch.zeros_like(stand_in)
        try:
            super().clip_fp32_gradients()
        finally:
            stand_in.grad = None


def _stock(instruction: type) -> Callable[..., None]:
    return PipelineEngine._INSTRUCTION_MAP[instruction]


class FreezePipelineEngine(FreezeEngineMixin, PipelineEngine):
    """The drop-in engine. Made by :func:`rlfreeze_ds.initialize`; everything else is ``PipelineEngine``'s."""

    # A copy: the stock map is shared by every engine of the process.
    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        MaskedForwardPass: FreezeEngineMixin._exec_masked_forward,
        MaskedBackwardPass: FreezeEngineMixin._exec_masked_backward,
        ds_schedule.ReduceTiedGrads: FreezeEngineMixin._exec_settled_reduce_tied_grads,
        ds_schedule.ReduceGrads: FreezeEngineMixin._exec_settled_reduce_grads,
    }


def bind_config(config: FreezeConfig) -> Callable[..., FreezePipelineEngine]:
    """What stands in for the name ``PipelineEngine`` during ``deepspeed.initialize``."""

    def build(*args: Any, **kwargs: Any) -> FreezePipelineEngine:
        config_class = kwargs.get("config_class")
        check_supported_config(config_class)
        if kwargs.get("optimizer") is None:
            check_optimizer_config(config_class.optimizer_name, config_class.optimizer_params or {})
            if kwargs.get("model_parameters") is not None:
                kwargs["model_parameters"] = list(kwargs["model_parameters"])
                check_something_to_train(kwargs["model"].stage_id, kwargs["model_parameters"])
        # The config must be there before __init__ runs, and stock's signature must not change.
        engine = FreezePipelineEngine.__new__(FreezePipelineEngine)
        object.__setattr__(engine, "freeze_config", config)
        engine.__init__(*args, **kwargs)
        return engine

    return build


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


def check_something_to_train(stage_id: int, model_parameters: Sequence[Any]) -> None:
    """Collective. An optimizer over nothing fails, and would leave the ranks of the other stages waiting.

    Raises:
        UnsupportedError: on every rank.
    """
    group = ControlGroup()
    reports = group.broadcast(group.gather((stage_id, len(model_parameters))))
    empty = sorted({stage for stage, count in reports if count == 0})
    if empty:
        raise UnsupportedError(
            f"model_parameters is empty on stage {', '.join(map(str, empty))}: no parameter of it has requires_grad, and no "
            "optimizer can be made there. Leave model_parameters out (then frozen parameters stay as they are), cut the stages "
            "differently, or train something of the stage."
        )


def check_supported_config(config: Any) -> None:
    """Refuse, before anything is built, a precision or ZeRO mode in which frozen would not be exactly frozen."""
    stage = int(getattr(config, "zero_optimization_stage", 0) or 0)
    if stage > 0:
        raise UnsupportedError(
            f"zero_optimization.stage = {stage}: "
            + ("pipeline parallelism itself needs stage 0 or 1, and " if stage > 1 else "")
            + 'freezing is exact with stage 0 only so far. Set "zero_optimization": {"stage": 0}, or disable "rlfreeze".'
        )
    for name, attributes in (
        ("fp16", ("float16_config", "fp16_enabled")),
        ("bf16", ("bfloat16_config", "bfloat16_enabled")),
    ):
        section, flag = attributes
        enabled = getattr(getattr(config, section, None), "enabled", None)
        if enabled is None:
            enabled = getattr(config, flag, False)
        if enabled:
            raise UnsupportedError(
                f'{name}.enabled = true: freezing is exact in fp32 only so far. Disable {name} or "rlfreeze".'
            )


def check_supported_engine(engine: Any) -> None:
    """Refuse what only the built engine shows: checkpointing, tied layers, tensor parallelism, the optimizer."""
    module = engine.module
    if module.activation_checkpoint_interval > 0:
        raise UnsupportedError(
            f"activation_checkpoint_interval = {module.activation_checkpoint_interval}: freezing is exact without activation "
            'checkpointing only so far. Set it to 0, or disable "rlfreeze".'
        )
    if module.tied_comms or len(module.tied_modules):
        raise UnsupportedError(
            f'tied layers {sorted(module.tied_modules)}: not supported so far. Untie them (LayerSpec), or disable "rlfreeze".'
        )
    if engine.is_model_parallel:
        raise UnsupportedError(
            'tensor parallelism inside a stage: not supported so far. Use one slice, or disable "rlfreeze".'
        )
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedError('mixture-of-experts layers: not supported so far. Disable "rlfreeze".')
    check_optimizer(engine.optimizer)
