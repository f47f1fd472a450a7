"""A schedule as the CSV of torch.distributed.pipelining, without communication (``format="compute_only"``).

One row a rank, rank 0 first, cells in execution order: ``2F0`` is the forward of micro-batch 0 on stage 2, ``B`` a full
backward, ``I`` and ``W`` one for the input and one for the weights. An empty cell is a slot in which the rank waits.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.atomic_write import write_text
from rlfreeze_ds.planning.dag import build_graph, cycle_message, find_cycle
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule, find_problem

_FORMAT = "one row a rank, with cells such as 0F0, 1B3, 0I2 or 0W2"


def read_schedule_csv(path: str | Path) -> Schedule:
    """Read what torch's schedules write with ``_dump_csv(path, format="compute_only")``, or :func:`write_schedule_csv`.

    Empty cells are skipped: when a rank waits follows from the durations.

    Raises:
        ScheduleError: the file cannot be read, a cell is no such action, or the rows are not one whole batch that can
            run; with file, row and cell, counted from 1.
    """
    ranks: list[tuple[Instruction, ...]] = []
    places: dict[Instruction, str] = {}
    for row_number, row in enumerate(_read_rows(path), start=1):
        order = []
        for cell_number, cell in enumerate(row, start=1):
            if not cell.strip():
                continue
            place = f"row {row_number}, cell {cell_number}"
            instruction = _parse(f"{path}, {place}", cell.strip())
            if instruction in places:
                raise ScheduleError(
                    f"{path}, {place}: {instruction} is in {places[instruction]} already; each action runs once, remove "
                    "one of the two."
                )
            places[instruction] = place
            order.append(instruction)
        if not order:
            raise ScheduleError(
                f"{path}, row {row_number}: no action; a row is the order of one rank, and each rank runs at least one "
                "stage. Fill the row or remove it."
            )
        ranks.append(tuple(order))
    problem = find_problem(ranks)
    if problem is not None:
        raise ScheduleError(f"{_where(path, problem.instructions, places)}: {problem.message}")
    schedule = Schedule(tuple(ranks))
    cycle = find_cycle(build_graph(schedule))
    if cycle:
        raise ScheduleError(f"{_where(path, cycle, places)}: {cycle_message(cycle)}")
    return schedule


def write_schedule_csv(path: str | Path, schedule: Schedule) -> None:
    """Write what :func:`read_schedule_csv` reads back as the same schedule, and torch's ``_load_csv`` reads as well.

    Raises:
        ScheduleError: a rank has no instruction, or the instructions wait for each other.
        RLFreezeError: the place cannot be written; an old file there stays as it was.
    """
    for rank, instructions in enumerate(schedule.ranks):
        if not instructions:
            raise ScheduleError(f"rank {rank} has no instruction: each rank runs at least one stage, leave it out.")
    if not schedule.ranks:
        raise ScheduleError("the schedule has no rank: a schedule CSV has at least one row, give a schedule with ranks.")
    cycle = find_cycle(build_graph(schedule))
    if cycle:
        raise ScheduleError(cycle_message(cycle))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.ranks)
    write_text(path, text.getvalue())


def _read_rows(path: str | Path) -> list[list[str]]:
    """The cells of every row; blank lines at the end are no rows."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except OSError as error:
        raise ScheduleError(
            f"{path}: cannot be read ({error.strerror}); give the path of a schedule CSV, {_FORMAT}."
        ) from None
    except ValueError:
        raise ScheduleError(f"{path}: is not UTF-8 text; give a schedule CSV, {_FORMAT}.") from None
    reader = csv.reader(io.StringIO(text))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise ScheduleError(
            f"{path}, row {reader.line_num}: {error}; give plain comma-separated text, {_FORMAT}."
        ) from None
    while rows and not "".join(rows[-1]).strip() and len(rows[-1]) <= 1:  # a row of commas is a rank without actions
        rows.pop()
    if not rows:
        raise ScheduleError(f"{path}, row 1: the file is empty; give a schedule CSV, {_FORMAT}.")
    return rows


def _parse(where: str, cell: str) -> Instruction:
    try:
        return Instruction.parse(cell)
    except ScheduleError:
        pass
    what = repr(cell) if len(cell) <= 40 else repr(cell[:40]) + "..."
    if cell.endswith("OVERLAP_F_B"):
        advice = "An overlapped forward and backward are two cells here, the forward first."
    elif any(name in cell for name in ("SEND_", "RECV_", "UNSHARD", "RESHARD", "REDUCE_GRAD")):
        advice = 'That is communication, which follows from the order: have torch write the file with format="compute_only".'
    else:
        advice = "Correct the cell, or empty it if the rank waits there."
    raise ScheduleError(
        f"{where}: {what} is not allowed; must be <stage><kind><micro-batch> with kind F (forward), B (full backward), "
        f"I (backward for the input) or W (backward for the weights), such as 2F0, or empty. {advice}"
    )


def _where(path: str | Path, instructions: tuple[Instruction, ...], places: dict[Instruction, str]) -> str:
    return f"{path}, {'; '.join(places[instruction] for instruction in instructions)}"
