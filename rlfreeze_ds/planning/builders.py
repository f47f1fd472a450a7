"""Known pipeline schedules, for any number of ranks and micro-batches.

tF, tB, tI, tW are the seconds of one F, B, I, W of one stage, the same for every stage; P ranks, M micro-batches; no
transfer time. A bubble is the idle time of a rank, from the first F of the batch to its last backward.

| builder          | stages a rank     | bubble                                   | most micro-batches held, rank r     |
| ---------------- | ----------------- | ---------------------------------------- | ----------------------------------- |
| gpipe            | 1                 | (P - 1) (tF + tB)                        | M                                   |
| one_f_one_b      | 1                 | (P - 1) (tF + tB)                        | P - r                               |
| interleaved_1f1b | v, each 1/v large | (P - 1) (tF + tB), of such small stages  | (v + 1) P - 1 - 2 r, of such stages |
| zb_h1            | 1                 | (P - 1) max(tF + tI - tW, tF, tI)        | P                                   |
| zbv              | 2, each half      | (P - 1) tF when tF = tI = tW             | 2 P, of such half stages            |

A stage holds a micro-batch's activations from its F to its B or W (never more than the batch has). The table is for M >= P;
for interleaved_1f1b with M a multiple of P, and for zbv with M >= 2 P - 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe (Huang et al., 2019) with one stage a rank: every forward, then every backward from the last to the first.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_stages, num_micro_batches)
    forward, backward = range(num_micro_batches), range(num_micro_batches)[::-1]
    return Schedule(tuple(tuple(_run(s, "F", forward) + _run(s, "B", backward)) for s in range(num_stages)))


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with one stage a rank, in the order of ``deepspeed.runtime.pipe.schedule.TrainSchedule``.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_stages, num_micro_batches)
    every = range(num_micro_batches)
    return Schedule(
        tuple(
            tuple(_alternate(_run(s, "F", every), _run(s, "B", every), num_stages - 1 - s)) for s in range(num_stages)
        )
    )


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2) with ``num_chunks`` stages a rank.

    Stage s is on rank s % num_ranks. Micro-batches go round in groups: a rank runs a group through its first stage, then
    the same group through its next one, and so on. Groups are as large as the pipeline is long when num_micro_batches is
    a multiple of num_ranks, as Megatron-LM asks. As torch's ``ScheduleInterleaved1F1B`` does, any number that splits into
    num_micro_batches // num_ranks equal groups is taken, and any number below 2 * num_ranks, as one group.

    Below num_ranks micro-batches the bubble is that of num_ranks * num_chunks stages in a row.

    Raises:
        ScheduleError: a count below 1, fewer than 2 chunks, or micro-batches that make no equal groups.
    """
    _check_counts(num_ranks, num_micro_batches)
    if num_chunks < 2:
        raise ScheduleError(
            f"interleaved 1F1B with {num_chunks} chunks a rank: must be at least 2; for one stage a rank use one_f_one_b."
        )
    num_groups = _num_groups(num_ranks, num_micro_batches)
    if num_micro_batches % num_groups:
        below = next(m for m in count(num_micro_batches, -1) if m % _num_groups(num_ranks, m) == 0)
        above = next(m for m in count(num_micro_batches) if m % _num_groups(num_ranks, m) == 0)
        raise ScheduleError(
            f"interleaved 1F1B of {num_micro_batches} micro-batches on {num_ranks} ranks: they must split into "
            f"{num_micro_batches} // {num_ranks} = {num_groups} equal groups, as every multiple of {num_ranks} does; "
            f"the nearest that do are {below} and {above}, use one of them."
        )
    group_size = num_micro_batches // num_groups
    groups = [range(first, first + group_size) for first in range(0, num_micro_batches, group_size)]
    ranks = []
    for rank in range(num_ranks):
        stages = [chunk * num_ranks + rank for chunk in range(num_chunks)]
        forwards = [i for group in groups for s in stages for i in _run(s, "F", group)]
        backwards = [i for group in groups for s in reversed(stages) for i in _run(s, "B", group)]
        # Up to the last stage's first backward; a rank further from it needs two more per hop, one out and one back.
        num_ahead = (num_chunks - 1) * group_size + 2 * (num_ranks - 1 - rank)
        ranks.append(tuple(_alternate(forwards, backwards, num_ahead)))
    return Schedule(tuple(ranks))


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241) with one stage a rank.

    1F1B with the backward split. The next rank's I no longer waits for W, and rank r keeps its last r W's for the time
    in which it has nothing else left to do. No rank holds more micro-batches than the first rank does under 1F1B.

    The paper gives its bubble as (num_ranks - 1) (tF + tI - tW). That holds while tW <= min(tF, tI); a longer W cannot
    push the bubble below (num_ranks - 1) max(tF, tI), since the last rank waits for its first F and the first rank for
    its first I.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_ranks, num_micro_batches)
    every = range(num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        order: list[Instruction] = []
        for instruction in _alternate(_run(rank, "F", every), _run(rank, "I", every), num_ranks - 1 - rank):
            order.append(instruction)
            if instruction.kind == "I" and instruction.micro_batch_id >= rank:
                order.append(Instruction(rank, instruction.micro_batch_id - rank, "W"))
        ranks.append(tuple(order + _run(rank, "W", every[max(0, num_micro_batches - rank) :])))
    return Schedule(tuple(ranks))


def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6): two stages a rank, as a V.

    Stage s is on rank s below num_ranks, and on rank 2 * num_ranks - 1 - s from there on: the first rank has the first
    stage and the last. When F, I and W take the same time and there are at least 2 * num_ranks - 1 micro-batches, no rank
    waits between its first and its last instruction; rank r starts, and ends, r * tF after the first rank. With other
    times, or fewer micro-batches, the order is as valid but ranks wait.

    Raises:
        ScheduleError: a count below 1.
    """
    _check_counts(num_ranks, num_micro_batches)
    # The order needs this many to fill the V; a smaller batch runs it without the micro-batches that it has not got.
    num_filling = max(num_micro_batches, 2 * num_ranks - 1)
    ranks = []
    for rank in range(num_ranks):
        # Small letters: the stage on the way out; capital letters: the stage on the way back.
        hops = num_ranks - 1 - rank
        phases = (
            "f" * (2 * hops + 1),  # until the first micro-batch is back
            "Ff" * rank,
            "FIW" * (hops + 1),  # until the first gradient is back
            "fiwFIW" * (num_filling - num_ranks - hops),
            "iwFIW" * hops,  # no new micro-batch is left
            "iI" * rank,  # input gradients first, other ranks wait for them
            "iw" * (hops + 1),
            "W" * rank + "w" * rank,
        )
        counts: Counter[str] = Counter()
        order = []
        for letter in "".join(phases):
            stage_id = rank if letter.islower() else 2 * num_ranks - 1 - rank
            if counts[letter] < num_micro_batches:
                order.append(Instruction(stage_id, counts[letter], letter.upper()))
            counts[letter] += 1
        ranks.append(tuple(order))
    return Schedule(tuple(ranks))


def _run(stage_id: int, kind: str, micro_batch_ids: Sequence[int]) -> list[Instruction]:
    return [Instruction(stage_id, micro_batch_id, kind) for micro_batch_id in micro_batch_ids]


def _alternate(forwards: list[Instruction], backwards: list[Instruction], num_ahead: int) -> list[Instruction]:
    """``num_ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    order = forwards[:num_ahead]
    for index, backward in enumerate(backwards, start=num_ahead):
        order += [*forwards[index : index + 1], backward]
    return order


def _num_groups(num_ranks: int, num_micro_batches: int) -> int:
    return max(1, num_micro_batches // num_ranks)


def _check_counts(num_ranks: int, num_micro_batches: int) -> None:
    if num_ranks < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"a pipeline of {num_ranks} ranks and {num_micro_batches} micro-batches: both must be at least 1."
        )
