"""What a process beside a training job sees of the job's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import rlfreeze_ds

# Variables that tell a process its part in a job, or how many threads and which devices to take: none of it concerns a child.
_SCRUBBED = (
    "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "CROSS_", "TORCH", "NCCL_", "GLOO_", "DS_", "RLFREEZE_",
    "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "HIP_", "ROCR_", "OMPI_", "PMI", "MPI", "MV2_", "SLURM_", "RAY_",
    "PYTHONINSPECT",
)  # fmt: skip


def child_environment() -> dict[str, str]:
    """Ours, without our place in the job, and with our own way to modules: the package may be on ``sys.path`` alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)}
    places = [os.path.abspath(place) for place in sys.path if isinstance(place, str)]
    package = str(Path(rlfreeze_ds.__file__).parents[1])
    if package not in places:
        places.append(package)
    return {**kept, "PYTHONPATH": os.pathsep.join(places)}
