"""Write a small file so that a reader, or a run that fails half-way, never sees half of it."""

from __future__ import annotations

import os
from pathlib import Path

from rlfreeze_ds.errors import RLFreezeError


def write_text(path: str | Path, text: str) -> None:
    """:func:`write_bytes` of a text, as UTF-8.

    Raises:
        RLFreezeError: the place cannot be written.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write to a temporary file beside ``path``, then rename it; an old file stays as it was if anything fails.

    Raises:
        RLFreezeError: the place cannot be written.
    """
    target = os.path.realpath(path)  # renaming onto a symbolic link would replace the link, not the file it names
    temporary = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.getpid()}.tmp")
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError("it is not a regular file")
        if os.path.exists(target) and not os.access(target, os.W_OK):
            raise OSError("the file there is write-protected")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except FileExistsError:
            raise OSError(f"{temporary} is left from an earlier run, remove it") from None
        except BaseException:
            if os.path.exists(temporary):
                os.remove(temporary)
            raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RLFreezeError(
            f"cannot write {path}: {reason}. Nothing was changed; name a file in a folder that exists and is writable."
        ) from None
