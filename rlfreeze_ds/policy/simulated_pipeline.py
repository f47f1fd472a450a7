"""How long a simulated job's batches take: the real planner's answers, solved once per pipeline and then looked up.

A linear program a window would be far too slow to learn from. So each pipeline is solved at a few levels of the eligible
share, the same on all stages; for other shares, stage by stage, ratios are taken from the line between the two levels next to
it. Those ratios keep the program's limits, and the batch that runs with them is simulated on the planner's own DAG: exact at
the levels, and elsewhere what a valid plan takes, if not the very best one.

Pipelines are few and drawn by a seed of their own; jobs, which are many, share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlfreeze_ds.planning.builders import one_f_one_b
from rlfreeze_ds.planning.cost_model import Costs, Duration
from rlfreeze_ds.planning.dag import PipelineDag
from rlfreeze_ds.planning.instruction import Instruction
from rlfreeze_ds.planning.plan import WORTHWHILE_GAIN, Plan
from rlfreeze_ds.planning.solver import Limits, solve

LEVELS = (0.25, 0.5, 0.75, 1.0)
"""Eligible shares for which the program is solved; at 0 there is nothing to solve."""

TIME_SLACK = 0.02
"""As in the default configuration."""

# I and W over F: 1.37 and 1.55 on the published LLaMA-8B profile; from an attention-heavy to a wide model.
_INPUT_OVER_FORWARD = (0.9, 1.5)
_WEIGHT_OVER_FORWARD = (0.9, 1.7)
# Standard deviation of the logarithm of a stage's seconds: evenly cut models and badly cut ones.
_UNEVENNESS = (0.0, 0.25)
# In forwards of one stage. Transfers and host time together were a tenth of a batch on a real engine.
_TRANSFER = (0.0, 0.15)
_TAIL = (0.0, 4.0)
# From the default to what TimelyFreeze was published with; with a policy to hold it back, the larger is the one to choose.
_MAX_FREEZE_RATIOS = (0.5, 0.65, 0.8, 0.8)


@dataclass(frozen=True)
class BatchTimes:
    """A batch under a plan: seconds, share of rank-seconds spent waiting, mean freeze ratio per stage, [num_stages]."""

    seconds: float
    bubble_ratio: float
    stage_ratios: np.ndarray


class SimulatedPipeline:
    """A 1F1B pipeline with its costs and its solved plans.

    Args:
        costs: seconds of every instruction; every backward of a stage takes the same.
        max_freeze_ratio: as in the configuration, share of a stage's weight-gradient time that may be skipped.
    """

    def __init__(self, num_stages: int, num_micro_batches: int, costs: Costs, max_freeze_ratio: float) -> None:
        self.num_stages, self.num_micro_batches = num_stages, num_micro_batches
        self.dag = PipelineDag(one_f_one_b(num_stages, num_micro_batches))
        self.costs = costs
        # No unit is frozen in more than max_freeze_ratio of the micro-batches, of which only whole ones count.
        whole = int(max_freeze_ratio * num_micro_batches + 1e-9) / num_micro_batches
        self.max_freeze_ratio = whole or max_freeze_ratio
        order = self.dag.order
        self._unfrozen = np.array([costs.durations[i].unfrozen_s for i in order])
        self._saving = np.array([costs.durations[i].saving_s if i.kind == "B" else 0.0 for i in order])
        self._place = np.array([i.stage_id * num_micro_batches + i.micro_batch_id for i in order])
        nothing = np.zeros((num_stages, num_micro_batches))
        self.unfrozen = self._simulated(nothing)
        self._levels = np.array((0.0, *LEVELS))
        self._ratios = np.array([nothing, *(self._solved(level) for level in LEVELS)])  # [levels, stages, micro-batches]

    def plan(self, eligible_shares: np.ndarray) -> Plan:
        """The planner's own answer, slow. ``eligible_shares``: [num_stages], of the weight-gradient time, in [0, 1]."""
        shares = dict(enumerate(np.asarray(eligible_shares, dtype=float).tolist()))
        limit = self.max_freeze_ratio
        means = {stage: limit * share for stage, share in shares.items()}
        return solve(self.dag, self.costs, Limits(limit, TIME_SLACK, stage_ratio_cap=shares, stage_mean_cap=means))

    def _solved(self, level: float) -> np.ndarray:
        plan = self.plan(np.full(self.num_stages, level))
        return np.array([[plan.ratio(s, m) for m in range(self.num_micro_batches)] for s in range(self.num_stages)])

    def batch(self, eligible_shares: np.ndarray) -> BatchTimes:
        """What a batch takes with these shares, [num_stages], of each stage's weight-gradient time eligible. As in a real job,
        nothing is frozen where that would gain less than 2 %."""
        ratios = self.ratios(eligible_shares)
        if not ratios.any():
            return self.unfrozen
        frozen = self._simulated(ratios)
        return frozen if frozen.seconds <= (1 - WORTHWHILE_GAIN) * self.unfrozen.seconds else self.unfrozen

    def ratios(self, eligible_shares: np.ndarray) -> np.ndarray:
        """Share of the weight-gradient time to skip, [num_stages, num_micro_batches], from the line between the levels."""
        shares = np.clip(eligible_shares, 0.0, 1.0)
        upper = np.clip(np.searchsorted(self._levels, shares), 1, len(self._levels) - 1)
        low, high = self._levels[upper - 1], self._levels[upper]
        weight = ((shares - low) / (high - low))[:, None]
        stages = np.arange(self.num_stages)
        return (1 - weight) * self._ratios[upper - 1, stages] + weight * self._ratios[upper, stages]

    def _simulated(self, ratios: np.ndarray) -> BatchTimes:
        """``ratios``: [num_stages, num_micro_batches]."""
        seconds = self._unfrozen - self._saving * ratios.ravel()[self._place]
        durations = dict(zip(self.dag.order, seconds.tolist(), strict=True))
        makespan_s = self.dag.simulate(durations, self.costs.transfer_s, self.costs.tail_s).makespan
        busy_s = seconds.sum() + sum(self.costs.tail_s.values())
        return BatchTimes(makespan_s, max(0.0, 1 - busy_s / (self.num_stages * makespan_s)), ratios.mean(axis=1))


