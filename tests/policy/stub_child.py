"""What ``python -m rlfreeze_ds serve`` is to its parent, in small; run by the tests of the server that a job starts.

``--say WORDS`` prints them and ends with code 3; ``--never-ready`` does not listen; ``--deaf`` does not watch its parent;
``--look`` writes what the process can see of itself to the file ``looks.json`` beside the token's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

from rlfreeze_ds.policy.auto_server import watch_parent, write_ready
from rlfreeze_ds.policy.connection import read_token
from tests.policy import stub_server

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
for name in ("--token-file", "--ready-file"):
    parser.add_argument(name, type=Path, required=True)
parser.add_argument("--say")
parser.add_argument("--looks", type=Path)
for name in ("--policy-file", "--train-batch", "--seed"):
    parser.add_argument(name)  # what a job tells the real one
for name in ("--exit-with-parent", "--never-ready", "--deaf"):
    parser.add_argument(name, action="store_true")
arguments = parser.parse_args()

if arguments.say:
    print(f"{arguments.say} {read_token(arguments.token_file)}", flush=True)
    sys.exit(3)
if arguments.looks:
    seen = {name: Path(f"/proc/self/{name}").read_bytes().decode("latin-1").split("\0") for name in ("cmdline", "environ")}
    arguments.looks.write_text(json.dumps({**seen, "token": read_token(arguments.token_file)}))
if arguments.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif arguments.exit_with_parent:
    watch_parent(lambda: os._exit(0))
if not arguments.never_ready:
    stub_server.TOKEN = read_token(arguments.token_file)
    write_ready(arguments.ready_file, stub_server.StubServer(arguments.port).port)
threading.Event().wait()
