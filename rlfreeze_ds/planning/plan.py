"""The answer of the solver: how much of each instruction's weight-gradient time to skip, and what that buys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.atomic_write import write_text
from rlfreeze_ds.planning.instruction import Instruction

WORTHWHILE_GAIN = 0.02
"""A plan that shortens the batch by a smaller share than this is not worth the progress that freezing costs."""

_SECONDS = ("unfrozen_makespan_s", "planned_makespan_s", "all_frozen_makespan_s")
_SHARES = ("mean_freeze_ratio", "bubble_ratio", "unfrozen_bubble_ratio", "max_freeze_ratio", "expected_kept_progress")
_RATIO_KEYS = {"stage_id", "micro_batch_id", "kind", "ratio"}


@dataclass(frozen=True)
class Plan:
    """A freeze ratio for every instruction that freezing can shorten.

    Attributes:
        ratios: share of an instruction's weight-gradient time to skip, in [0, 1], for every freezable instruction.
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of a batch.
        unfrozen_makespan_s: seconds of a batch with nothing frozen, simulated.
        planned_makespan_s: seconds of a batch with these ratios, simulated.
        all_frozen_makespan_s: seconds of a batch with everything frozen, simulated; no plan is faster.
        mean_freeze_ratio: mean of ``ratios``; 0 if there is none.
        stage_freeze_ratio: the same per stage.
        bubble_ratio: share of the rank-seconds of the planned batch spent waiting.
        unfrozen_bubble_ratio: the same with nothing frozen.
        solver: "highs", "cbc", or "none" where no solver was needed.
        objective: "makespan" or "progress": what it is the best plan for.
        max_freeze_ratio: the limit on a stage's mean ratio that it was made for.
        time_slack: share of the least makespan that was given up for lower ratios.
        expected_kept_progress: share of an unfrozen batch's progress that this one is expected to make, in [0, 1].
        expected_loss_per_second_gain: that, times unfrozen over planned makespan.
        critical_stages: stages with a freezable instruction that could take no second longer without a longer batch.
    """

    ratios: Mapping[Instruction, float]
    num_stages: int
    num_micro_batches: int
    unfrozen_makespan_s: float
    planned_makespan_s: float
    all_frozen_makespan_s: float
    mean_freeze_ratio: float
    stage_freeze_ratio: tuple[float, ...]
    bubble_ratio: float
    unfrozen_bubble_ratio: float
    solver: str
    objective: str
    max_freeze_ratio: float
    time_slack: float
    expected_kept_progress: float
    expected_loss_per_second_gain: float
    critical_stages: tuple[int, ...] = ()

    def ratio(self, stage_id: int, micro_batch_id: int) -> float:
        """Freeze ratio of a micro-batch on a stage; 0 where nothing can be frozen."""
        for kind in ("B", "W"):
            ratio = self.ratios.get(Instruction(stage_id, micro_batch_id, kind))
            if ratio is not None:
                return ratio
        return 0.0

    @property
    def speedup(self) -> float:
        """Unfrozen over planned makespan; 1 for an empty batch."""
        return self.unfrozen_makespan_s / self.planned_makespan_s if self.planned_makespan_s > 0 else 1.0

    @property
    def verdict(self) -> str:
        """One line: what the plan buys, or that it is not worth it."""
        times = f"{self.speedup:.2f}x: {self.unfrozen_makespan_s:.3f} s -> {self.planned_makespan_s:.3f} s"
        times += f" at a mean freeze ratio of {self.mean_freeze_ratio:.2f}"
        times += (
            f", expected to keep {self.expected_kept_progress:.2f} of a batch's progress: "
            f"{self.expected_loss_per_second_gain:.2f}x the loss per second"
        )
        gain = 1.0 - self.planned_makespan_s / self.unfrozen_makespan_s if self.unfrozen_makespan_s > 0 else 0.0
        if gain >= WORTHWHILE_GAIN:
            return times
        if not self.ratios:
            return "not worth freezing: no instruction is shorter when it is frozen"
        if self.max_freeze_ratio == 0:
            return "not worth freezing: max_freeze_ratio is 0, nothing may be frozen"
        if self.objective == "progress" and self.mean_freeze_ratio == 0:
            return f"not worth freezing: no plan is expected to gain {WORTHWHILE_GAIN:.0%} in loss per second"
        return f"not worth freezing: {times}, a gain below {WORTHWHILE_GAIN:.0%}"

    def grid(self) -> str:
        """Ratios as a text table, a row a stage and a column a micro-batch; "-" where nothing can be frozen."""
        freezable = {(i.stage_id, i.micro_batch_id) for i in self.ratios}
        rows = [["stage", *(f"mb {m}" for m in range(self.num_micro_batches)), "mean"]]
        for stage_id in range(self.num_stages):
            cells = [
                f"{self.ratio(stage_id, m):.2f}" if (stage_id, m) in freezable else "-"
                for m in range(self.num_micro_batches)
            ]
            rows.append([str(stage_id), *cells, f"{self.stage_freeze_ratio[stage_id]:.2f}"])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; :meth:`from_json` gives an equal plan back."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ratios"}
        data["stage_freeze_ratio"] = list(self.stage_freeze_ratio)
        data["critical_stages"] = list(self.critical_stages)
        data["verdict"] = self.verdict
        data["freeze_ratio"] = [
            {"stage_id": i.stage_id, "micro_batch_id": i.micro_batch_id, "kind": i.kind, "ratio": ratio}
            for i, ratio in sorted(self.ratios.items())
        ]
        return data

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Read what :meth:`to_json` gave.

        Raises:
            RLFreezeError: a key is missing or unknown, a value has the wrong type or range, or a mean is wrong.
        """
        expected = {*cls.__dataclass_fields__, "freeze_ratio", "verdict"} - {"ratios"}
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if key != "frontier"}  # written beside a plan, no part of it
        _check_keys("the plan", data, expected)
        values = {key: data[key] for key in expected - {"freeze_ratio", "verdict"}}
        _expect(isinstance(data["verdict"], str), "verdict", data["verdict"], "a text")
        _expect(isinstance(values["solver"], str), "solver", values["solver"], "a text")
        for key in ("num_stages", "num_micro_batches"):
            _expect(type(values[key]) is int and values[key] >= 0, key, values[key], "a whole number >= 0")
        _expect(values["objective"] in ("makespan", "progress"), "objective", values["objective"], '"makespan" or "progress"')
        for key in (*_SECONDS, "time_slack", "expected_loss_per_second_gain"):
            values[key] = _number(key, values[key], math.inf)
        for key in _SHARES:
            values[key] = _number(key, values[key], 1.0)
        num_stages = values["num_stages"]
        stages = values["stage_freeze_ratio"]
        _expect(
            isinstance(stages, list) and len(stages) == num_stages, "stage_freeze_ratio", stages, "a number per stage"
        )
        values["stage_freeze_ratio"] = tuple(_number(f"stage_freeze_ratio[{s}]", r, 1.0) for s, r in enumerate(stages))
        critical = values["critical_stages"]
        _expect(
            isinstance(critical, list) and all(type(s) is int and 0 <= s < num_stages for s in critical),
            "critical_stages",
            critical,
            "a list of stage ids",
        )
        values["critical_stages"] = tuple(critical)
        ratios = _read_ratios(data["freeze_ratio"], num_stages, values["num_micro_batches"])
        mean, stage_means = mean_ratios(ratios, num_stages)
        for key, stated, found in (
            ("mean_freeze_ratio", [values["mean_freeze_ratio"]], [mean]),
            ("stage_freeze_ratio", values["stage_freeze_ratio"], stage_means),
        ):
            fits = all(abs(a - b) <= 1e-9 for a, b in zip(stated, found, strict=True))
            _expect(fits, key, list(stated), f"{list(found)}, the mean of the ratios in freeze_ratio")
        return cls(ratios=ratios, **values)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, by a temporary file and a rename.

        Raises:
            RLFreezeError: the place cannot be written; an old file there stays as it was.
        """
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            RLFreezeError: the file cannot be read or is not a plan.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RLFreezeError(f"{path}: cannot be read ({error.strerror}); give the path of a plan.") from None
        except (ValueError, RecursionError) as error:
            raise RLFreezeError(f"{path}: is not JSON ({error}); write it anew with Plan.save.") from None
        try:
            return cls.from_json(data)
        except RLFreezeError as error:
            raise RLFreezeError(f"{path}: {error}") from None


def mean_ratios(ratios: Mapping[Instruction, float], num_stages: int) -> tuple[float, tuple[float, ...]]:
    """The mean ratio of all instructions, and of each stage's; 0 where there is none."""
    by_stage: list[list[float]] = [[] for _ in range(num_stages)]
    for instruction, ratio in ratios.items():
        by_stage[instruction.stage_id].append(ratio)
    return _mean(list(ratios.values())), tuple(_mean(stage) for stage in by_stage)


