from pathlib import Path

import pytest

from rlfreeze_ds.errors import ProfileError, RLFreezeError
from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.profile import read_profile, write_profile
from rlfreeze_ds.planning.schedule import Schedule

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "profiles" / "llama8b_h200_pp4_1f1b.csv"
HEADER = "rank,stage_id,micro_batch_id,kind,unfrozen_s,frozen_s"
GOOD = [HEADER, "0,0,0,F,1,1", "0,0,0,B,2,1", "1,1,0,F,1,1", "1,1,0,B,2,1"]


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "measured.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def changed(line: int, text: str) -> list[str]:
    return [*GOOD[: line - 1], text, *GOOD[line:]]


def test_the_published_profile_is_one_f_one_b() -> None:
    schedule, costs = read_profile(PUBLISHED)
    assert schedule == one_f_one_b(4, 8)
    assert costs.durations[Instruction.parse("0F0")] == Duration(0.017, 0.017)
    assert costs.durations[Instruction.parse("3B3")] == Duration(0.047, 0.021)
    assert len(costs.freezable) == 32


def test_column_order_spaces_blank_lines_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    lines = ["kind,rank,stage_id, micro_batch_id,frozen_s,unfrozen_s", "", "F,0,0,0,1,1", " B ,0,0,0, .5 ,2e0", ""]
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    schedule, costs = read_profile(path)
    assert schedule == one_f_one_b(1, 1)
    assert costs.durations[Instruction.parse("0B0")] == Duration(2.0, 0.5)


def test_several_stages_a_rank_and_split_backwards_round_trip_exactly(tmp_path: Path) -> None:
    texts = ("0F0 2F0 2B0 0B0", "1F0 1I0 1W0")
    schedule = Schedule(tuple(tuple(map(Instruction.parse, text.split())) for text in texts))
    costs = Costs({i: Duration(0.1 / (3 + n), 0.1 / (7 + n)) for n, i in enumerate(schedule.instructions)})
    write_profile(tmp_path / "out.csv", schedule, costs)
    assert read_profile(tmp_path / "out.csv") == (schedule, costs)
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_rows_of_different_ranks_may_be_interleaved(tmp_path: Path) -> None:
    lines = [GOOD[0], GOOD[3], GOOD[1], GOOD[4], GOOD[2]]
    assert read_profile(write(tmp_path, lines)) == read_profile(write(tmp_path, GOOD))


@pytest.mark.parametrize(
    ("lines", "place", "message"),
    [
        ([], "measured.csv, line 1: ", "the file is empty; the first line must be rank,"),
        ([HEADER], "measured.csv, line 1: ", "no row after the header; add a row"),
        ([HEADER.replace(",frozen_s", "")], "measured.csv, line 1: ", "column frozen_s is missing; the header must be"),
        ([HEADER + ",note"], "measured.csv, line 1: ", "column 'note' is unknown or there twice; the header must be"),
        ([HEADER + ",kind"], "measured.csv, line 1: ", "column 'kind' is unknown or there twice; the header must be"),
        (changed(3, "0,0,0,B,2"), "measured.csv, line 3: ", "5 fields; each row has the 6"),
        (changed(3, "0,0,0,B,2,-1"), "measured.csv, line 3: ", "frozen_s = '-1'; must be a finite number"),
        (changed(3, "0,0,0,B,2,fast"), "measured.csv, line 3: ", "frozen_s = 'fast'; must be a finite number"),
        (changed(3, "0,0,0,B,2,"), "measured.csv, line 3: ", "frozen_s = ''; must be a finite number"),
        (changed(3, "0,0,0,B,nan,1"), "measured.csv, line 3: ", "unfrozen_s = 'nan'; must be a finite number"),
        (changed(3, "0,0,0,B,inf,1"), "measured.csv, line 3: ", "unfrozen_s = 'inf'; must be a finite number"),
        (changed(3, "0,0,0,B,1e999,1"), "measured.csv, line 3: ", "unfrozen_s = '1e999'; must be a finite number"),
        (changed(3, "0,0,0,B,1_0,1"), "measured.csv, line 3: ", "unfrozen_s = '1_0'; must be a finite number"),
        (changed(3, "0,0,0,G,2,1"), "measured.csv, line 3: ", "kind = 'G'; must be one of F, B, I, W"),
        (changed(3, "0,0,-1,B,2,1"), "measured.csv, line 3: ", "micro_batch_id = '-1'; must be a whole number"),
        (changed(3, "0,0.5,0,B,2,1"), "measured.csv, line 3: ", "stage_id = '0.5'; must be a whole number"),
        (changed(3, "0,0,0,F,1,1"), "measured.csv, line 3: ", "0F0 is on line 2 already; remove one"),
        (GOOD[:-1], "measured.csv, line 4: ", "its backward is missing. Give each"),
        (GOOD[:3] + GOOD[4:], "measured.csv, line 4: ", "its forward F is missing. Give each"),
        (changed(5, "1,1,0,I,2,1"), "measured.csv, lines 4, 5: ", "I without W. Give each"),
        (
            changed(5, "0,1,0,B,2,1"),
            "measured.csv, lines 5, 4: ",
            "on rank 0 and on rank 1: a stage is on one rank, move",
        ),
        (
            [*GOOD, "1,1,1,F,1,1", "1,1,1,B,1,1"],
            "measured.csv, line 7: ",
            "stage 0 has no instruction for micro-batch 1",
        ),
        (
            [*GOOD, "2,3,0,F,1,1", "2,3,0,B,1,1"],
            "measured.csv, line 7: ",
            "stage 2 has no instruction, but stage 3 has",
        ),
        ([*GOOD, "5,2,0,F,1,1", "5,2,0,B,1,1"], "measured.csv, line 6: ", "there is a rank 5 but no rank 2"),
        ([GOOD[0], GOOD[2], GOOD[1], *GOOD[3:]], "measured.csv, lines ", "wait for each other: "),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, lines: list[str], place: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_profile(write(tmp_path, lines) if lines else write_empty(tmp_path))
    assert place in str(caught.value)
    assert message in str(caught.value)


def write_empty(folder: Path) -> Path:
    (folder / "measured.csv").touch()
    return folder / "measured.csv"


def test_the_lines_of_a_cycle_are_those_of_its_instructions(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="measured.csv, lines [2345, ]+: ") as caught:
        read_profile(write(tmp_path, [GOOD[0], GOOD[2], GOOD[1], *GOOD[3:]]))
    assert "0B0" in str(caught.value)


def test_what_is_no_csv_at_all(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nothing.csv: cannot be read \(No such file or directory\); give the path"):
        read_profile(tmp_path / "nothing.csv")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is not UTF-8 text; give a CSV"):
        read_profile(tmp_path / "binary.csv")


def test_write_refuses_costs_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="has no duration"):
        write_profile(tmp_path / "out.csv", one_f_one_b(1, 1), Costs({}))
    assert not list(tmp_path.iterdir())


def test_write_to_an_impossible_place_is_one_error(tmp_path: Path) -> None:
    schedule, costs = read_profile(PUBLISHED)
    with pytest.raises(RLFreezeError, match="cannot write .*out.csv: No such file or directory"):
        write_profile(tmp_path / "absent" / "out.csv", schedule, costs)
