"""I and W apart in the engine: the same losses and weights, to the bit, as with whole backwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exact.cells import Cell
from tests.exact.reference import inputs_of
from tests.harness import run_ranks
from tests.split_job import build_mixed, delayed, differing, force_random_masks, state, train, use_order

STEPS = 20
AT_THE_END = 100


def watched_run(cell: Cell, delay: int | None) -> dict[str, Any]:
    """``STEPS`` steps; what they brought, and what ran in the last one."""
    from rlfreeze_ds.engine import BackwardInputPass, BackwardWeightPass

    engine = build_mixed(cell)
    use_order(engine, "stock" if delay is None else f"W {delay} later")
    if cell.masks == "random":
        force_random_masks(engine)
    ran, most_kept = [], 0

    def watch(kind: type) -> Any:
        handler = engine._INSTRUCTION_MAP[kind]

        def run(self: Any, **kwargs: Any) -> None:
            nonlocal most_kept
            ran.append(("I" if kind is BackwardInputPass else "W", kwargs["micro_batch_id"]))
            waiting, given = self._weight_gradients.num_kept, self._weight_gradients.waiting(kwargs["micro_batch_id"])
            handler(self, **kwargs)
            most_kept = max(most_kept, self._weight_gradients.num_kept)
            if kind is BackwardInputPass:
                frozen = {id(p) for unit in kwargs["mask"] for p in self.freeze_controller.units[unit].parameters}
                kept = {id(p) for p in self._weight_gradients.waiting(kwargs["micro_batch_id"])}
                assert not frozen & kept, "a pair of a masked unit was kept"
            else:
                assert self._weight_gradients.num_kept <= waiting
                if type(self.optimizer).__name__ == "BF16_Optimizer":  # else the next I would add it up again, or zeros
                    assert all(parameter.grad is None for parameter in given)

        return run

    engine._INSTRUCTION_MAP = {
        **engine._INSTRUCTION_MAP, **{kind: watch(kind) for kind in (BackwardInputPass, BackwardWeightPass)}
    }  # fmt: skip
    losses, fired = [], dict.fromkeys((name for name, _ in engine.module.named_parameters()), 0)
    for name, parameter in engine.module.named_parameters():

        def count(_: Any, name: str = name) -> None:
            fired[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    for step in range(STEPS):
        ran.clear()
        losses += train(engine, cell, range(step, step + 1))
    timing = engine.freeze_controller.history._recent or engine.freeze_controller.history._calibration
    return {
        "losses": losses, "state": state(engine, cell), "fired": fired, "ran": ran, "most kept": most_kept,
        "timed": sorted(timing[-1].timing.with_whole_backwards().seconds),
    }  # fmt: skip


def split_job(cells: list[Cell], delays: list[int]) -> dict[str, Any]:
    found = {}
    for cell in cells:
        whole = watched_run(cell, None)
        assert whole["ran"] == [] and whole["most kept"] == 0
        for delay in delays:
            split = watched_run(cell, delay)
            where = f"{cell.name}, W {delay} later"
            assert split["losses"] == whole["losses"], where
            assert split["fired"] == whole["fired"] and any(whole["fired"].values()), where
            assert differing(whole["state"], split["state"]) == [], where
            assert split["timed"] == whole["timed"]
            assert split["most kept"] > 0
            found[where] = split["ran"]
    return found


def order(num_micro_batches: int, delay: int) -> list[tuple[str, int]]:
    ran = []
    for m in range(num_micro_batches):
        ran.append(("I", m))
        ran += [("W", m - delay)] if m >= delay else []
    return ran + [("W", m) for m in range(max(0, num_micro_batches - delay), num_micro_batches)]


CELLS = [
    Cell("fp32", "sgd"),
    Cell("fp32", "adamw", clip=0.05),
    Cell("fp32", "adamw", tied=True, masks="no", clip=None),
    Cell("fp32", "adamw", checkpointing=(1, True)),
    Cell("fp32", "momentum", checkpointing=(2, False)),
    Cell("fp32 zero1", "adamw"),
    Cell("bf16", "adamw", clip=0.05),
    Cell("bf16", "adamw", tied=True),
    Cell("bf16 zero1", "adamw", tied=True, clip=0.05),
    Cell("bf16 zero1", "adamw", checkpointing=(1, True)),
    Cell("bf16 zero1 fp32-accum", "adamw"),
    Cell("bf16", "adamw", settings=(("immediate_grad_update", True),)),
]


@pytest.mark.parametrize(
    ("cells", "delays"),
    [(CELLS[:5], [0, 1, 2, AT_THE_END]), (CELLS[5:], [0, 2, AT_THE_END])],
    ids=["fp32", "zero and bf16"],
)
def test_losses_and_weights_are_those_of_whole_backwards(cells: list[Cell], delays: list[int]) -> None:
    for found in run_ranks(split_job, 2, cells, delays):
        assert len(found) == len(cells) * len(delays)
        for where, ran in found.items():
            assert ran == order(4, int(where.split()[-2])), where


def test_with_data_parallel_replicas() -> None:
    cells = [Cell(mode, dp=2, stages=1, clip=0.05) for mode in ("fp32", "bf16", "bf16 zero1")]
    assert all(len(found) == 6 for found in run_ranks(split_job, 2, cells, [0, 2]))


# -- what else a job does --------------------------------------------------------------------------------------------------


def watched_job() -> dict[str, Any]:
    """The profiler's kinds, in a run with evaluations between the steps."""
    found: dict[str, Any] = {}
    for delay in (None, 1):
        engine = build_mixed(Cell("fp32"))
        use_order(engine, "stock" if delay is None else f"W {delay} later")
        seen: list[Any] = []
        end_step = engine.freeze_controller.end_step

        def watched(masks: Any, loss: Any, timings: Any, *args: Any, sink: Any = seen, end: Any = end_step, **kw: Any) -> None:
            sink.extend(timings)
            end(masks, loss, timings, *args, **kw)

        engine.freeze_controller.end_step = watched
        losses = []
        for step in range(3):
            losses.append(float(engine.train_batch(iter([inputs_of(Cell(), step, m, 0) for m in range(4)]))))
            losses.append(float(engine.eval_batch(iter([inputs_of(Cell(), 99, m, 0) for m in range(4)]))))
        found[str(delay)] = {"kinds": sorted(seen[-1].seconds), "losses": losses, "timing": seen[-1]}
    return found


