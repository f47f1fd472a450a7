#!/usr/bin/env bash
# Lint and tests.
#
# How to run: bash scripts/test.sh [arguments of pytest]
# What to expect: installs what is needed (into .venv unless a virtual environment is active); pytest's summary comes last.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh highs,viz,server,dev
ruff check .
exec python -m pytest -q "$@"
