"""ZB-H1 in the engine: no rank waits for ever, buffers hold what they should, losses and weights are those of whole backwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import TrainSchedule

from rlfreeze_ds.history import StepMasks
from rlfreeze_ds.masked_schedule import SplitSchedule
from rlfreeze_ds.planning.builders import zb_h1
from rlfreeze_ds.planning.schedule import from_commands, from_pipe_schedules, to_commands
from rlfreeze_ds.planning.transfers import blocking_zb_h1
from tests import jobs
from tests.harness import run_ranks
from tests.orders import drawn, searched
from tests.split_job import use_order

SIZES = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in range(1, 17)]
ALL_DONE = ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]


class Rank:
    """What DeepSpeed's engine holds on one rank, by micro-batch in place of tensors."""

    def __init__(self, schedule: Any) -> None:
        self.commands = [command for commands in schedule for command in commands]
        self.inputs: list[Any] = [None] * schedule.num_pipe_buffers()
        self.outputs: list[Any] = [None] * schedule.num_pipe_buffers()
        self.received_gradient = self.loss = None
        self.forwards, self.backwards, self.weights = [], [], []
        self.loaded = 0

    def compute(self, command: Any, is_first: bool, is_last: bool) -> None:
        """Anything but a transfer."""
        name, buffer_id = command.name, getattr(command, "buffer_id", None)
        if name == "LoadMicroBatch":
            if is_first:
                self.inputs[buffer_id] = self.loaded
            self.loaded += 1
        elif name == "MaskedForwardPass":
            assert self.inputs[buffer_id] == command.micro_batch_id == len(self.forwards)
            assert self.outputs[buffer_id] is None and command.mask == (command.micro_batch_id,)
            self.outputs[buffer_id] = self.loss = command.micro_batch_id
            self.forwards.append(command.micro_batch_id)
        elif name == "BackwardInputPass":
            gradient = self.loss if is_last else self.received_gradient
            assert gradient == self.outputs[buffer_id] == command.micro_batch_id, "the loss or gradient of another"
            assert command.micro_batch_id == len(self.backwards)
            assert command.mask == (command.micro_batch_id,)
            self.outputs[buffer_id] = self.received_gradient = None
            self.backwards.append(command.micro_batch_id)
        elif name == "MaskedBackwardPass":
            gradient = self.loss if is_last else self.received_gradient
            assert gradient == self.outputs[buffer_id] == command.micro_batch_id, "the loss or gradient of another"
            assert command.mask == (command.micro_batch_id,)
            self.outputs[buffer_id] = self.received_gradient = None
            self.backwards.append(command.micro_batch_id)
            self.weights.append(command.micro_batch_id)
        elif name == "BackwardWeightPass":
            assert command.micro_batch_id == len(self.weights) < len(self.backwards), "a W before its I"
            self.weights.append(command.micro_batch_id)
        else:
            assert name in ALL_DONE and len(self.weights) == len(self.forwards)


def transfer(sender: Rank, receiver: Rank, send: Any, receive: Any) -> None:
    """Both ends of one, at the same time."""
    if send.name == "SendActivation":
        assert receiver.inputs[receive.buffer_id] is None, "an input that is still needed would be overwritten"
        receiver.inputs[receive.buffer_id] = sender.outputs[send.buffer_id]
        assert receiver.inputs[receive.buffer_id] is not None
    else:
        assert receiver.received_gradient is None, "a gradient that is still needed would be overwritten"
        assert sender.inputs[send.buffer_id] in sender.backwards
        receiver.received_gradient = sender.inputs[send.buffer_id]
        sender.inputs[send.buffer_id] = None
        assert receiver.outputs[receive.buffer_id] == receiver.received_gradient


def play(schedules: Sequence[Any]) -> list[Rank]:
    """Run the commands of all ranks; a send or receive waits until the neighbour is at its other end.

    Raises:
        AssertionError: a buffer does not hold what a command needs, or the ranks wait for each other.
    """
    ranks, at = [Rank(schedule) for schedule in schedules], [0] * len(schedules)
    ends = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}

    def now(stage: int) -> Any:
        return ranks[stage].commands[at[stage]] if at[stage] < len(ranks[stage].commands) else None

    moved = True
    while moved:
        moved = False
        for stage, rank in enumerate(ranks):
            while (command := now(stage)) is not None and not command.name.startswith("Recv"):
                if command.name in ends:
                    expected, away = ends[command.name]
                    other = now(stage + away)
                    if other is None or other.name != expected:
                        break
                    transfer(rank, ranks[stage + away], command, other)
                    at[stage + away] += 1
                else:
                    rank.compute(command, stage == 0, stage + 1 == len(ranks))
                at[stage] += 1
                moved = True
    stuck = [f"stage {stage} at {now(stage)!r}" for stage in range(len(ranks)) if now(stage) is not None]
    assert not stuck, stuck
    return ranks


def schedules_of(orders: Sequence[str], num_micro_batches: int) -> list[SplitSchedule]:
    masks = StepMasks(0, "test", tuple((m,) for m in range(num_micro_batches)))
    return [SplitSchedule(order, stage, len(orders), masks) for stage, order in enumerate(orders)]


