import pytest

from rlfreeze_ds.errors import ScheduleError
from rlfreeze_ds.planning.instruction import Instruction, required_predecessors


def predecessors(text: str, num_stages: int) -> set[str]:
    return {
        "|".join(map(str, alternatives)) for alternatives in required_predecessors(Instruction.parse(text), num_stages)
    }


@pytest.mark.parametrize("text", ["0F0", "2F0", "12W345", "3I7", "1B1"])
def test_text_form_round_trips(text: str) -> None:
    assert str(Instruction.parse(text)) == text


def test_text_form_is_stage_kind_micro_batch() -> None:
    assert Instruction.parse("2F0") == Instruction(stage_id=2, micro_batch_id=0, kind="F")


@pytest.mark.parametrize("text", ["", "F0", "2F", "2f0", "2X0", "-1F0", "2F0 ", "2F0\n", "²F0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"must be <stage><kind><micro-batch>"):
        Instruction.parse(text)


def test_bad_fields_are_refused() -> None:
    with pytest.raises(ScheduleError, match="must be one of F, B, I, W"):
        Instruction(0, 0, "G")
    with pytest.raises(ScheduleError, match="ids >= 0"):
        Instruction(0, -1, "F")


def test_order_is_by_stage_then_micro_batch() -> None:
    texts = ["1B0", "0F1", "0F0", "0B0"]
    assert [str(i) for i in sorted(map(Instruction.parse, texts))] == ["0B0", "0F0", "0F1", "1B0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F3", set()),
        ("2F3", {"1F3"}),
        ("2B3", {"2F3"}),
        ("1B3", {"1F3", "2B3|2I3"}),
        ("1I3", {"1F3", "2B3|2I3"}),
        ("1W3", {"1I3"}),
    ],
)
def test_dependency_rules(text: str, expected: set[str]) -> None:
    assert predecessors(text, num_stages=3) == expected
