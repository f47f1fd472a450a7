from functools import partial
from pathlib import Path

import pytest

from rlfreeze_ds.errors import RLFreezeError, ScheduleError
from rlfreeze_ds.planning.builders import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zbv
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import Schedule
from rlfreeze_ds.planning.schedule_csv import read_schedule_csv, write_schedule_csv

GOLDENS = Path(__file__).parents[1] / "assets" / "schedules"
GOOD = ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]
BUILDS = [
    (gpipe, 1),
    (one_f_one_b, 1),
    (zb_h1, 1),
    (partial(interleaved_1f1b, num_chunks=2), 2),
    (zbv, 2),
]


def schedule(*ranks: str) -> Schedule:
    return Schedule(tuple(tuple(map(Instruction.parse, rank.split())) for rank in ranks))


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "order.csv"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def changed(row: int, text: str) -> list[str]:
    return [*GOOD[: row - 1], text, *GOOD[row:]]


def test_rows_are_ranks_cells_are_in_order_and_idle_slots_are_skipped(tmp_path: Path) -> None:
    expected = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert read_schedule_csv(write(tmp_path, GOOD)) == expected


def test_a_file_of_torch_with_idle_slots_and_split_backwards() -> None:
    built = read_schedule_csv(GOLDENS / "zbv_p3_m2.csv")
    assert (built.num_ranks, built.num_stages, built.num_micro_batches) == (3, 6, 2)
    assert [built.rank_of(stage_id) for stage_id in range(6)] == [0, 1, 2, 2, 1, 0]
    assert " ".join(map(str, built.ranks[2])) == "2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1"


def test_spaces_line_ends_blank_lines_at_the_end_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_bytes("\ufeff 0F0 ,0B0\r\n\"1F0\",, 1B0,\r\n\r\n  \r\n".encode())
    assert read_schedule_csv(path) == schedule("0F0 0B0", "1F0 1B0")


@pytest.mark.parametrize("build", [build for build, _ in BUILDS])
def test_what_is_written_is_read_back(tmp_path: Path, build) -> None:
    for num_ranks, num_micro_batches in [(1, 1), (2, 6), (3, 3), (4, 12)]:
        built = build(num_ranks, num_micro_batches)
        write_schedule_csv(tmp_path / "order.csv", built)
        assert read_schedule_csv(tmp_path / "order.csv") == built
    assert [path.name for path in tmp_path.iterdir()] == ["order.csv"]


def test_the_written_file_is_plain_text(tmp_path: Path) -> None:
    write_schedule_csv(tmp_path / "order.csv", zb_h1(2, 2))
    assert (tmp_path / "order.csv").read_text() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


@pytest.mark.parametrize(("build", "num_chunks"), BUILDS)
def test_torch_loads_what_is_written(tmp_path: Path, torch_schedule, build, num_chunks: int) -> None:
    built = build(4, 8)
    write_schedule_csv(tmp_path / "order.csv", built)
    loaded = torch_schedule("_PipelineScheduleRuntime", 4, 8, num_chunks)
    loaded._load_csv(str(tmp_path / "order.csv"))  # raises unless torch finds the order complete and possible to run
    assert [list(map(str, loaded.pipeline_order[rank])) for rank in range(4)] == [list(map(str, r)) for r in built.ranks]


