"""What this machine lacks for an engine, asked before anything is loaded: `--dry-run` says it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

from swiftapex.backends import check_device
from swiftapex.config.schema import EngineConfig
from swiftapex.core.errors import ConfigError
from swiftapex.engine.checks import max_model_len
from swiftapex.kv.sizing import check_host_room, kv_sizes
from swiftapex.model.source import ModelSource


def lacking(source: ModelSource, engine: EngineConfig, uses_cpu: bool) -> list[str]:
    """Why such an engine cannot be had here, in the words of the error that it would end with: GPU,
    build, Ray, host memory. Loads torch where the device is `cuda`."""
    config, dtype = source.config, source.dtype
    length = max_model_len(engine, config.max_length)
    sizes = kv_sizes(config, dtype, engine, length, uses_cpu)
    checks: list[Callable[[], None]] = [
        partial(_check_devices, engine),
        partial(_check_ray, engine),
        partial(check_host_room, config, dtype, engine, sizes),
    ]
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return found


def _check_devices(engine: EngineConfig) -> None:
    check_device(engine)
    if engine.device != "cuda":
        return
    import torch

    ranks, there = engine.tensor_parallel_size, torch.cuda.device_count()
    if there < ranks:
        raise ConfigError(
            f"engine.tensor_parallel_size: {ranks} ranks need a GPU each, and torch sees {there}"
        )


def _check_ray(engine: EngineConfig) -> None:
    if engine.tensor_parallel_size > 1 and importlib.util.find_spec("ray") is None:
        raise ConfigError("engine.tensor_parallel_size needs Ray: pip install 'swiftapex[tp]'")