def check(orders: Sequence[str], num_micro_batches: int) -> None:
    """Every micro-batch once through every rank, the optimizer last."""
    for rank in play(schedules_of(orders, num_micro_batches)):
        every = list(range(num_micro_batches))
        assert rank.forwards == rank.backwards == rank.weights == every
        assert [command.name for command in rank.commands[-3:]] == ALL_DONE


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_no_rank_waits_for_ever_and_buffers_hold_what_is_needed(num_stages: int) -> None:
    for num_micro_batches in range(1, 17):
        check(to_commands(blocking_zb_h1(num_stages, num_micro_batches)), num_micro_batches)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_nor_in_any_order_that_can_run(num_stages: int) -> None:
    for num_micro_batches in range(1, 17):
        check(drawn(num_stages, num_micro_batches, seed=num_micro_batches), num_micro_batches)


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches"),
    [(1, 3), (2, 1), (2, 7), (3, 8), (4, 1), (4, 2), (4, 16), (5, 4), (6, 9), (7, 3), (8, 16)],
)
def test_nor_in_orders_searched_for_random_seconds(num_stages: int, num_micro_batches: int) -> None:
    for extra in (0, 1, 3):
        check(
            searched(num_stages, num_micro_batches, seed=10 * num_stages + extra, extra=extra, num_moves=150), num_micro_batches
        )


def test_no_more_buffers_than_stock_and_the_order_of_zb_h1() -> None:
    for num_stages, num_micro_batches in SIZES:
        orders = to_commands(blocking_zb_h1(num_stages, num_micro_batches))
        assert from_pipe_schedules(schedules_of(orders, num_micro_batches)) == from_commands(orders)
        assert from_commands(orders).ranks == zb_h1(num_stages, num_micro_batches).ranks
        for stage, schedule in enumerate(schedules_of(orders, num_micro_batches)):
            assert schedule.num_pipe_buffers() <= TrainSchedule(num_micro_batches, num_stages, stage).num_pipe_buffers()


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        (("F SA RG I W F SA RG I W", "RA F I W SG RA F I W"), "stage 0 at RecvGrad"),
        (("F SA F SA RG I W RG I W", "RA F RA F I I SG SG W W"), "the loss or gradient of another"),  # one loss on the last stage
        (("F SA F SA RG RG I I W W", "RA F I RA F I SG SG W W"), "a gradient that is still needed"),
        (("F F SA RG SA I W RG I W", "RA F I RA SG F I SG W W"), "stage 0 at RecvGrad.*stage 1 at RecvActivation"),
        (("F SA RG W I", "RA F I SG W"), "a W before its I"),
    ],
)
def test_the_checks_above_can_fail(orders: tuple[str, ...], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check(orders, orders[0].split().count("F"))


# -- for real ------------------------------------------------------------------------------------------------------------


ORDERS = ("stock", "zb-h1", "searched", "drawn")


def job(num_stages: int, sizes: Iterable[int], steps: int) -> dict[str, Any]:
    """Losses and weights in every order, and what the engine says that it ran last."""
    import rlfreeze_ds

    found: dict[str, Any] = {}
    for num_micro_batches in sizes:
        for name in ORDERS:
            schedule = name if name in ("stock", "zb-h1") else "stock"
            block = {"enabled": True, "planning": {"schedule": schedule, "max_freeze_ratio": 0}}
            config = jobs.ds_config(num_micro_batches, rlfreeze=block)
            engine = rlfreeze_ds.initialize(model=jobs.pipeline(num_stages, 2 * num_stages), config=config)[0]
            if name != schedule:
                use_order(engine, name)
            losses = []
            for step in range(steps):
                losses.append(float(engine.train_batch(jobs.batches(step, num_micro_batches))))
                if step == 1:
                    losses.append(float(engine.eval_batch(jobs.batches(99, num_micro_batches))))
            found[f"{num_micro_batches} {name}"] = (losses, jobs.weights(engine), engine._order)
    return found


@pytest.mark.parametrize("num_stages", [2, 4])
def test_losses_and_weights_are_those_of_whole_backwards(num_stages: int) -> None:
    sizes, steps = (1, 2, 3, 8), 4
    for stage, found in enumerate(run_ranks(job, num_stages, num_stages, sizes, steps)):
        for num_micro_batches in sizes:
            whole, *split = (found[f"{num_micro_batches} {name}"] for name in ORDERS)
            for losses, weights, _ in split:
                assert whole[0] == losses and whole[1].keys() == weights.keys()
                assert all(torch.equal(whole[1][name], weights[name]) for name in weights)
            assert "I" not in whole[2].split()
            assert [order for _, _, order in split] == [
                to_commands(blocking_zb_h1(num_stages, num_micro_batches))[stage],
                searched(num_stages, num_micro_batches, num_moves=100)[stage],
                drawn(num_stages, num_micro_batches, steps - 1)[stage],
            ]
