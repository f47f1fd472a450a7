"""Package description. Ranges are stated here; versions known to work together are pinned in constraints.txt."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "rlfreeze_ds/__init__.py").read_text(encoding="utf-8"), re.M)
assert VERSION is not None
README = ROOT / "README.md"

setup(
    name="rlfreeze_ds",
    version=VERSION.group(1),
    description="A DeepSpeed pipeline engine that freezes parameters per micro-batch to train faster",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rlfreeze_ds", "rlfreeze_ds.*"]),
    package_data={"rlfreeze_ds": ["**/*.json"]},
    install_requires=[
        "torch>=2.4",
        "deepspeed>=0.16.9,<0.20",
        "networkx>=3",
        "pulp>=3.3,<4",
        "pydantic>=2",
        "numpy",
    ],
    extras_require={
        "highs": ["highspy"],
        "viz": ["matplotlib"],
        "server": ["ray[rllib]", "gymnasium", "fastapi", "uvicorn"],
        "hf": ["transformers", "gguf", "accelerate"],
        "dev": ["pytest", "pytest-timeout", "ruff"],
    },
)
