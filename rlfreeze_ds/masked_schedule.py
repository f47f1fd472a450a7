"""The schedule that the engine runs: DeepSpeed's, with a mask in every forward and backward, and backwards in two if need be."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds_schedule

from rlfreeze_ds.freezing.masks import Mask
from rlfreeze_ds.history import StepMasks
from rlfreeze_ds.planning.schedule import command_name

_NEEDS_GRADIENTS = (ds_schedule.ReduceTiedGrads, ds_schedule.ReduceGrads, ds_schedule.OptimizerStep)


class MaskedForwardPass(ds_schedule.ForwardPass):
    """A ForwardPass that knows its micro-batch and what is frozen for it."""

    def __init__(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        super().__init__(buffer_id, micro_batch_id=micro_batch_id, mask=mask)


class MaskedBackwardPass(ds_schedule.BackwardPass):
    """A BackwardPass that knows its micro-batch and what is frozen for it."""

    def __init__(self, buffer_id: int, micro_batch_id: int, mask: Mask) -> None:
        super().__init__(buffer_id, micro_batch_id=micro_batch_id, mask=mask)


class BackwardInputPass(MaskedBackwardPass):
    """I: the part of a backward that the stage before waits for."""


class BackwardWeightPass(ds_schedule.PipeInstruction):
    """W: the rest of the backward of a micro-batch. It needs no pipe buffer any more."""

    def __init__(self, micro_batch_id: int) -> None:
        super().__init__(micro_batch_id=micro_batch_id)


class MaskedSchedule:
    """A training schedule whose forward and backward passes carry masks; everything else passes through.

    Args:
        weight_delay: None leaves the backwards whole. Else each is an I, and its W comes after the I of so many micro-batches
            later, at the latest before the gradients are reduced.
    """

    def __init__(
        self, pipe_schedule: ds_schedule.PipeSchedule, step_masks: StepMasks, weight_delay: int | None = None
    ) -> None:
        self._schedule = pipe_schedule
        self._masks = step_masks.masks
        self._weight_delay = weight_delay
        self.order: list[str] = []
        """What ran so far, in the words of :func:`rlfreeze_ds.planning.schedule.from_commands`."""

    def num_pipe_buffers(self) -> int:
        """As the wrapped schedule."""
        return self._schedule.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[ds_schedule.PipeInstruction]]:
        # A mask belongs to a micro-batch, and stock instructions carry only a cyclic buffer_id: count them.
        num_forward = num_backward = num_weight = 0
        for commands in self._schedule:
            masked_commands: list[ds_schedule.PipeInstruction] = []
            for command in commands:
                name = command_name(command)
                if name is not None:
                    self.order.append(name)
                if type(command) is ds_schedule.ForwardPass:
                    command = MaskedForwardPass(command.buffer_id, num_forward, self._masks[num_forward])
                    num_forward += 1
                elif type(command) is ds_schedule.BackwardPass:
                    kind = MaskedBackwardPass if self._weight_delay is None else BackwardInputPass
                    command = kind(command.buffer_id, num_backward, self._masks[num_backward])
                    num_backward += 1
                due = 0
                if self._weight_delay is not None:
                    ends = isinstance(command, _NEEDS_GRADIENTS)
                    due = num_backward if ends else num_backward - self._weight_delay
                late = [BackwardWeightPass(micro_batch_id) for micro_batch_id in range(num_weight, due)]
                num_weight += len(late)
                masked_commands += [command, *late] if isinstance(command, BackwardInputPass) else [*late, command]
            yield masked_commands
