"""The JSON block: defaults, and one clear error for everything wrong."""

from __future__ import annotations

from typing import Any

import pytest

from rlfreeze_ds.config import FreezeConfig, parse_block
from rlfreeze_ds.errors import ConfigError


def test_only_enabled_is_required_and_defaults_are_conservative() -> None:
    config = parse_block({"rlfreeze": {"enabled": True}})
    assert config is not None and config.planning.max_freeze_ratio == 0.5 and config.planning.time_slack == 0.02
    assert parse_block({"train_batch_size": 8}) is None


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({}, ["rlfreeze.enabled", "missing"]),
        ({"enabled": "yes"}, ["rlfreeze.enabled = 'yes'", "boolean"]),
        ({"enabled": True, "warmup_stps": 3}, ["rlfreeze.warmup_stps", 'did you mean "warmup_steps"']),
        (
            {"enabled": True, "planning": {"max_freeze_ration": 0.5}},
            ["planning.max_freeze_ration", '"max_freeze_ratio"'],
        ),
        (
            {"enabled": True, "planning": {"max_freeze_ratio": 1.7}},
            ["max_freeze_ratio = 1.7", "less than or equal to 1"],
        ),
        ({"enabled": True, "planning": {"max_freeze_ratio": True}}, ["max_freeze_ratio = True"]),
        ({"enabled": True, "planning": {"max_freeze_ratio": float("nan")}}, ["max_freeze_ratio = nan"]),
        ({"enabled": True, "warmup_steps": 2.5}, ["warmup_steps = 2.5", "integer"]),
        ({"enabled": True, "selection": "stric"}, ["selection = 'stric'", "'strict', 'prefer' or 'spread'"]),
        ({"enabled": True, "policy": {"type": "rlib"}}, ["policy.type = 'rlib'", "'fixed', 'random', 'pretrained' or 'rllib'"]),
        ({"enabled": True, "zzz": 1}, ["rlfreeze.zzz", "allowed here", "warmup_steps"]),
        (True, ["rlfreeze = True", "must be an object"]),
    ],
)
def test_errors_say_what_was_found_where_and_what_is_allowed(block: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_block({"rlfreeze": block})
    for part in parts:
        assert part in str(caught.value)


def test_a_misspelt_block_is_not_silently_ignored() -> None:
    with pytest.raises(ConfigError, match='did you mean "rlfreeze"'):
        parse_block({"rl_freeze": {"enabled": True}})


def test_every_field_is_documented() -> None:
    def walk(model: Any) -> None:
        for name, field in model.model_fields.items():
            nested = isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields")
            assert nested or field.description, name
            if nested:
                walk(field.annotation)

    walk(FreezeConfig)
