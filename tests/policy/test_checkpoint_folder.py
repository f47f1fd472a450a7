"""Checkpoints are whole or absent, few, and one's own."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.policy.checkpoint_folder import CheckpointFolder

ABOUT = {"algorithm": "PPO"}


def _write(path: Path) -> None:
    (path / "part").mkdir()
    (path / "part" / "state").write_bytes(b"state")


def _full(path: Path) -> None:
    _write(path)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_newest_two_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "kept")
    for updates in (1, 9, 10, 200):
        folder.save(updates, ABOUT, _write)
    assert [entry.name for entry in folder.all()] == ["checkpoint-000000010", "checkpoint-000000200"]
    assert folder.newest(ABOUT) == folder.all()[-1]
    assert (folder.all()[-1] / "part" / "state").read_bytes() == b"state"
    folder.save(200, ABOUT, _write)
    assert len(folder.all()) == 2


def test_a_full_disk_leaves_the_last_one_whole(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert folder.newest(ABOUT) is None
    kept = folder.save(1, ABOUT, _write)
    with pytest.raises(OSError, match="No space"):
        folder.save(2, ABOUT, _full)
    assert list(tmp_path.iterdir()) == [kept]
    # What a killed server left goes with the next checkpoint, and is never taken for one.
    (tmp_path / ".writing-1").mkdir()
    assert folder.newest(ABOUT) == kept
    folder.save(3, ABOUT, _write)
    assert not (tmp_path / ".writing-1").exists()


def test_only_ones_own_is_restored(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    checkpoint = folder.save(1, ABOUT, _write)
    state = checkpoint / "part" / "state"
    for path in (tmp_path, checkpoint, state.parent, state):
        rights = path.stat().st_mode
        path.chmod(rights | 0o020)
        with pytest.raises(RLFreezeError, match="only one's own"):
            folder.newest(ABOUT)
        path.chmod(rights)
    assert folder.newest(ABOUT) == checkpoint
    with pytest.raises(RLFreezeError, match="algorithm = 'PPO', this server 'SAC'"):
        folder.newest({"algorithm": "SAC"})
    state.unlink()
    state.symlink_to("/etc/hostname")
    with pytest.raises(RLFreezeError, match="link"):
        folder.newest(ABOUT)
    state.unlink()
    (checkpoint / "rlfreeze_ds.json").write_text("[]")
    with pytest.raises(RLFreezeError, match="no checkpoint of a policy server"):
        folder.newest(ABOUT)
    with pytest.raises(RLFreezeError, match="no folder"):
        CheckpointFolder(tmp_path / "absent").newest(ABOUT)
