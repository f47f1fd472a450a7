"""The errors that a user of rlfreeze_ds can meet.

Every message names what was found, where, what is allowed and what to do.
"""


def in_words(error: Exception) -> str:
    """An error within a sentence: ours by its message alone, any other with its class in front."""
    return str(error) if isinstance(error, RLFreezeError) else f"{type(error).__name__}: {error}"


class RLFreezeError(Exception):
    """Base class of every error that rlfreeze_ds raises on purpose."""


class ConfigError(RLFreezeError, ValueError):
    """The ``"rlfreeze"`` block of the DeepSpeed JSON is wrong."""


class TargetError(ConfigError):
    """A target that no allowed amount of freezing reaches."""


class UnsupportedError(RLFreezeError, RuntimeError):
    """The job uses a mode in which freezing would not be exact, or a DeepSpeed that lacks a symbol we override."""


class ScheduleError(RLFreezeError, ValueError):
    """A pipeline schedule that is incomplete, contradictory or cannot be executed."""


class ProfileError(RLFreezeError, ValueError):
    """A profile CSV that cannot be read or does not describe one batch."""


class SolverError(RLFreezeError, RuntimeError):
    """No solver is installed, or none gave an answer that satisfies the plan's own constraints."""


class MaskMismatchError(RLFreezeError, RuntimeError):
    """Data-parallel replicas of one stage disagree on what is frozen."""