@lru_cache(maxsize=256)
def draw_pipeline(seed: int) -> SimulatedPipeline:
    """A random pipeline of 2 to 8 stages and 4 to 16 micro-batches, solved; equal seeds give equal ones."""
    rng = np.random.default_rng([seed, 0])
    num_stages = int(rng.integers(2, 9))
    num_micro_batches = int(rng.choice([m for m in (4, 6, 8, 12, 16) if m >= num_stages]))
    forward_s = rng.uniform(0.005, 0.05)
    uneven = np.exp(rng.uniform(*_UNEVENNESS) * rng.standard_normal(num_stages))
    forward, input_gradient, weight_gradient = (
        forward_s * over * uneven * np.exp(0.05 * rng.standard_normal(num_stages))
        for over in (1.0, rng.uniform(*_INPUT_OVER_FORWARD), rng.uniform(*_WEIGHT_OVER_FORWARD))
    )
    transfer_s, tail_s = forward_s * rng.uniform(*_TRANSFER), forward_s * rng.uniform(*_TAIL)
    durations = {}
    for stage_id in range(num_stages):
        forwards = Duration(float(forward[stage_id]), float(forward[stage_id]))
        input_s = float(input_gradient[stage_id])
        backwards = Duration(input_s + float(weight_gradient[stage_id]), input_s)
        for micro_batch_id in range(num_micro_batches):
            durations[Instruction(stage_id, micro_batch_id, "F")] = forwards
            durations[Instruction(stage_id, micro_batch_id, "B")] = backwards
    costs = Costs(durations, float(transfer_s), dict.fromkeys(range(num_stages), float(tail_s)))
    return SimulatedPipeline(num_stages, num_micro_batches, costs, float(rng.choice(_MAX_FREEZE_RATIOS)))
