"""Run an unmodified DeepSpeed script on our engine.

    deepspeed --num_gpus 2 --module rlfreeze_ds.launch train.py --deepspeed --deepspeed_config ds.json

The launcher puts ``--local_rank=N`` first; it is passed on to the script in the same place. ``-m package.module``
runs a module instead of a file.
"""

from __future__ import annotations

import datetime
import os
import runpy
import sys
import traceback

import rlfreeze_ds

USAGE = "usage: python -m rlfreeze_ds.launch [--local_rank=N] (script.py | -m module) [arguments of the script]"


def split_arguments(argv: list[str]) -> tuple[list[str], bool, str, list[str]]:
    """Launcher flags, whether a module is meant, the target, and the target's own arguments."""
    rest = list(argv)
    launcher: list[str] = []
    while rest and rest[0].startswith(("--local_rank", "--local-rank")):
        launcher.append(rest.pop(0))
        if "=" not in launcher[-1] and rest:
            launcher.append(rest.pop(0))
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        raise SystemExit(f"rlfreeze_ds.launch: no script found in {argv!r}\n{USAGE}")
    return launcher, is_module, rest[0], rest[1:]


def main(argv: list[str] | None = None) -> None:
    """Install our ``deepspeed.initialize`` and run the target as ``__main__``."""
    launcher, is_module, target, arguments = split_arguments(sys.argv[1:] if argv is None else argv)
    if not is_module and not os.path.isfile(target):
        raise SystemExit(f"rlfreeze_ds.launch: no such script: {target}\n{USAGE}")
    rlfreeze_ds.install()
    sys.argv = [target, *launcher, *arguments]
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    except Exception as error:
        # Peers of a failed rank print only "connection reset": rank and time make the first cause easy to find.
        now = datetime.datetime.now().isoformat(timespec="milliseconds")
        traceback.print_exc()
        print(
            f"rlfreeze: rank {os.environ.get('RANK', '0')} failed at {now}: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
