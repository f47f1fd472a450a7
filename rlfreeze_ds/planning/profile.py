"""A measured batch as CSV: the schedule and the seconds of each of its instructions.

One row an instruction, ``rank,stage_id,micro_batch_id,kind,unfrozen_s,frozen_s``, rows in each rank's execution order
(rows of different ranks may be interleaved).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

from rlfreeze_ds.errors import ProfileError
from rlfreeze_ds.planning.atomic_write import write_text
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import build_graph, cycle_message, find_cycle
from rlfreeze_ds.planning.instruction import KINDS, Instruction
from rlfreeze_ds.planning.schedule import Schedule, find_problem

COLUMNS = ("rank", "stage_id", "micro_batch_id", "kind", "unfrozen_s", "frozen_s")

_INTEGER = re.compile(r"[0-9]{1,9}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)


def read_profile(path: str | Path) -> tuple[Schedule, Costs]:
    """Read a profile; the transfer seconds, which the CSV does not hold, are 0.

    Raises:
        ProfileError: the file cannot be read, a row is wrong, or the rows are not one whole batch; with file and line.
    """
    rows = _read_rows(path)
    header = next(rows, None)
    if header is None:
        raise ProfileError(f"{path}, line 1: the file is empty; the first line must be {','.join(COLUMNS)}.")
    columns = _column_positions(path, *header)
    ranks: dict[int, list[Instruction]] = {}
    lines: dict[Instruction, int] = {}
    durations: dict[Instruction, Duration] = {}
    for line, row in rows:
        where = f"{path}, line {line}"
        if len(row) != len(COLUMNS):
            raise ProfileError(f"{where}: {len(row)} fields; each row has the {len(COLUMNS)}: {','.join(COLUMNS)}.")
        fields = {name: row[position].strip() for name, position in columns.items()}
        rank, stage_id, micro_batch_id = (_integer(where, name, fields[name]) for name in COLUMNS[:3])
        if fields["kind"] not in KINDS:
            raise ProfileError(
                f"{where}: kind = {fields['kind']!r}; must be one of {', '.join(KINDS)} "
                "(forward, full backward, backward for the input, backward for the weights)."
            )
        instruction = Instruction(stage_id, micro_batch_id, fields["kind"])
        if instruction in lines:
            raise ProfileError(f"{where}: {instruction} is on line {lines[instruction]} already; remove one of them.")
        unfrozen_s, frozen_s = (_seconds(where, name, fields[name]) for name in COLUMNS[4:])
        lines[instruction] = line
        durations[instruction] = Duration(unfrozen_s, frozen_s)
        ranks.setdefault(rank, []).append(instruction)
    if not ranks:
        raise ProfileError(f"{path}, line {header[0]}: no row after the header; add a row for each instruction.")
    return _schedule(path, ranks, lines), Costs(durations)


def write_profile(path: str | Path, schedule: Schedule, costs: Costs) -> None:
    """Write what :func:`read_profile` reads back exactly. ``costs.transfer_s`` has no column and is not written.

    Raises:
        ProfileError: the costs do not fit the schedule.
        RLFreezeError: the place cannot be written; an old file there stays as it was.
    """
    costs.check(schedule.instructions)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rank, instructions in enumerate(schedule.ranks):
        for i in instructions:
            duration = costs.durations[i]
            seconds = (repr(float(duration.unfrozen_s)), repr(float(duration.frozen_s)))
            writer.writerow((rank, i.stage_id, i.micro_batch_id, i.kind, *seconds))
    write_text(path, text.getvalue())


def _read_rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every line that is not blank."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror}); give the path of a profile CSV.") from None
    except ValueError:
        raise ProfileError(f"{path}: is not UTF-8 text; give a CSV with the columns {','.join(COLUMNS)}.") from None
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            if any(field.strip() for field in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise ProfileError(f"{path}, line {reader.line_num}: {error}; give plain comma-separated text.") from None


def _column_positions(path: str | Path, line: int, header: list[str]) -> dict[str, int]:
    names = [name.strip() for name in header]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ProfileError(
            f"{path}, line {line}: column {', '.join(missing)} is missing; "
            f"the header must be {','.join(COLUMNS)}, found {','.join(names)}."
        )
    if len(names) != len(COLUMNS):
        extra = [name for index, name in enumerate(names) if name not in COLUMNS or name in names[:index]]
        raise ProfileError(
            f"{path}, line {line}: column {', '.join(map(repr, extra))} is unknown or there twice; "
            f"the header must be {','.join(COLUMNS)}."
        )
    return {name: names.index(name) for name in COLUMNS}


def _integer(where: str, name: str, text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ProfileError(f"{where}: {name} = {text!r}; must be a whole number counted from 0.")
    return int(text)


def _seconds(where: str, name: str, text: str) -> float:
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ProfileError(f"{where}: {name} = {text!r}; must be a finite number of seconds >= 0.")
    return number


def _schedule(path: str | Path, ranks: dict[int, list[Instruction]], lines: dict[Instruction, int]) -> Schedule:
    for expected, rank in enumerate(sorted(ranks)):
        if rank != expected:
            raise ProfileError(
                f"{path}, line {lines[ranks[rank][0]]}: there is a rank {rank} but no rank {expected}; "
                "ranks count from 0 without gaps, add the missing rank or renumber."
            )
    order = tuple(tuple(ranks[rank]) for rank in sorted(ranks))
    problem = find_problem(order)
    if problem is not None:
        raise ProfileError(f"{_place(path, problem.instructions, lines)}: {problem.message}")
    schedule = Schedule(order)
    cycle = find_cycle(build_graph(schedule))
    if cycle:
        raise ProfileError(f"{_place(path, cycle, lines)}: {cycle_message(cycle)}")
    return schedule


def _place(path: str | Path, instructions: tuple[Instruction, ...], lines: dict[Instruction, int]) -> str:
    numbers = [str(lines[instruction]) for instruction in instructions]
    return f"{path}, line{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
