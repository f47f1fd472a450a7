"""What freezing costs: the progress that a batch keeps, as a function of how much of it is frozen.

A unit with squared gradient signal s = |E g|^2 and noise sigma^2 = E |g_m - E g|^2 per micro-batch has the noise scale
B = sigma^2 / s, in micro-batches (McCandlish et al., 2018, here per unit). The mean of its gradient over m of M micro-batches
has the squared norm s + sigma^2 / m, and under an optimizer that normalises (Adam) its step goes

    kept = sqrt((s + sigma^2 / M) / (s + sigma^2 / m)) = sqrt((1 + B / M) / (1 + B / m))

times as far along the true gradient as with all M live: concave in m / M, 1 at m = M, 0 at m = 0. The larger B, the more is lost;
without end it is sqrt(m / M), the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlfreeze_ds.errors import ConfigError

Curve = Sequence[tuple[float, float]]
"""Points (x, y) of a concave function, x ascending."""

# Points of a curve in the program; between them it is a line, at most 3e-4 below.
POINTS = 33


def kept_progress(live_share: float, num_micro_batches: int, noise_scale: float | None) -> float:
    """Share of a unit's progress that is kept, in [0, 1].

    Args:
        live_share: share of the micro-batches in which the unit is live, in [0, 1].
        num_micro_batches: of a batch, over all data-parallel replicas.
        noise_scale: B, in micro-batches; None where nothing is known: the worst case.
    """
    if live_share <= 0:
        return 0.0
    if noise_scale is None or math.isinf(noise_scale):
        return math.sqrt(live_share)
    return math.sqrt((1 + noise_scale / num_micro_batches) / (1 + noise_scale / (live_share * num_micro_batches)))


@dataclass(frozen=True)
class StageProgress:
    """What a stage contributes to the progress of a batch.

    Attributes:
        units: per unit that may freeze, its share of the whole model's progress and its noise scale (None: unknown).
        num_micro_batches: of a batch, over all data-parallel replicas.
        eligible_share: share of the stage's weight-gradient time that these units are, in (0, 1].
        fixed: share of the whole model's progress that never freezes here.
        whole_step: one mask for all micro-batches of a step. A unit is then live or not, and keeps what it is live.

    Raises:
        ConfigError: a number out of range.
    """

    units: tuple[tuple[float, float | None], ...]
    num_micro_batches: int
    eligible_share: float = 1.0
    fixed: float = 0.0
    whole_step: bool = False

    def __post_init__(self) -> None:
        for _, noise_scale in self.units:
            if noise_scale is not None and not noise_scale >= 0:
                raise ConfigError(
                    f"noise_scale = {noise_scale}: must be a number >= 0 (gradient noise over gradient signal, in micro-batches)."
                )

    def kept(self, mean_ratio: float) -> float:
        """The stage's part of the progress, if its units are live equally often."""
        live = 1.0 - min(1.0, mean_ratio / self.eligible_share) if self.units else 1.0
        if self.whole_step:
            return self.fixed + live * sum(weight for weight, _ in self.units)
        return self.fixed + sum(
            weight * kept_progress(live, self.num_micro_batches, noise_scale) for weight, noise_scale in self.units
        )

    def curve(self) -> Curve:
        """:meth:`kept` at points, for the linear program."""
        ratios = [self.eligible_share * k / (POINTS - 1) for k in range(POINTS)]
        return [(ratio, self.kept(ratio)) for ratio in ratios]


def equal_stages(num_stages: int, num_micro_batches: int, noise_scale: float | None = None) -> dict[int, StageProgress]:
    """Every stage contributes as much, with the same noise scale: what to assume where nothing is known of the model."""
    return {
        stage_id: StageProgress(((1.0 / num_stages, noise_scale),), num_micro_batches) for stage_id in range(num_stages)
    }


def kept_by(progress: Mapping[int, StageProgress], stage_ratios: Mapping[int, float]) -> float:
    """Share of the whole model's progress that is kept with these mean ratios of the stages."""
    return sum(stage.kept(stage_ratios.get(stage_id, 0.0)) for stage_id, stage in progress.items())


@dataclass(frozen=True)
class StageGradients:
    """What a stage has seen of its units' gradients, NaN where nothing is known.

    Attributes:
        norm: of the gradient that the optimizer got, a running mean.
        signal, noise: s and sigma^2 of the module's docstring.
        num_elements: per unit.
    """

    norm: tuple[float, ...]
    signal: tuple[float, ...]
    noise: tuple[float, ...]
    num_elements: tuple[int, ...]

    def contributions(self, normalised: bool) -> list[float]:
        """To first order, the decrease of the loss by a small step: of an optimizer that normalises each element the sum of the
        absolute values of the gradient, which for a norm spread evenly is sqrt(num_elements) * norm; of SGD the norm's square."""
        sizes = self.num_elements
        return [math.sqrt(n) * norm if normalised else norm**2 for n, norm in zip(sizes, self.norm, strict=True)]

    def noise_scale(self) -> float | None:
        """Of all units together; None where not one is known."""
        known = [pair for pair in zip(self.signal, self.noise, strict=True) if all(map(math.isfinite, pair))]
        signal = sum(s for s, _ in known)
        return sum(noise for _, noise in known) / signal if signal > 0 else None


def measured_stages(
    stages: Sequence[StageGradients],
    pools: Sequence[Sequence[int]],
    pool_shares: Sequence[float],
    num_micro_batches: int,
    *,
    normalised: bool,
    whole_step: bool = False,
) -> dict[int, StageProgress]:
    """From what the gradients showed. A unit whose noise cannot be told from its signal counts as its stage, or as all stages,
    do on average; where no unit's can, as the worst case.

    Args:
        pools: per stage the units that may freeze; the others contribute whatever happens.
        pool_shares: per stage the share of the weight-gradient time that these are.
        num_micro_batches: of a batch, over all data-parallel replicas.
        normalised: whether the optimizer normalises, as Adam does.
    """
    raw = [stage.contributions(normalised) for stage in stages]
    seen = sorted(value for row in raw for value in row if math.isfinite(value))
    typical = seen[len(seen) // 2] if seen else 1.0
    raw = [[value if math.isfinite(value) else typical for value in row] for row in raw]
    total = sum(map(sum, raw)) or 1.0
    scales = [stage.noise_scale() for stage in stages]
    known = [scale for scale in scales if scale is not None]
    average = sum(known) / len(known) if known else None
    found = {}
    for stage_id, (stage, pool, share, row) in enumerate(zip(stages, pools, pool_shares, raw, strict=True)):
        of_stage = average if scales[stage_id] is None else scales[stage_id]
        units = []
        for unit in pool:
            scale = stage.noise[unit] / stage.signal[unit] if stage.signal[unit] > 0 else math.nan
            units.append((row[unit] / total, scale if math.isfinite(scale) else of_stage))
        fixed = (sum(row) - sum(row[unit] for unit in pool)) / total
        found[stage_id] = StageProgress(tuple(units), num_micro_batches, share or 1.0, fixed, whole_step)
    return found
