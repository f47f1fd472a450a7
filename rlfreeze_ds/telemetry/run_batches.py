"""The batches of a run, laid out from its run log: with nothing frozen, as planned, and as measured. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.dag import PipelineDag, Timeline
from rlfreeze_ds.planning.fit import StageFit
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.schedule import from_commands
from rlfreeze_ds.planning.timeline import measured_timeline

FILE_NAME = "rlfreeze.jsonl"


@dataclass(frozen=True)
class RunBatches:
    """The last plan of a run whose batches were measured.

    Attributes:
        step: the step at which it had run long enough.
        timelines: "unfrozen" and "planned", simulated from the seconds that were fitted, and "measured", laid out from the
            medians of the instructions' seconds.
        ratios: freeze ratios of each of them.
        predicted_s, measured_s: seconds of a batch, predicted for the plan's real masks and measured on rank 0.
    """

    step: int
    timelines: Mapping[str, Timeline]
    ratios: Mapping[str, Mapping[Instruction, float]]
    predicted_s: float
    measured_s: float


def read_run(folder: str | Path) -> RunBatches:
    """From the folder that ``RLFREEZE_RUN_DIR`` named.

    Raises:
        RLFreezeError: there is no run log, or no plan in it ran long enough.
    """
    path = Path(folder, FILE_NAME)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RLFreezeError(f"{path}: cannot be read ({error}); name a folder that was RLFREEZE_RUN_DIR of a run.") from None
    found = None
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            if number == len(lines):
                continue  # a run that was killed while it wrote
            raise RLFreezeError(f"{path}, line {number}: is not JSON; is it a run log?") from None
        if isinstance(event, dict) and event.get("event") == "batch":
            found = event
    if found is None:
        raise RLFreezeError(
            f"{path}: no plan ran long enough to be measured; it takes some steps of the steady phase and a new plan after them."
        )
    try:
        return _batches(found)
    except (KeyError, TypeError, ValueError) as error:
        raise RLFreezeError(f"{path}: its last batch cannot be used ({type(error).__name__}: {error})") from None


def _batches(event: Mapping[str, Any]) -> RunBatches:
    dag = PipelineDag(from_commands(event["orders"]))
    fits = [StageFit(**fit) for fit in event["fits"]]
    transfer_s = float(event["transfer_s"])
    tails = dict.fromkeys(range(len(fits)), min(fit.tail_s for fit in fits))
    planned = {
        i: float(event["ratios"][i.stage_id][i.micro_batch_id]) for i in dag.schedule.instructions if i.computes_weight_gradient
    }
    weight_gradient = {(i.stage_id, i.micro_batch_id): i for i in planned}  # an I is under the mask of its W
    ratios: dict[str, dict[Instruction, float]] = {"unfrozen": {}, "planned": planned, "measured": planned}
    timelines = {}
    for name in ("unfrozen", "planned"):
        seconds = {}
        for i in dag.schedule.instructions:
            fit, ratio = fits[i.stage_id], ratios[name].get(weight_gradient[i.stage_id, i.micro_batch_id], 0.0)
            # Where a first stage freezes whole, its input gradients go with its weight gradients.
            seconds[i] = fit.seconds(i.kind, ratio, ratio, i.micro_batch_id)
        timelines[name] = dag.simulate(seconds, transfer_s, tails)
    measured = [{(kind, m): seconds for kind, m, seconds in stage} for stage in event["seconds"]]
    timelines["measured"] = measured_timeline(dag, measured, transfer_s, tails)
    return RunBatches(
        int(event["step"]), timelines, ratios, float(event["predicted_makespan_s"]), float(event["measured_makespan_s"])
    )
