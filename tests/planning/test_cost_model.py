import math

import pytest

from rlfreeze_ds.errors import ProfileError
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.instruction import Instruction

F, B, DGRAD, W = (Instruction(0, 0, kind) for kind in "FBIW")


def test_a_duration_is_linear_in_the_ratio() -> None:
    duration = Duration(unfrozen_s=0.04, frozen_s=0.01)
    assert [duration.seconds(ratio) for ratio in (0, 0.5, 1)] == pytest.approx([0.04, 0.025, 0.01])


def test_frozen_that_is_not_shorter_cannot_be_shortened() -> None:
    duration = Duration(unfrozen_s=0.04, frozen_s=0.05)
    assert duration.saving_s == 0
    assert duration.seconds(1.0) == 0.04


def test_only_b_and_w_that_get_shorter_are_freezable() -> None:
    shorter, same = Duration(2, 1), Duration(2, 2)
    assert Costs({W: shorter, B: shorter, F: shorter, DGRAD: shorter}).freezable == (B, W)
    assert Costs({B: same}).freezable == ()


def test_seconds_ignore_ratios_of_forward_and_input_gradient() -> None:
    costs = Costs(dict.fromkeys((F, B, DGRAD, W), Duration(2, 1)))
    assert costs.seconds(dict.fromkeys((F, B, DGRAD), 0.5)) == {F: 2, B: 1.5, DGRAD: 2, W: 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.001])
def test_check_refuses_numbers_that_are_no_seconds(bad: float) -> None:
    good = {F: Duration(1, 1), B: Duration(2, 1)}
    Costs(good).check([F, B])
    with pytest.raises(ProfileError, match="frozen_s of 0B0"):
        Costs({**good, B: Duration(2, bad)}).check([F, B])
    with pytest.raises(ProfileError, match="unfrozen_s of 0F0"):
        Costs({**good, F: Duration(bad, 1)}).check([F, B])
    with pytest.raises(ProfileError, match="transfer_s"):
        Costs(good, transfer_s=bad).check([F, B])


def test_check_refuses_costs_of_another_schedule() -> None:
    with pytest.raises(ProfileError, match="0B0 has no duration"):
        Costs({F: Duration(1, 1)}).check([F, B])
    with pytest.raises(ProfileError, match="0B0 has a duration but is not in the schedule"):
        Costs({F: Duration(1, 1), B: Duration(1, 1)}).check([F])
    with pytest.raises(ProfileError, match="add up"):
        Costs({F: Duration(1e308, 1), B: Duration(1e308, 1)}).check([F, B])
