"""The schedule that the engine runs, with a mask in every forward and backward: DeepSpeed's, or one with backwards in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds_schedule

from rlfreeze_ds.freezing.masks import Mask
from rlfreeze_ds.history import StepMasks
from rlfreeze_ds.planning.schedule import command_name

_TRANSFERS = {
    "SA": ds_schedule.SendActivation, "RA": ds_schedule.RecvActivation,
    "SG": ds_schedule.SendGrad, "RG": ds_schedule.RecvGrad,
}  # fmt: skip


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
    """A training schedule whose forward and backward passes carry masks; everything else passes through."""

    def __init__(self, pipe_schedule: ds_schedule.PipeSchedule, step_masks: StepMasks) -> None:
        self._schedule = pipe_schedule
        self._masks = step_masks.masks
        self.order: list[str] = []
        """What ran so far, in the words of :func:`rlfreeze_ds.planning.schedule.from_commands`."""

    def num_pipe_buffers(self) -> int:
        """As the wrapped schedule."""
        return self._schedule.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[ds_schedule.PipeInstruction]]:
        # A mask belongs to a micro-batch, and stock instructions carry only a cyclic buffer_id: count them.
        num_forward = num_backward = 0
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
                    command = MaskedBackwardPass(command.buffer_id, num_backward, self._masks[num_backward])
                    num_backward += 1
                masked_commands.append(command)
            yield masked_commands


class SplitSchedule:
    """A training schedule in an order of its own, with every backward in two (I and W) or none (B).

    The i-th of each kind is of micro-batch i, so the gradients of a weight are added up in the order of a whole backward. Every
    W comes before the gradients are reduced. On the last stage a forward is followed by its own I or B: DeepSpeed keeps one loss.

    Args:
        order: of this stage, in the words of :func:`rlfreeze_ds.planning.schedule.from_commands`. That no rank waits for ever
            is up to whoever made the orders of all stages.
    """

    def __init__(self, order: str, stage_id: int, num_stages: int, step_masks: StepMasks) -> None:
        self.order = order.split()
        self._is_first, self._is_last = stage_id == 0, stage_id + 1 == num_stages
        self._masks = step_masks.masks

    def num_pipe_buffers(self) -> int:
        """The most micro-batches at any time whose input is there and whose input gradient is not yet sent away."""
        begin, ends = ("F", "IB") if self._is_first else ("RA", ("SG",))
        held = most = 0
        for word in self.order:
            held += (word == begin) - (word in ends)
            most = max(most, held)
        return most

    def __iter__(self) -> Iterator[list[ds_schedule.PipeInstruction]]:
        num_buffers = self.num_pipe_buffers()
        counts: Counter[str] = Counter()
        for word in self.order:
            micro_batch_id = counts[word]
            counts[word] += 1
            # Buffers are taken and given back in the order of the micro-batches, so they go round.
            yield self._commands(word, micro_batch_id, micro_batch_id % num_buffers)
        yield [ds_schedule.ReduceTiedGrads(), ds_schedule.ReduceGrads(), ds_schedule.OptimizerStep()]

    def _commands(self, word: str, micro_batch_id: int, buffer_id: int) -> list[ds_schedule.PipeInstruction]:
        if word == "W":
            return [BackwardWeightPass(micro_batch_id)]
        if word == "I":
            return [BackwardInputPass(buffer_id, micro_batch_id, self._masks[micro_batch_id])]
        if word == "B":
            return [MaskedBackwardPass(buffer_id, micro_batch_id, self._masks[micro_batch_id])]
        if word == "F":
            forward = MaskedForwardPass(buffer_id, micro_batch_id, self._masks[micro_batch_id])
            return [ds_schedule.LoadMicroBatch(buffer_id), forward] if self._is_first or self._is_last else [forward]
        return [_TRANSFERS[word](buffer_id)]