@pytest.mark.parametrize(
    ("lines", "place", "message"),
    [
        ([], "order.csv, row 1: ", "the file is empty; give a schedule CSV, one row a rank"),
        (["", "  "], "order.csv, row 1: ", "the file is empty; give"),
        (changed(2, ",,,"), "order.csv, row 2: ", "no action; a row is the order of one rank"),
        ([GOOD[0], "", GOOD[1]], "order.csv, row 2: ", "no action; a row is the order of one rank"),
        (changed(2, ",1F0,1B0,1F1,1G1"), "order.csv, row 2, cell 5: ", "'1G1' is not allowed; must be <stage><kind>"),
        (changed(2, ",1F0,1B0,1F1,B1"), "order.csv, row 2, cell 5: ", "'B1' is not allowed; must be <stage><kind>"),
        (changed(2, ",1F0,1B0,1F1,-1B1"), "order.csv, row 2, cell 5: ", "'-1B1' is not allowed; must be <stage>"),
        (changed(2, ",1F0,1B0,1F1,1B" + "1" * 5000), "order.csv, row 2, cell 5: ", "111'... is not allowed"),
        (changed(1, "0F0;0F1;0B0;0B1"), "order.csv, row 1, cell 1: ", "'0F0;0F1;0B0;0B1' is not allowed"),
        (changed(1, "0F0,0SEND_F0,0F1,0B0,0B1"), "order.csv, row 1, cell 2: ", 'with format="compute_only"'),
        (changed(1, "0F0,0RECV_B0,0F1,0B0,0B1"), "order.csv, row 1, cell 2: ", 'with format="compute_only"'),
        (changed(1, "0UNSHARD,0F0,0F1,0B0,0B1"), "order.csv, row 1, cell 1: ", 'with format="compute_only"'),
        (changed(1, "0F0,0F1,0B0,0B1,0REDUCE_GRAD"), "order.csv, row 1, cell 5: ", 'with format="compute_only"'),
        (changed(1, "0F0,(0F1;0B0)OVERLAP_F_B,0B1"), "order.csv, row 1, cell 2: ", "are two cells here, the forward first"),
        (changed(1, "0F0,0F1,,0B0,0F1,0B1"), "order.csv, row 1, cell 5: ", "0F1 is in row 1, cell 2 already; "),
        (changed(1, "0F0,0F1,,0B0"), "order.csv, row 1, cell 2: ", "its backward is missing. Give each"),
        (changed(1, "0F0,0B0,,0B1"), "order.csv, row 1, cell 4: ", "its forward F is missing. Give each"),
        (changed(1, "0F0,0F1,0B0,0I1"), "order.csv, row 1, cell 2; row 1, cell 4: ", "I without W. Give each"),
        (changed(1, "0F0,0F1,0B0,0B1,0I1"), "order.csv, row 1, cell 4; row 1, cell 2; row 1, cell 5: ", "exclude each"),
        (
            changed(2, ",1F0,1B0,1F1,0B1"),
            "order.csv, row 2, cell 5: ",
            "0B1 is in row 1, cell 6 already; each action runs once, remove",
        ),
        (
            ["0F0,0F1,,0B0", ",1F0,1B0,1F1,1B1,0B1"],
            "order.csv, row 1, cell 1; row 2, cell 6: ",
            "stage 0 is on rank 0 and on rank 1: a stage is on one rank, move",
        ),
        (changed(1, "0F0,0B0"), "order.csv, row 2, cell 5: ", "stage 0 has no instruction for micro-batch 1"),
        (changed(1, "2F0,2F1,2B0,2B1"), "order.csv, row 2, cell 3: ", "stage 0 has no instruction, but stage 1 has"),
        (changed(1, "0F0,0B0,0B1,0F1"), "order.csv, row 1, cell ", "wait for each other: "),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, lines: list[str], place: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        read_schedule_csv(write(tmp_path, lines))
    assert place in str(caught.value)
    assert message in str(caught.value)


def test_the_cells_of_a_cycle_are_those_of_its_instructions(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as caught:
        read_schedule_csv(write(tmp_path, ["0B0,0F0"]))
    assert str(caught.value).startswith(f"{tmp_path / 'order.csv'}, row 1, cell 1; row 1, cell 2: ") or str(
        caught.value
    ).startswith(f"{tmp_path / 'order.csv'}, row 1, cell 2; row 1, cell 1: ")


def test_torchs_dualpipev_pairs_forwards_with_backwards_which_is_said() -> None:
    with pytest.raises(ScheduleError, match=r"dualpipev_p2_m4.csv, row 1, cell 8: '\(0F3;3B1\)OVERLAP_F_B' is not allowed"):
        read_schedule_csv(GOLDENS / "dualpipev_p2_m4.csv")


def test_what_is_no_csv_at_all(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"nothing.csv: cannot be read \(No such file or directory\); give the path"):
        read_schedule_csv(tmp_path / "nothing.csv")
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule_csv(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="is not UTF-8 text; give a schedule CSV"):
        read_schedule_csv(tmp_path / "binary.csv")
    (tmp_path / "long.csv").write_text("0F0,0B0\n" + "1" * 200_000)
    with pytest.raises(ScheduleError, match="long.csv, row 2: field larger than field limit .*; give plain"):
        read_schedule_csv(tmp_path / "long.csv")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), "the schedule has no rank"),
        (("0F0 0B0", ""), "rank 1 has no instruction"),
        (("0B0 0F0",), "wait for each other: 0[FB]0 -> 0[FB]0"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, ranks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        write_schedule_csv(tmp_path / "order.csv", schedule(*ranks))
    assert not list(tmp_path.iterdir())


def test_write_to_an_impossible_place_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RLFreezeError, match="cannot write .*order.csv: No such file or directory"):
        write_schedule_csv(tmp_path / "absent" / "order.csv", one_f_one_b(1, 1))
