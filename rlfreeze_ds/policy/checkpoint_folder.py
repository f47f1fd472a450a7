"""Checkpoints of a policy server in a folder: each is whole or absent, the newest few stay. Knows nothing of ray."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfreeze_ds.errors import RLFreezeError

KEPT = 2
"""Checkpoints that stay: the newest, and one more should that be damaged."""

_NAME = re.compile(r"checkpoint-(\d{9})")
_MANIFEST = "rlfreeze_ds.json"
_FORMAT = 1


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints ``checkpoint-<updates>`` in ``path``.

    They are pickles, and reading a pickle runs what it says: only what this user wrote, and nobody else can change, is read.
    """

    path: Path

    def save(self, updates: int, about: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Have ``write`` fill a fresh folder, then give it its name; the oldest checkpoints go.

        Args:
            updates: of the policy, names the checkpoint; one of the same number is replaced.
            about: facts that a restore compares, JSON.

        Raises:
            OSError: the disk is full or the folder cannot be written. What was there before is untouched.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self.path.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = self.path / f".writing-{os.getpid()}"
        target = self.path / f"checkpoint-{updates:09d}"
        try:
            temporary.mkdir(mode=0o700)
            write(temporary)
            document = {"format": _FORMAT, "updates": updates, **about}
            (temporary / _MANIFEST).write_text(json.dumps(document) + "\n", encoding="utf-8")
            for folder, _, names in os.walk(temporary):
                for name in names:
                    _flush(Path(folder) / name)
            if target.exists():  # a folder cannot be renamed onto one that holds something
                shutil.rmtree(target)
            os.replace(temporary, target)
            _flush(self.path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in self.all()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = [entry for entry in self.path.glob("checkpoint-*") if _NAME.fullmatch(entry.name) and entry.is_dir()]
        return sorted(found, key=lambda entry: entry.name)

    def newest(self, about: dict[str, Any]) -> Path | None:
        """The checkpoint to go on from, None where there is none yet.

        Raises:
            RLFreezeError: the folder is absent, it or what it holds may be written by others, or ``about`` differs.
        """
        if not self.path.is_dir():
            raise RLFreezeError(f"no folder {self.path} to restore from. Name the --checkpoint-dir of an earlier server.")
        found = self.all()
        if not found:
            return None
        checkpoint = found[-1]
        _check_owner(self.path)
        for folder, folders, names in os.walk(checkpoint):
            for name in ["", *folders, *names]:
                _check_owner(Path(folder) / name)
        try:
            document = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))
            differing = [name for name, value in {"format": _FORMAT, **about}.items() if document.get(name) != value]
        except (OSError, ValueError, AttributeError):
            raise RLFreezeError(f"{checkpoint} is no checkpoint of a policy server: {_MANIFEST} cannot be read.") from None
        if differing:
            name = differing[0]
            raise RLFreezeError(
                f"{checkpoint} has {name} = {document.get(name)!r}, this server {about.get(name, _FORMAT)!r}: restore it with "
                "the settings it was made with, or name another --checkpoint-dir."
            )
        return checkpoint


def _flush(path: Path) -> None:
    """Onto the disk, so that a rename is never there before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_owner(path: Path) -> None:
    facts = path.lstat()
    shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISLNK(facts.st_mode) or facts.st_uid != os.getuid() or shared:
        raise RLFreezeError(
            f"{path} belongs to another user, is a link, or may be written by others: a checkpoint can run code, so only one's "
            "own is restored. Copy it, own it and take others' write access away (chmod -R go-w) if you trust it."
        )
