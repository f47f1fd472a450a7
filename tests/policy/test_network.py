"""The policy in numpy and its file, against the formula written out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.policy.network import Network
from rlfreeze_ds.policy.observation import HIGH, LOW, NUM_ACTIONS, SIZE


def _network(activation: str = "tanh", seed: int = 0) -> Network:
    draw = np.random.default_rng(seed)
    widths = (SIZE, 7, 5, NUM_ACTIONS)
    weights = [draw.normal(0, 0.5, (outputs, inputs)) for inputs, outputs in zip(widths, widths[1:], strict=False)]
    return Network(weights, [draw.normal(0, 0.5, outputs) for outputs in widths[1:]], activation)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_an_action_is_the_clipped_mean(activation: str) -> None:
    network = _network(activation)
    apply = math.tanh if activation == "tanh" else lambda x: max(x, 0.0)
    num_clipped = 0
    for observation in np.random.default_rng(1).uniform(LOW, HIGH, (50, SIZE)):
        x = list(observation.astype(np.float32))
        for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
            x = [
                sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
            ]
            x = x if i == 2 else [apply(v) for v in x]
        num_clipped += sum(abs(v) > 1 for v in x)
        action = network.act(observation)
        assert action.dtype == np.float32
        np.testing.assert_allclose(action, [min(max(v, -1.0), 1.0) for v in x], atol=1e-5)
    assert num_clipped > 0


def test_a_file_holds_every_bit(tmp_path) -> None:
    network = _network()
    network.save(tmp_path / "policy.json", about="a test")
    read = Network.load(tmp_path / "policy.json")
    assert read.activation == network.activation
    for ours, theirs in zip([*network.weights, *network.biases], [*read.weights, *read.biases], strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_a_wrong_file_is_refused(tmp_path) -> None:
    path = tmp_path / "policy.json"
    _network().save(path)
    whole = json.loads(path.read_text())

    def refused(words: str, **changes: object) -> None:
        path.write_text(json.dumps({**whole, **changes}))
        with pytest.raises(RLFreezeError, match=words):
            Network.load(path)

    layer = whole["layers"][0]
    refused("version", version=2)
    refused("format", format="another")
    refused("activation", activation="gelu")
    refused("more", more=1)
    refused("observation_size", observation_size=True)
    refused("takes 13 numbers", observation_size=13)
    refused("layers.0.inputs", layers=[{**layer, "inputs": 0}])
    refused("bytes where float32", layers=[{**layer, "inputs": SIZE + 1}])
    refused("no policy file", layers=[{**layer, "bias": "!"}])
    refused("do not take", layers=whole["layers"][1:])
    refused("the last layer has", layers=whole["layers"][:1])
    path.write_bytes(b"\x80\x04\xff")
    with pytest.raises(RLFreezeError, match="no policy file"):
        Network.load(path)
    with pytest.raises(RLFreezeError, match="cannot read"):
        Network.load(tmp_path / "absent.json")


def test_what_is_no_number_is_refused() -> None:
    network = _network()
    for observation in (np.zeros(SIZE - 1), np.full(SIZE, np.nan), np.zeros((1, SIZE))):
        with pytest.raises(RLFreezeError, match="finite numbers"):
            network.act(observation)
    with pytest.raises(RLFreezeError, match="not a finite number"):
        Network([np.full((NUM_ACTIONS, SIZE), np.inf)], [np.zeros(NUM_ACTIONS)], "tanh")
