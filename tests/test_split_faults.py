"""An error in the middle of a batch with backwards in two: nothing of the batch stays behind, and the next one is as ever."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe import schedule as ds_schedule
from torch.nn import functional

from rlfreeze_ds.planning.planned_order import common_order, ranks_of
from rlfreeze_ds.planning.schedule import command_name, from_commands
from tests.exact.cells import Cell, Layer
from tests.harness import run_ranks
from tests.split_job import build_mixed, differing, force_random_masks, state, train, use_order

FUNCTIONS = {name: getattr(functional, name) for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d")}


class Fault(Exception):
    """Of a test."""


class Faults:
    """Makes an engine fail at the ``left``-th word of its order from now, wherever in the work of an F, I or W a hook can."""

    def __init__(self, engine: Any) -> None:
        self.left: int | None = None
        self.now = ""
        self.words: list[str] = []
        self.alive: list[int] = []
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self._engine = engine
        engine._INSTRUCTION_MAP = {kind: self._wrapped(kind, handler) for kind, handler in engine._INSTRUCTION_MAP.items()}
        for layer in engine.module.forward_funcs:
            layer.register_forward_hook(self._forward)
            layer.linear.weight.register_post_accumulate_grad_hook(lambda _: self._fail("W"))

    def _forward(self, layer: Any, inputs: Any, output: torch.Tensor) -> None:
        self.seen.append(weakref.ref(output))
        if layer is self._engine.module.forward_funcs[-1]:
            self._fail("F")
        if output.requires_grad and layer is self._engine.module.forward_funcs[0]:
            output.register_hook(lambda _: self._fail("I"))

    def _fail(self, word: str) -> None:
        if self.now == word:
            self._note()
            raise Fault(word)

    def _note(self) -> None:
        split = self._engine._weight_gradients
        self.seen += [weakref.ref(t) for pairs in split._kept.values() for pair in pairs for t in (pair.x, pair.gradient)]
        self.alive.append(sum(ref() is not None for ref in self.seen))
        self.words.append(self.now)

    def _wrapped(self, kind: type, handler: Any) -> Any:
        def run(engine: Any, **kwargs: Any) -> None:
            word = command_name(kind.__new__(kind))
            if word is None and kind is not ds_schedule.ReduceGrads:
                handler(engine, **kwargs)
                return
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.now = word or "reduce"
                    if self.now in ("F", "I", "W", "reduce"):
                        handler(engine, **kwargs)
                    self._fail(self.now)
            handler(engine, **kwargs)

        return run

    def fail_in(self, cell: Cell, step: int, left: int) -> str:
        """Train into the fault. What is still there afterwards, in words."""
        self.left, self.seen = left, []
        try:
            train(self._engine, cell, range(step, step + 1))
        except Fault as fault:
            caught = str(fault)
        self.left, self.now = None, ""
        if any(ref() is not None for ref in self.seen):
            gc.collect()
        return left_behind(self._engine, self.seen) or caught


def left_behind(engine: Any, tensors: list[weakref.ref[torch.Tensor]]) -> str:
    """What an engine still has of a batch that ended with an error; nothing where all is well."""
    found = {
        "pairs": engine._weight_gradients.num_kept > 0,
        "activations": any(ref() is not None for ref in tensors),
        "pipe buffers": any(slot is not None for slots in engine.pipe_buffers.values() for slot in slots),
        "a loss": engine.loss is not None and engine.loss.grad_fn is not None,
        "parameters without requires_grad": not all(p.requires_grad for p in engine.module.parameters()),
        "a replaced function": any(getattr(functional, name) is not function for name, function in FUNCTIONS.items()),
        "a replaced reduction": "get_grads_for_reduction" in vars(engine.optimizer),
        "a backward that goes on": engine._weight_gradients._backward_of is not None,
    }
    return ", ".join(name for name, there in found.items() if there)


def go_on(engine: Any) -> None:
    """What a user has to do on the stock engine too."""
    engine.timers("train_batch").stop()
    engine.optimizer.zero_grad()


# -- every rank fails, at the same place of the common order ---------------------------------------------------------------


def cuts(orders: tuple[str, ...]) -> list[list[int]]:
    """How many words each rank has run, at every place of the common order."""
    num_run = [0] * len(orders)
    found = [list(num_run)]
    for event in common_order(from_commands(orders)):
        for rank in ranks_of(event):
            num_run[rank] += 1
        found.append(list(num_run))
    return found


def interrupted_job(cells: list[Cell], order: str) -> dict[str, Any]:
    found = {}
    for cell in cells:
        undisturbed, engine = build_mixed(cell, Layer), build_mixed(cell, Layer)
        for each in (undisturbed, engine):
            force_random_masks(each)
            use_order(each, order)
        faults = Faults(engine)
        places = cuts(tuple(engine._orders(cell.micro_batches)))
        texts, losses = [], []
        for step, place in enumerate(places):
            texts.append(faults.fail_in(cell, step, place[engine.stage_id]))
            go_on(engine)
            losses.append((train(engine, cell, range(step, step + 1)), train(undisturbed, cell, range(step, step + 1))))
        found[cell.name] = {
            "places": len(places), "texts": texts, "alive": max(faults.alive), "words": set(faults.words),
            "losses": [step for step, (one, other) in enumerate(losses) if one != other],
            "state": differing(state(engine, cell), state(undisturbed, cell)),
        }  # fmt: skip
    return found


@pytest.mark.parametrize(("num_stages", "order"), [(1, "W 2 later"), (2, "zb-h1")])
def test_an_error_anywhere_in_a_batch_leaves_nothing_behind(num_stages: int, order: str) -> None:
    cells = [Cell(mode, stages=num_stages) for mode in ("fp32", "bf16" if num_stages == 1 else "bf16 zero1")]
    for found in run_ranks(interrupted_job, num_stages, cells, order):
        assert len(found) == len(cells)
        for name, run in found.items():
            words = {"F", "I", "W", "reduce"}
            assert words <= run["words"] and (num_stages == 1 or len(run["words"]) > len(words)), name
            assert set(run["texts"]) <= run["words"] and len(run["texts"]) == run["places"], (name, run["texts"])
            assert run["alive"] > 5, "nothing would have been seen"
            assert run["losses"] == [] and run["state"] == [], name


# -- one rank fails --------------------------------------------------------------------------------------------------------


def peer_job(word: str) -> dict[str, Any]:
    """The last stage fails in its second ``word`` and ends its connections; the first notices."""
    cell = Cell("fp32")
    engine = build_mixed(cell, Layer, schedule="zb-h1")
    force_random_masks(engine)
    faults = Faults(engine)
    train(engine, cell, range(2))
    words = engine._order.split()
    if engine.stage_id == 1:
        left = [place for place, other in enumerate(words) if other == word][1]
        text = faults.fail_in(cell, 2, left)
        torch.distributed.destroy_process_group()
        return {"text": text}
    started = time.monotonic()
    try:
        train(engine, cell, range(2, 3))
    except RuntimeError as error:
        text = str(error)
    gc.collect()
    return {"text": text, "left": left_behind(engine, faults.seen), "seconds": time.monotonic() - started}


@pytest.mark.parametrize("word", ["F", "W", "SG"])
def test_the_peer_of_a_rank_that_fails_gets_an_error_and_keeps_nothing(word: str) -> None:
    first, last = run_ranks(peer_job, 2, word)
    assert last["text"] == word
    assert first["text"] and first["left"] == "" and first["seconds"] < 60


def uncaught_job() -> None:
    engine = build_mixed(Cell("fp32"), Layer, schedule="zb-h1")
    faults = Faults(engine)
    faults.left = 9 if engine.stage_id == 1 else None
    train(engine, Cell("fp32"), range(1))


def test_an_error_that_nobody_catches_ends_the_job() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 failed first(.|\n)*Fault"):
        run_ranks(uncaught_job, 2)
    assert time.monotonic() - started < 100
