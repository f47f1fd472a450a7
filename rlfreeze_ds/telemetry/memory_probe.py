"""Bytes that the micro-batches of one batch keep alive on this rank: looked at between instructions, in a step now and then.

After a forward the graph of its outputs is walked for what autograd saved. Nothing is hooked into the model, so the step computes
what any other does, and instructions are timed as ever; whether a piece of memory is still there is asked of a weak reference to
it. Not ``saved_tensors_hooks``: under these ``torch.func.grad`` refuses to run and compiled modules are compiled anew. What
a checkpointed part saves is packed away by its own hooks and must not be unpacked, which would compute it again; the inputs that
it keeps are found in the hooks' closure. What cannot be seen is an error here, and no number for the planner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rlfreeze_ds.planning.memory import StageMemory
from rlfreeze_ds.planning.schedule import command_name

_log = logging.getLogger(__name__)

Storages = dict[int, tuple[StorageWeakRef, int]]
"""By an address that stays taken while its weak reference lives: that, and the number of bytes."""


class UnseenMemoryError(Exception):
    """Something is saved where it cannot be seen."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Of one batch on one rank. ``stage`` and ``peak_bytes`` are None where they could not be measured, and ``why`` says why.

    ``complete``: some micro-batch had nothing frozen, so that ``stage`` is what an unfrozen one keeps. ``peak_bytes``: the most
    that was alive between two instructions; ``most_micro_batches`` and ``most_pairs``: counts, each at its own peak.
    """

    stage: StageMemory | None
    peak_bytes: int | None
    most_micro_batches: int = 0
    most_pairs: int = 0
    complete: bool = False
    why: str = ""


class MemoryProbe:
    """Of one batch.

    Args:
        module: whose parameters and buffers are not counted.
        pipe_buffers: DeepSpeed's, a list of slots by name.
        loss: the last micro-batch's on the last stage; None on the others.
        kept: the tensors that wait for their W, of one micro-batch or (None) of all.
        num_pairs: how many pairs these are.
        is_first: the stage receives no input.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        pipe_buffers: Mapping[str, Sequence[Any]],
        loss: Callable[[], Any],
        kept: Callable[[int | None], Iterable[Tensor]],
        num_pairs: Callable[[], int],
        *,
        is_first: bool,
        device: torch.device,
    ) -> None:
        self._pipe_buffers, self._loss, self._kept, self._num_pairs = pipe_buffers, loss, kept, num_pairs
        self._is_first, self._device = is_first, device
        self._fixed = self._storages([*module.parameters(), *module.buffers()])
        self._of: dict[int, Storages] = {}  # by micro-batch, what its forward left alive
        self._watched: dict[int, Storages] = {}  # of that what may be alive; after the backward without what others may hold
        self._labels: dict[int, Storages] = {}
        self._inputs: dict[int, Storages] = {}
        self._gradients: dict[int, Storages] = {}
        self._pairs: dict[int, Storages] = {}
        self._peak_bytes = self._most_micro_batches = self._most_pairs = 0
        self._complete = False
        self._why = ""

    def look(self, command: Any) -> None:
        """``command``, masked where it is an F, B or I, has just run."""
        if self._why:
            return
        try:
            self._look(command)
        except Exception as error:  # a measurement must never stop a job
            _log.debug("memory is not measured", exc_info=True)
            self._why = str(error) if isinstance(error, UnseenMemoryError) else f"{type(error).__name__}: {error}"
            self._forget()

    def result(self) -> MeasuredMemory:
        """After the batch."""
        if self._why:
            return MeasuredMemory(None, None, why=self._why)
        sharing: dict[int, int] = {}
        for storages in self._of.values():
            for key in storages:
                sharing[key] = sharing.get(key, 0) + 1
        shared = {key for key, count in sharing.items() if count > 1}
        everything = {key: storage for storages in self._of.values() for key, storage in storages.items()}

        def most(found: Mapping[int, Storages], without: Mapping[int, Storages] | None = None) -> int:
            sizes = []
            for m, storages in found.items():
                left_out = shared | set((without or {}).get(m, ()))
                sizes.append(sum(size for key, (_, size) in storages.items() if key not in left_out))
            return max(sizes, default=0)

        stage = StageMemory(
            input_bytes=most(self._inputs),
            forward_bytes=most(self._of, self._inputs),
            gradient_bytes=most(self._gradients),
            pair_bytes=most(self._pairs),
            shared_bytes=sum(everything[key][1] for key in shared),
        )
        measured = MeasuredMemory(stage, self._peak_bytes, self._most_micro_batches, self._most_pairs, self._complete)
        self._forget()
        return measured

    def held_bytes(self) -> int:
        """What of the batch is alive now."""
        now = dict[int, int]()
        for storages in self._watched.values():
            now.update((key, size) for key, (ref, size) in storages.items() if not ref.expired())
        tensors = [tensor for slots in self._pipe_buffers.values() for tensor in _tensors_in(list(slots))]
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        now.update((key, size) for key, (_, size) in self._storages([*tensors, *gradients, *self._kept(None)]).items())
        return sum(size for key, size in now.items() if key not in self._fixed)

    def _look(self, command: Any) -> None:
        kind = command_name(command)
        if kind == "F":
            m, buffer_id = command.micro_batch_id, command.buffer_id
            inputs, labels, outputs = (
                list(_tensors_in(self._pipe_buffers[k][buffer_id])) for k in ("inputs", "labels", "outputs")
            )
            loss = list(_tensors_in(self._loss()))
            found = self._storages([*saved_tensors([*outputs, *loss]), *inputs, *labels, *outputs])
            for key in {*self._fixed, *self._storages(loss)}:  # the engine keeps the losses until the next batch
                found.pop(key, None)
            self._of[m], self._watched[m] = found, dict(found)
            self._labels[m] = self._storages(labels)
            self._inputs[m] = {} if self._is_first else self._storages(inputs)
            self._complete = self._complete or not command.mask
        elif kind in ("B", "I"):
            m = command.micro_batch_id
            for key in self._labels[m]:  # on a CPU they are the very tensors that the data came in
                self._watched[m].pop(key, None)
            inputs = _tensors_in(self._pipe_buffers["inputs"][command.buffer_id])
            self._gradients[m] = self._storages([] if self._is_first else [x.grad for x in inputs if x.grad is not None])
            self._pairs[m] = {key: storage for key, storage in self._storages(self._kept(m)).items() if key not in self._fixed}
        self._peak_bytes = max(self._peak_bytes, self.held_bytes())
        self._most_pairs = max(self._most_pairs, self._num_pairs())
        held = sum(any(not ref.expired() for ref, _ in storages.values()) for storages in self._watched.values())
        self._most_micro_batches = max(self._most_micro_batches, held)

    def _storages(self, tensors: Iterable[Tensor]) -> Storages:
        """On the stage's device; what has none, such as a sparse tensor, is not counted."""
        found = Storages()
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                found[ref.cdata] = ref, storage.nbytes()
        return found

    def _forget(self) -> None:
        for found in (self._of, self._watched, self._labels, self._inputs, self._gradients, self._pairs):
            found.clear()


