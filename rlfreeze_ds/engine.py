"""FreezePipelineEngine: DeepSpeed's PipelineEngine with a freeze mask in every forward and backward of its schedule."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from rlfreeze_ds import bf16_checkpoint
from rlfreeze_ds.checkpoint import load_state, save_state
from rlfreeze_ds.config import FreezeConfig
from rlfreeze_ds.controller import FreezeController, StepMasks
from rlfreeze_ds.freezing.gradients import Bf16Gradients, find_gradients, settle_gradients, unit_norms
from rlfreeze_ds.freezing.masks import Mask, masked
from rlfreeze_ds.freezing.optimizer import check_optimizer_config, find_step_hooks
from rlfreeze_ds.freezing.units import find_units, shape_of
from rlfreeze_ds.freezing.weight_gradients import WeightGradients
from rlfreeze_ds.masked_schedule import (
    BackwardInputPass,
    BackwardWeightPass,
    MaskedBackwardPass,
    MaskedForwardPass,
    MaskedSchedule,
    SplitSchedule,
)
from rlfreeze_ds.planning.schedule import to_commands
from rlfreeze_ds.planning.transfers import blocking_zb_h1
from rlfreeze_ds.support import (
    check_something_to_train,
    check_split_backward,
    check_supported_config,
    check_supported_engine,
)
from rlfreeze_ds.telemetry.memory_probe import MemoryProbe, WatchedSchedule
from rlfreeze_ds.telemetry.profiler import InstructionProfiler
from rlfreeze_ds.telemetry.run_log import RunLog

RUN_DIR_VARIABLE = "RLFREEZE_RUN_DIR"
# Tied weights never freeze: a copy that froze alone would leave the others waiting in their all-reduce.
TIED = "tied_modules.*"


class FreezeEngineMixin:
    """What turns a DeepSpeed pipeline engine into a freezing one. ``freeze_config`` is bound by :func:`bind_config`."""

    freeze_config: FreezeConfig
    freeze_controller: FreezeController

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.freeze_config
        check_supported_engine(self)
        self._gradients = find_gradients(self.optimizer)
        self._step_hooks = find_step_hooks(self.optimizer)
        optimized = self._gradients.parameters()
        units, barrier = find_units(
            self.module.named_parameters(), config.unit, [*config.exclude, TIED], optimized=optimized
        )
        trainable = sum(parameter.requires_grad for parameter in self.module.parameters())
        has_others = trainable > sum(len(unit.parameters) for unit in units)
        self._mask_now: Mask = ()
        self._weight_gradients = WeightGradients(
            [parameter for parameter in self.module.parameters() if id(parameter) in optimized]
        )
        self._orders: Callable[[int], Sequence[str]] | None = None
        self._splits = False  # whether backwards run in two, in the batch that runs now
        self._memory_probe: MemoryProbe | None = None
        if config.planning.schedule != "stock":
            num_stages = self.num_stages
            self._split_backwards(cache(lambda num_micro_batches: to_commands(blocking_zb_h1(num_stages, num_micro_batches))))
        checkpoint = self.module.activation_checkpoint_func
        if checkpoint is not ds_checkpointing.non_reentrant_checkpoint:
            self.module.activation_checkpoint_func = self._keeping_gradients(checkpoint)
            if self.module.activation_checkpoint_interval > 0:
                barrier = 0  # every input gets a gradient, so no frozen prefix saves any
        run_log = RunLog(os.environ.get(RUN_DIR_VARIABLE) if self.global_rank == 0 else None)
        self.freeze_controller = FreezeController(
            config,
            units,
            shape_of(self.stage_id, units, barrier, has_others=has_others),
            torch.device(self.device),
            run_log,
            normalised=not isinstance(getattr(self.optimizer, "optimizer", self.optimizer), torch.optim.SGD),
        )
        self._freeze_profiler = InstructionProfiler(torch.device(self.device))
        self._step_masks: StepMasks | None = None
        self._settled = False

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _split_backwards(self, orders: Callable[[int], Sequence[str]] | None) -> None:
        """From the next batch on. None leaves backwards whole, in the order of stock's schedule.

        Args:
            orders: of all stages for a number of micro-batches, each in the words of ``planning.schedule.from_commands``.

        Raises:
            UnsupportedError
        """
        if orders is not None:
            check_split_backward(self._config)
        self._orders = orders

    def _exec_schedule(self, pipe_schedule: ds_schedule.PipeSchedule) -> None:
        if isinstance(pipe_schedule, ds_schedule.InferenceSchedule):
            super()._exec_schedule(pipe_schedule)
            return
        if self._orders is not None:
            check_split_backward(self._config)  # again: it can be configured at any time
        self._step_masks = self.freeze_controller.begin_step(self.micro_batches)
        self._settled = self._observed = False
        self._freeze_profiler.start_step()
        if self._orders is None:
            schedule = MaskedSchedule(pipe_schedule, self._step_masks)
        else:
            orders = self.freeze_controller.orders(self.micro_batches) or self._orders(self.micro_batches)
            schedule = SplitSchedule(orders[self.stage_id], self.stage_id, self.num_stages, self._step_masks)
        self._splits = "W" in schedule.order
        self._memory_probe = self._new_memory_probe() if self.freeze_controller.memory.due else None
        try:
            super()._exec_schedule(schedule if self._memory_probe is None else WatchedSchedule(schedule, self._memory_probe))
            self._freeze_profiler.end_schedule()
        except BaseException:
            self._abandon_batch()
            raise
        finally:
            self._weight_gradients.clear()
            self._gradients.finish()
            if self._step_hooks is not None:
                self._step_hooks.finish()
        if self._observed and not self._step_applied:
            self.freeze_controller.forget_gradients()
        self._order = " ".join(schedule.order)

    def _abandon_batch(self) -> None:
        """After an error in it: none of its activations stays alive, and its gradients count for no statistics."""
        for buffers in self.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        self.loss = None
        if self._observed:
            self.freeze_controller.forget_gradients()

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As stock; afterwards the controller takes the step's loss and timings."""
        loss = super().train_batch(data_iter)
        timings = self._freeze_profiler.finish_step(self._step_masks.step)
        if self._memory_probe is not None:
            self.freeze_controller.take_memory(self._memory_probe.result(), self._order)
            self._memory_probe = None
        self.freeze_controller.end_step(self._step_masks, loss, timings, self._order, applied=self._step_applied)
        return loss

    def destroy(self) -> None:
        """As stock; what works beside training ends too."""
        if "freeze_controller" in vars(self):
            self.freeze_controller.close()
        super().destroy()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock, with the freeze state in a file of its own beside DeepSpeed's."""
        folder = os.path.join(save_dir, str(f"global_step{self.global_steps}" if tag is None else tag))
        # First, so that "latest" never names a checkpoint that lacks it.
        save_state(self.freeze_controller, folder)
        return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def load_checkpoint(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """As stock; training then goes on with the plan and the statistics of the checkpoint, where it has them.

        A load without optimizer states begins a new training, so nothing is taken over.
        """
        stock = super().load_checkpoint
        call = inspect.signature(stock).bind(load_dir, *args, **kwargs)
        call.apply_defaults()
        complete = call.arguments["load_optimizer_states"] and not call.arguments["load_module_only"]
        bf16 = bf16_checkpoint.needed(self)
        with bf16_checkpoint.loading_partitions(self) if bf16 else nullcontext():
            path, client_state = stock(load_dir, *args, **kwargs)
        if path is not None and bf16 and not complete:
            self.optimizer.refresh_fp32_params()
        if path is not None and complete:
            load_state(self.freeze_controller, os.path.dirname(path), self.global_steps)
        return path, client_state

    # -- instructions -------------------------------------------------------------------------------------------------

    def _exec_masked_forward(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        self._mask_now = mask
        catching = self._weight_gradients.forward() if self._splits else nullcontext()
        with masked(self.freeze_controller.units, mask), catching, self._freeze_profiler.record("F", micro_batch_id):
            _stock(ds_schedule.ForwardPass)(self, buffer_id)

    def _exec_masked_backward(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        self._mask_now = mask
        with masked(self.freeze_controller.units, mask), self._freeze_profiler.record("B", micro_batch_id):
            self._backward_live(buffer_id)
        self._empty(buffer_id)

    def _exec_recv_grads_apart(self, buffer_id: int) -> None:
        """Stock receives activations and gradients in the same memory. In its own order a gradient is used up at once; in
        others an activation may come before its I."""
        _stock(ds_schedule.RecvGrad)(self, buffer_id)
        if self._orders is not None:
            used = {tensor.untyped_storage().data_ptr() for tensor in _tensors(self.pipe_recv_buf)}
            if any(tensor.untyped_storage().data_ptr() in used for tensor in _tensors(self.grad_layer)):
                # Later gradients are received in the copy.
                copies = [tensor.clone() for tensor in _tensors(self.grad_layer)]
                self.grad_layer = copies[0] if torch.is_tensor(self.grad_layer) else copies

    def _exec_backward_input(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        self._mask_now = mask
        # The next gradient is received in the same memory.
        received = () if self.is_last_stage() else _tensors(self.grad_layer)
        with masked(self.freeze_controller.units, mask), self._freeze_profiler.record("I", micro_batch_id):
            with self._weight_gradients.backward(micro_batch_id, received):
                self._backward_live(buffer_id)
        self._empty(buffer_id)

    def _exec_backward_weight(self, micro_batch_id: int) -> None:
        with self._freeze_profiler.record("W", micro_batch_id):
            self._running_engine_backward = True  # as in stock's backward of a stage, for the hooks of ZeRO
            try:
                with self._gradients.late_backward(self._weight_gradients.waiting(micro_batch_id)):
                    self._weight_gradients.run(micro_batch_id)
            finally:
                self._running_engine_backward = False

    def _empty(self, buffer_id: int) -> None:
        """After a backward. Stock keeps the inputs of the first stage and what the last one made, logits too, until some later
        micro-batch, or the next batch, comes to the same slot; and with the loss a graph, at whose end the received input is."""
        emptied = ("labels", "outputs", "inputs") if self.is_first_stage() else ("labels", "outputs")
        for name in emptied:
            self.pipe_buffers[name][buffer_id] = None
        if self.is_last_stage() and torch.is_tensor(self.loss):
            self.loss = self.loss.detach()

    def _new_memory_probe(self) -> MemoryProbe:
        weight_gradients = self._weight_gradients
        return MemoryProbe(
            self.module,
            self.pipe_buffers,
            lambda: self.loss if self.is_last_stage() else None,
            weight_gradients.kept,
            lambda: weight_gradients.num_kept,
            is_first=self.is_first_stage(),
            device=torch.device(self.device),
        )

    def _backward_live(self, buffer_id: int) -> None:
        """Stock's backward of what needs one."""
        if not self.is_last_stage():
            self._backward_live_outputs(buffer_id)
        elif self.loss.requires_grad:
            _stock(ds_schedule.BackwardPass)(self, buffer_id)

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

    def _keeping_gradients(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A reentrant ``checkpoint`` that also gives gradients to parameters behind an input that needs none.

        Reentrant checkpointing drops them without an error. In stock training the first layers always make such an input need
        a gradient; where a mask froze these layers nothing does.
        """

        def checkpointed(function: Callable[..., Any], *inputs: Any) -> Any:
            if self._mask_now and torch.is_grad_enabled():
                if not any(torch.is_tensor(x) and x.requires_grad for x in inputs):
                    inputs = tuple(
                        x.detach().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs
                    )
            return checkpoint(function, *inputs)

        return checkpointed

    def _exec_settled_reduce_tied_grads(self) -> None:
        self._settle()
        _stock(ds_schedule.ReduceTiedGrads)(self)

    def _exec_settled_reduce_grads(self) -> None:
        self._settle()
        _stock(ds_schedule.ReduceGrads)(self)
        if isinstance(self._gradients, Bf16Gradients):
            self._gradients.stand_in()
        controller = self.freeze_controller
        if controller.freezes and controller.step % controller.config.criterion.interval == 0:
            norms = unit_norms(
                self._gradients,
                controller.units,
                self._step_masks.live_counts(len(controller.units)),
                torch.device(self.device),
                float(getattr(self.optimizer, "loss_scale", 1.0)),
                self._sum_over_replicas,
            )
            controller.observe_gradients(norms, self._step_masks, self.dp_world_size)
            self._observed = True

    def _sum_over_replicas(self, tensor: torch.Tensor) -> None:
        if self.is_data_parallel:
            dist.all_reduce(tensor, group=self.grid.get_data_parallel_group())

    def _settle(self) -> None:
        """Once a step, before any reduction: the sums of live micro-batches become means, the wholly frozen drop out."""
        if self._settled:
            return
        self._settled = True
        controller = self.freeze_controller
        dropped = settle_gradients(
            self._gradients,
            controller.units,
            self._step_masks.live_counts(len(controller.units)),
            len(self._step_masks.masks),
            controller.config.gradient_rescale,
        )
        if self._step_hooks is not None:
            self._step_hooks.freeze(dropped)

    def clip_fp32_gradients(self) -> None:
        """As stock, also on a stage without a single gradient: it takes part in the collective norm with a zero.

        Stock's norm is that of the first stage alone. With all of that frozen it would clip nothing, so then it is the norm
        of all stages.
        """
        live = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in live]
        if self.freeze_controller.first_stage_frozen(self.micro_batches):
            # Of tied copies the first stage that has one counts it.
            counted = [parameter.grad for parameter in live if not getattr(parameter, "ds_pipe_replicated", False)]
            squares = [norm.square() for norm in torch._foreach_norm(counted)] if counted else []
            total = torch.stack([torch.zeros((), device=self.device), *squares]).sum()
            dist.all_reduce(total, group=self.mpu.get_model_parallel_group())
            if gradients:
                torch._foreach_mul_(gradients, (self.gradient_clipping() / (total.sqrt() + 1e-6)).clamp(max=1.0))
        elif gradients:
            super().clip_fp32_gradients()
        else:
            stand_in = next(self.module.parameters())
            stand_in.grad = torch.zeros_like(stand_in)
            try:
                super().clip_fp32_gradients()
            finally:
                stand_in.grad = None


def _stock(instruction: type) -> Callable[..., None]:
    return PipelineEngine._INSTRUCTION_MAP[instruction]


def _tensors(buffers: torch.Tensor | Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
    """What DeepSpeed receives in: nothing yet, a tensor, or several."""
    return () if buffers is None else (buffers,) if torch.is_tensor(buffers) else buffers


class FreezePipelineEngine(FreezeEngineMixin, PipelineEngine):
    """The drop-in engine. Made by :func:`rlfreeze_ds.initialize`; everything else is ``PipelineEngine``'s."""

    # A copy: the stock map is shared by every engine of the process.
    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        MaskedForwardPass: FreezeEngineMixin._exec_masked_forward,
        MaskedBackwardPass: FreezeEngineMixin._exec_masked_backward,
        BackwardInputPass: FreezeEngineMixin._exec_backward_input,
        BackwardWeightPass: FreezeEngineMixin._exec_backward_weight,
        ds_schedule.RecvGrad: FreezeEngineMixin._exec_recv_grads_apart,
        ds_schedule.ReduceTiedGrads: FreezeEngineMixin._exec_settled_reduce_tied_grads,
        ds_schedule.ReduceGrads: FreezeEngineMixin._exec_settled_reduce_grads,
    }


def bind_config(config: FreezeConfig) -> Callable[..., FreezePipelineEngine]:
    """What stands in for the name ``PipelineEngine`` during ``deepspeed.initialize``."""

    def build(*args: Any, **kwargs: Any) -> FreezePipelineEngine:
        config_class = kwargs.get("config_class")
        check_supported_config(config_class)
        if kwargs.get("optimizer") is None:
            check_optimizer_config(config_class.optimizer_name)
            if kwargs.get("model_parameters") is not None:
                kwargs["model_parameters"] = list(kwargs["model_parameters"])
            check_something_to_train(kwargs["model"], config_class, kwargs.get("model_parameters"))
        # The config must be there before __init__ runs, and stock's signature must not change.
        engine = FreezePipelineEngine.__new__(FreezePipelineEngine)
        object.__setattr__(engine, "freeze_config", config)
        engine.__init__(*args, **kwargs)
        return engine

    return build
