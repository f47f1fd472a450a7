"""One logger for the package; one line at a time, on rank 0 unless a fault is local."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("rlfreeze_ds")


def _configure() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("rlfreeze: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    level = os.environ.get("RLFREEZE_LOG_LEVEL", "INFO").upper()
    logger.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


_configure()


def log_rank0(message: str, level: int = logging.INFO) -> None:
    """Log on the global rank 0 alone."""
    if _rank() == 0:
        logger.log(level, message)


def _rank() -> int:
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)
