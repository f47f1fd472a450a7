"""The run log: JSON lines in ``$RLFREEZE_RUN_DIR/rlfreeze.jsonl``, on rank 0. A full disk never stops a job."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO

from rlfreeze_ds.log import logger


class RunLog:
    """Appends one line per event; goes quiet after the first failure, with one warning."""

    def __init__(self, directory: str | None) -> None:
        self._file: TextIO | None = None
        if not directory:
            return
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = open(  # noqa: SIM115 - open for the length of the run
                os.path.join(directory, "rlfreeze.jsonl"), "a", encoding="utf-8", buffering=1
            )
        except OSError as error:
            logger.warning(f"no run log: {error}; training goes on")

    @property
    def active(self) -> bool:
        """Whether anybody reads what is written."""
        return self._file is not None

    def write(self, event: str, **fields: Any) -> None:
        """Append ``{"event": event, ...}``."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
        except OSError as error:
            logger.warning(f"the run log stops here: {error}; training goes on")
            self._file = None
