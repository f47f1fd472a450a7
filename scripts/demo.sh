#!/usr/bin/env bash
# The main job, end to end: a byte-level GPT on the stock pipeline engine and on ours, on the same seeds.
#
# How to run: bash scripts/demo.sh [--quick] [--help for more]
# What to expect: installs what is needed (into .venv unless a virtual environment is active), then about ten minutes
#   on two CPU cores, a table at the end and the same figures in runs/demo/summary.json.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh highs
exec python scripts/demo.py "$@"