class WatchedSchedule:
    """A DeepSpeed schedule of which ``probe`` looks at each command once whoever iterates comes back for the next."""

    def __init__(self, schedule: Any, probe: MemoryProbe) -> None:
        self._schedule, self._probe = schedule, probe

    def num_pipe_buffers(self) -> int:
        """As the watched schedule."""
        return self._schedule.num_pipe_buffers()

    def __iter__(self) -> Iterator[Iterator[Any]]:
        return map(self._each, self._schedule)

    def _each(self, commands: Iterable[Any]) -> Iterator[Any]:
        for command in commands:
            yield command
            self._probe.look(command)


# -- what a graph holds --------------------------------------------------------------------------------------------------------


def saved_tensors(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """What the graph of ``outputs`` keeps for its backward, some of it more than once; nothing is unpacked.

    Raises:
        UnseenMemoryError: a node keeps it in a place of its own, or this version of torch does not show it.
    """
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield from _kept_by(node)
        waiting += [other for other, _ in node.next_functions if other is not None]


def _kept_by(node: Any) -> Iterator[Tensor]:
    if type(node).__name__ == "CppFunction":
        raise UnseenMemoryError(f"what {node.name()}, a function of an extension in C++, saves cannot be seen")
    for name in _raw_names(type(node)):
        value = getattr(node, name)
        for saved in value if isinstance(value, (tuple, list)) else (value,):
            if saved is not None:
                yield from _packed_in(node, saved)
    yield from _tensors_in(list(vars(node).values()) if hasattr(node, "__dict__") else [])


def _packed_in(node: Any, saved: Any) -> Iterator[Tensor]:
    if not hasattr(saved, "unpack_hook"):
        raise UnseenMemoryError(f"torch {torch.__version__} does not show what autograd saved")
    if saved.unpack_hook is None or torch.is_tensor(saved.data):
        yield from _tensors_in(saved.data)
        return
    hook = saved.unpack_hook
    found = list(_tensors_in(saved.data))
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # an empty one
            continue
        found += _tensors_in(content)
        # The frame of torch.utils.checkpoint has the inputs, in earlier versions on a node of their own.
        saver = getattr(content, "input_saver", None)
        if torch.is_tensor(saver) and saver.grad_fn is not None:
            found += _kept_by(saver.grad_fn)
        for argument in getattr(content, "saved_args", ()):
            found += _tensors_in(argument) if not hasattr(argument, "unpack_hook") else _packed_in(node, argument)
    if not found:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise UnseenMemoryError(f"what {node.name()} saves is packed away by a hook, {name}")
    yield from found


@cache
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """In nested tuples, lists and dictionaries."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif type(value) is dict:
        yield from _tensors_in(list(value.values()))
