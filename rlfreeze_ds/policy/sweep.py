"""A small process that outlives the policy server by a moment, and takes with it what a killed one leaves.

Ray's processes notice their parent's end, some of them only a minute later, and nobody would remove the private folder. Run as a
script: ``sweep.py FOLDER``; what it waits for is the end of its standard input.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PATIENCE_S = 5.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Begin to watch. When this process ends, or ``stdin`` is closed, the Ray in ``folder`` is killed, and that removed."""
    command = [sys.executable, "-I", "-S", __file__, str(folder)]
    nothing = subprocess.DEVNULL
    # In a session of its own: what kills the server's group must not kill this.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Have it sweep, and wait for that."""
    process.communicate(timeout=2 * _PATIENCE_S)


def _is_rays(pid: int, folder: str) -> bool:
    """Whether the process is one of the Ray in ``folder``: it inherited the path of its token, or has its title, which may have
    been written over that, and a log open in there. A job that merely names a file in there, or reads one, is none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"RAY_AUTH_TOKEN_PATH={folder}/ray_token".encode() in file.read().split(b"\0"):
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if not file.read().startswith(b"ray::"):
                return False
        return any(os.readlink(entry.path).startswith(f"{folder}/") for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _sweep(folder: str) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_rays(pid, folder)]
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    while os.read(0, 4096):
        pass
    _sweep(sys.argv[1])
