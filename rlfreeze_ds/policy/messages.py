"""What a training job and a policy server say to each other: versioned models, JSON on the wire, the same on both sides.

``POST /v1/sessions`` (:class:`Open` -> :class:`Opened`), ``POST /v1/sessions/{session_id}/act`` (:class:`Window` ->
:class:`Answer`), ``POST /v1/sessions/{session_id}/close`` (:class:`Close` -> :class:`Closed`), each with the bearer token.
Another status than 200 comes with ``{"error": "..."}``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rlfreeze_ds.policy.observation import NUM_ACTIONS, SIZE

VERSION = 1
"""Of these messages. A server answers another version with 409 and says which it speaks."""

LARGEST_BODY = 16_384
"""Bytes of a request; more is answered with 413."""

_Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]
_Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    version: int = VERSION


class Open(_Message):
    """A job begins an episode, or goes on with one after a restart: then ``next_window`` > 0."""

    run_id: _Name = Field(description="of the job; the same after a restart")
    next_window: int = Field(0, ge=0, le=10**9, description="number of the first window that will follow")


class Opened(_Message):
    """``session_id`` names the episode in what follows; an earlier session of the same ``run_id`` is closed."""

    session_id: _Name


class Window(_Message):
    """What one window of steps brought. ``reward`` is that of the answer to the window before; None for a session's first."""

    window: int = Field(ge=0, le=10**9, description="counts up by one; the same number again gets the same answer again")
    observation: list[_Finite] = Field(min_length=SIZE, max_length=SIZE)
    reward: _Finite | None = None


class Answer(_Message):
    """What to do until the next window."""

    window: int = Field(ge=0, le=10**9)
    action: list[Annotated[float, Field(allow_inf_nan=False, ge=-1, le=1)]] = Field(
        min_length=NUM_ACTIONS, max_length=NUM_ACTIONS
    )
    updates: int = Field(ge=0, description="how often the policy had been updated")


class Close(_Message):
    """The job ends, or leaves the policy: what the last answer brought."""

    window: int = Field(ge=0, le=10**9, description="the number that the next window would have had")
    observation: list[_Finite] | None = Field(None, min_length=SIZE, max_length=SIZE)
    reward: _Finite | None = None


class Closed(_Message):
    """How many transitions the server learns from."""

    transitions: int = Field(ge=0)
