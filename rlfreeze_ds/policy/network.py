"""A trained policy in a job: a few small matrices in numpy, read from a policy file. Needs no server, ray or torch."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.atomic_write import write_text
from rlfreeze_ds.policy.observation import NUM_ACTIONS, SIZE

PRETRAINED = Path(__file__).parent / "pretrained.json"
"""The policy file that comes with the package; ``scripts/pretrain_policy.py`` makes it."""

VERSION = 1
"""Of the policy file."""

LARGEST_FILE = 8 * 2**20
"""Bytes; a policy of this size is not one of ours."""

ACTIVATIONS = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0.0)}

_Width = Annotated[int, Field(ge=1, le=4096)]


class _Layer(BaseModel):
    """``weight`` [outputs, inputs] and ``bias`` [outputs]: little-endian float32, row-major, as base64."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: _Width
    outputs: _Width
    weight: str
    bias: str


class _File(BaseModel):
    """What a policy file holds. ``about`` is for people: where the policy comes from."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["rlfreeze_ds policy"] = "rlfreeze_ds policy"
    version: Literal[1] = VERSION
    observation_size: _Width
    action_size: _Width
    activation: Literal["tanh", "relu"]
    layers: list[_Layer] = Field(min_length=1, max_length=8)
    about: str = Field("", max_length=4096)


class Network:
    """The mean of a Gaussian policy: ``act`` is what RLlib answers without exploration, in float64 and rounded at the end.

    Args:
        weights: float32 [outputs, inputs] per layer, the first with :data:`SIZE` inputs, the last with :data:`NUM_ACTIONS`
            outputs.
        biases: float32 [outputs] per layer.
        activation: after every layer but the last, one of :data:`ACTIVATIONS`.

    Raises:
        RLFreezeError: the layers do not fit each other, or hold what is not a number.
    """

    def __init__(self, weights: Sequence[np.ndarray], biases: Sequence[np.ndarray], activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise RLFreezeError(f"activation {activation!r}: must be one of {', '.join(ACTIVATIONS)}.")
        if not weights or len(weights) != len(biases):
            raise RLFreezeError(f"{len(weights)} weight matrices and {len(biases)} biases: must be as many, and at least one.")
        self.activation = activation
        self.weights = [np.ascontiguousarray(weight, dtype=np.float32) for weight in weights]
        self.biases = [np.ascontiguousarray(bias, dtype=np.float32) for bias in biases]
        width = SIZE
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if weight.ndim != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
                raise RLFreezeError(
                    f"layer {i}: weight {weight.shape} and bias {bias.shape} do not take the {width} numbers of the layer before."
                )
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise RLFreezeError(f"layer {i} holds what is not a finite number.")
            width = weight.shape[0]
        if width != NUM_ACTIONS:
            raise RLFreezeError(f"the last layer has {width} outputs: must be {NUM_ACTIONS}, one for each threshold.")

    def act(self, observation: np.ndarray) -> np.ndarray:
        """float32 [:data:`NUM_ACTIONS`] in [-1, 1] for an observation [:data:`SIZE`].

        Raises:
            RLFreezeError: the observation has another shape, or holds what is not a finite number.
        """
        x = np.asarray(observation, dtype=np.float32).astype(np.float64)
        if x.shape != (SIZE,) or not np.isfinite(x).all():
            raise RLFreezeError(f"an observation of shape {x.shape}: must be {SIZE} finite numbers.")
        # In float32 the last places would depend on the order in which a library adds.
        layers = [(weight.astype(np.float64), bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        for weight, bias in layers[:-1]:
            x = ACTIVATIONS[self.activation](weight @ x + bias)
        weight, bias = layers[-1]
        mean = weight @ x + bias
        low, high = -1.0, 1.0
        return np.clip(low + (mean + 1.0) * (high - low) / 2.0, low, high).astype(np.float32)

    def save(self, path: str | Path, about: str = "") -> None:
        """Write a policy file; an old one stays whole until the new one is.

        Raises:
            RLFreezeError: the place cannot be written.
        """
        layers = [
            _Layer(inputs=weight.shape[1], outputs=weight.shape[0], weight=_text(weight), bias=_text(bias))
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        document = _File(
            observation_size=SIZE, action_size=NUM_ACTIONS, activation=self.activation, layers=layers, about=about
        )  # fmt: skip
        write_text(path, document.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Network:
        """Read a policy file.

        Raises:
            RLFreezeError: it cannot be read, is no policy file, or is one for other observations.
        """
        try:
            with open(path, "rb") as file:
                data = file.read(LARGEST_FILE + 1)
        except OSError as error:
            raise RLFreezeError(f"cannot read the policy file {path}: {error.strerror}.") from None
        if len(data) > LARGEST_FILE:
            raise RLFreezeError(f"{path} has more than {LARGEST_FILE} bytes: it is no policy file.")
        try:
            document = _File.model_validate_json(data)
            weights = [_array(layer.weight, (layer.outputs, layer.inputs)) for layer in document.layers]
            biases = [_array(layer.bias, (layer.outputs,)) for layer in document.layers]
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "the document"
            raise RLFreezeError(f"{path} is no policy file of version {VERSION}: {place}: {first['msg']}.") from None
        except (ValueError, binascii.Error) as error:
            raise RLFreezeError(f"{path} is no policy file: {error}.") from None
        if (document.observation_size, document.action_size) != (SIZE, NUM_ACTIONS):
            raise RLFreezeError(
                f"{path} takes {document.observation_size} numbers and answers {document.action_size}: this release has "
                f"{SIZE} and {NUM_ACTIONS}. Take the policy file that came with it, or train one anew."
            )
        return cls(weights, biases, document.activation)


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _array(text: str, shape: tuple[int, ...]) -> np.ndarray:
    data = base64.b64decode(text, validate=True)
    if len(data) != 4 * int(np.prod(shape)):
        raise ValueError(f"{len(data)} bytes where float32 {list(shape)} has {4 * int(np.prod(shape))}")
    return np.frombuffer(data, dtype="<f4").reshape(shape)