def _mean(values: list[float]) -> float:
    return min(1.0, math.fsum(values) / len(values)) if values else 0.0


def _read_ratios(rows: Any, num_stages: int, num_micro_batches: int) -> dict[Instruction, float]:
    _expect(isinstance(rows, list), "freeze_ratio", rows, "a list")
    ratios: dict[Instruction, float] = {}
    for index, row in enumerate(rows):
        where = f"freeze_ratio[{index}]"
        _check_keys(where, row, _RATIO_KEYS)
        for key, count in (("stage_id", num_stages), ("micro_batch_id", num_micro_batches)):
            value = row[key]
            _expect(type(value) is int and 0 <= value < count, f"{where}.{key}", value, f"0 to {count - 1}")
        _expect(row["kind"] in ("B", "W"), f"{where}.kind", row["kind"], '"B" or "W"')
        instruction = Instruction(row["stage_id"], row["micro_batch_id"], row["kind"])
        _expect(instruction not in ratios, where, str(instruction), "each instruction once")
        ratios[instruction] = _number(f"{where}.ratio", row["ratio"], 1.0)
    return ratios


def _number(name: str, value: Any, largest: float) -> float:
    allowed = "a finite number >= 0" if largest == math.inf else f"a number from 0 to {largest:g}"
    _expect(type(value) in (int, float) and math.isfinite(value) and 0 <= value <= largest, name, value, allowed)
    return float(value)


def _check_keys(where: str, data: Any, expected: set[str]) -> None:
    _expect(isinstance(data, dict), where, data, "a JSON object")
    missing, unknown = sorted(expected - data.keys()), sorted(data.keys() - expected)
    if missing or unknown:
        lists = (("misses", missing), ("has the unknown", unknown))
        found = " and ".join(f"{word} {', '.join(map(str, keys))}" for word, keys in lists if keys)
        raise RLFreezeError(f"{where} {found}: the keys are {', '.join(sorted(expected))}; write it with Plan.save.")


def _expect(holds: bool, name: str, found: Any, allowed: str) -> None:
    if not holds:
        raise RLFreezeError(f"{name} = {found!r}: must be {allowed}; write the plan with Plan.save.")
