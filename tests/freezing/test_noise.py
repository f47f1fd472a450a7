"""Signal and noise told apart, against gradients whose signal and noise are known."""

import json
import math

import numpy as np
import pytest
import torch

from rlfreeze_ds.freezing.noise import GradientNoise


def seen(signal: float, noise: float, lives: list[int], size: int = 2000, seed: int = 0, replicas: int = 1) -> GradientNoise:
    """Norms of means over live micro-batches, drawn at random: squared signal and noise as given, for two units alike."""
    rng = np.random.default_rng(seed)
    truth = np.full(size, math.sqrt(signal / size))
    found = GradientNoise(2, torch.device("cpu"))
    for live in lives:
        draws = truth + math.sqrt(noise / size) * rng.normal(size=(live * replicas, size))
        norm = float(np.linalg.norm(draws.mean(axis=0)))
        found.observe(torch.tensor([norm, norm]), [live, live], replicas)
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("signal", "noise"), [(1.0, 8.0), (4.0, 2.0), (0.1, 10.0)])
def test_known_signal_and_noise(signal: float, noise: float, replicas: int) -> None:
    found = seen(signal, noise, [8, 4, 6, 3] * 25, replicas=replicas)
    signals, noises = found.estimates()
    assert noises == pytest.approx([noise, noise], rel=0.15)
    assert signals == pytest.approx([signal, signal], abs=0.1 * signal + 0.05 * noise / 8)


def test_what_cannot_be_told_apart_is_not_told() -> None:
    for lives in ([8] * 50, [8, 4], []):
        assert all(math.isnan(value) for values in seen(1.0, 8.0, lives).estimates() for value in values)
    # No noise, and norms that change by chance only.
    rng = np.random.default_rng(1)
    found = GradientNoise(1, torch.device("cpu"))
    for live in [8, 4] * 40:
        found.observe(torch.tensor([1.0 + 0.1 * rng.normal()]), [live], 1)
    assert math.isnan(found.estimates()[1][0])


def test_a_norm_that_is_not_finite_counts_for_nothing() -> None:
    lives = [8, 4, 6, 3] * 10
    found, spoilt = seen(1.0, 8.0, lives), seen(1.0, 8.0, lives)
    for bad in (math.nan, math.inf):
        spoilt.observe(torch.tensor([bad, bad]), [4, 4], 1)
    assert spoilt.state_dict() == found.state_dict()


def test_state_survives_json_to_the_bit() -> None:
    found = seen(1.0, 8.0, [8, 4, 6, 3] * 10)
    again = GradientNoise(2, torch.device("cpu"))
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    for one in (found, again):
        one.observe(torch.tensor([1.3, 0.7]), [5, 8], 1)
    assert again.state_dict() == found.state_dict() and again.estimates() == found.estimates()