def test_i_and_w_are_timed_and_evaluations_are_untouched() -> None:
    for found in run_ranks(watched_job, 2):
        assert found["None"]["losses"] == found["1"]["losses"]
        assert found["None"]["kinds"] == [(kind, m) for kind in "BF" for m in range(4)]
        assert found["1"]["kinds"] == [(kind, m) for kind in "FIW" for m in range(4)]
        timing = found["1"]["timing"]
        assert all(0 < seconds < timing.makespan_s for seconds in timing.seconds.values())
        whole = timing.with_whole_backwards().seconds
        assert whole[("B", 1)] == timing.seconds[("I", 1)] + timing.seconds[("W", 1)] and len(whole) == 8


def refusal_job() -> list[str]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    from rlfreeze_ds.errors import UnsupportedError

    cell, messages = Cell("fp32", stages=1), []
    engine = build_mixed(cell)
    engine._config.activation_checkpointing_config.contiguous_memory_optimization = True
    with pytest.raises(UnsupportedError) as caught:
        engine._split_backwards(delayed(1, 1))
    messages.append(str(caught.value))
    train(engine, cell, range(1))
    engine._config.activation_checkpointing_config.contiguous_memory_optimization = False
    engine._split_backwards(delayed(1, 1))
    checkpointing.CONTIGUOUS_CHECKPOINTING = True  # as checkpointing.configure does
    with pytest.raises(UnsupportedError) as caught:
        train(engine, cell, range(1, 2))
    return [*messages, str(caught.value)]


def test_a_mode_that_overwrites_kept_inputs_is_refused() -> None:
    (messages,) = run_ranks(refusal_job, 1)
    assert len(messages) == 2
    assert all("activation_checkpointing.contiguous_memory_optimization" in message for message in messages)
