"""The ways in: our engine instead of the stock one for the length of a ``deepspeed.initialize`` call."""

from __future__ import annotations

import base64
import functools
import inspect
import os
import threading
from collections.abc import Mapping
from typing import Any

import deepspeed
import hjson

from rlfreeze_ds.config import FreezeConfig, parse_block
from rlfreeze_ds.errors import ConfigError
from rlfreeze_ds.log import log_rank0

_STOCK_INITIALIZE = deepspeed.initialize
_SWAP_LOCK = threading.Lock()


@functools.wraps(_STOCK_INITIALIZE)
def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """See :func:`rlfreeze_ds.initialize`."""
    call = inspect.signature(_STOCK_INITIALIZE).bind(*args, **kwargs).arguments
    config, reason = _freeze_config(call)
    if config is None or not config.enabled:
        log_rank0(f"off: {reason}; this job trains on the stock engine")
        return _STOCK_INITIALIZE(*args, **kwargs)

    # Imported late: a job that does not ask for freezing never loads the engine.
    from rlfreeze_ds.engine import bind_config
    from rlfreeze_ds.support import check_supported_call

    check_supported_call(call.get("model"))
    with _SWAP_LOCK:
        # deepspeed.initialize looks the engine class up by this name; there is no other hook.
        stock_class = deepspeed.PipelineEngine
        deepspeed.PipelineEngine = bind_config(config)
        try:
            result = _STOCK_INITIALIZE(*args, **kwargs)
        finally:
            deepspeed.PipelineEngine = stock_class
    log_rank0(f"on: {reason}; {result[0].freeze_controller.describe()}")
    return result


def install() -> None:
    """See :func:`rlfreeze_ds.install`."""
    deepspeed.initialize = initialize


def uninstall() -> None:
    """See :func:`rlfreeze_ds.uninstall`."""
    deepspeed.initialize = _STOCK_INITIALIZE


def _freeze_config(call: Mapping[str, Any]) -> tuple[FreezeConfig | None, str]:
    """The block that DeepSpeed itself would read for this call, and where it was found."""
    source = call.get("config")
    if source is None:
        source = call.get("config_params")
    script_args = call.get("args")
    for name in ("deepscale_config", "deepspeed_config"):
        if source is None:
            source = getattr(script_args, name, None)
    if source is None:
        return None, "no DeepSpeed config was given"
    if isinstance(source, Mapping):
        ds_config, where = source, "the config dict"
    else:
        ds_config, where = _read_config(os.fspath(source)), f"{os.fspath(source)[:200]}"
    config = parse_block(ds_config)
    if config is None:
        return None, f'no "rlfreeze" block in {where}'
    return config, f'"rlfreeze": {{"enabled": {str(config.enabled).lower()}}} in {where}'


def _read_config(source: str) -> Mapping[str, Any]:
    if os.path.exists(source):
        with open(source, encoding="utf-8") as file:
            text = file.read()
    else:
        try:
            text = base64.urlsafe_b64decode(source).decode("utf-8")
        except (ValueError, UnicodeDecodeError):
            raise ConfigError(
                f"DeepSpeed config {source!r}: no such file, and not base64 either; give the path of a JSON file"
            ) from None
    try:
        loaded = hjson.loads(text)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"DeepSpeed config {source!r} is not JSON: {error}") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"DeepSpeed config {source!r}: must be a JSON object, found {type(loaded).__name__}")
    return loaded
