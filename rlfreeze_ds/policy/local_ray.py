"""A Ray of the server's own: on loopback, behind a token, in a private folder, without dashboard or usage reports."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from rlfreeze_ds.errors import RLFreezeError

_OBJECT_STORE_BYTES = 100 * 2**20
"""Batches are a few MB; Ray would else take a third of the memory."""


def prepare(folder: Path) -> None:
    """Set what Ray reads when it is imported, so call it before. For a local Ray alone: a cluster has its own."""
    token = folder / "ray_token"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(
        # On loopback other users of the machine still reach Ray, and what reaches it runs code.
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        # Not one machine of several; the name tells where Ray needed that first. Else it takes 127.0.0.1 for the machine's outer
        # address, and listens on every interface.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
        # Whoever calls Ray after its end would start another one, without any of this.
        RAY_ENABLE_AUTO_CONNECT="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        # Workers begin when something is to run in them.
        RAY_prestart_worker_first_driver="0",
        RAY_enable_worker_prestart="0",
    )


def start(folder: Path, num_cpus: int, address: str | None = None) -> None:
    """``ray.init``; call it from the main thread, Ray's processes end with the thread that started them.

    Args:
        folder: private and short: sockets lie in it, and their names may have 107 characters. :func:`prepare` has been there,
            unless there is an ``address``.
        num_cpus: what the server will ask for.
        address: an existing cluster, which keeps its own settings; None starts one.

    Raises:
        RLFreezeError: Ray does not start, the cluster does not answer or has too few CPUs.
    """
    import ray

    settings: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        # Ray opens its folder to everyone, so it gets one within: nobody else comes through the private one.
        settings |= {
            "num_cpus": num_cpus, "num_gpus": 0, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False,
            "_temp_dir": str(folder / "r"), "_node_ip_address": "127.0.0.1",
        }  # fmt: skip
    try:
        ray.init(**settings)
    except Exception as error:
        where = "start a local Ray" if address is None else f"join the Ray cluster at {address}"
        raise RLFreezeError(f"cannot {where}: {type(error).__name__}: {error}") from None
    there = ray.cluster_resources().get("CPU", 0.0)
    if there < num_cpus:
        ray.shutdown()
        raise RLFreezeError(
            f"the Ray cluster has {there:g} CPUs and the server asks for {num_cpus}: take fewer --num-env-runners or "
            "--num-learners. A checkpoint restores with fewer as well."
        )


def stop() -> None:
    """End Ray's processes, or leave the cluster."""
    import ray

    ray.shutdown()
