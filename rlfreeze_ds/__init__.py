"""rlfreeze_ds: a DeepSpeed pipeline engine that freezes the right parameters, in the right micro-batch, on the right stage.

Importing this package imports neither torch nor deepspeed nor ray.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "initialize", "install", "uninstall"]


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with the same signature and the same four-tuple, on our engine where the JSON says so.

    Raises:
        ConfigError: the ``"rlfreeze"`` block is wrong.
        UnsupportedError: the job uses a mode in which freezing would not be exact.
    """
    from rlfreeze_ds.entry import initialize as entry_initialize

    return entry_initialize(*args, **kwargs)


def install() -> None:
    """Make every later call of ``deepspeed.initialize`` in this process go through :func:`initialize`. Idempotent."""
    from rlfreeze_ds.entry import install as entry_install

    entry_install()


def uninstall() -> None:
    """Undo :func:`install`."""
    from rlfreeze_ds.entry import uninstall as entry_uninstall

    entry_uninstall()
