"""Backends: who computes. `make_backend` builds the one that an engine's device names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftapex.core.errors import ConfigError

if TYPE_CHECKING:
    from swiftapex.config.schema import EngineConfig
    from swiftapex.core.ops import Backend


def make_backend(engine: EngineConfig) -> Backend:
    """The backend of `engine.device`. ConfigError where this build or machine has none."""
    if engine.device == "reference":
        from swiftapex.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if engine.device == "cpu":
        from swiftapex.backends.cpu import CpuBackend
        from swiftapex.backends.threads import cpu_threads

        return CpuBackend(cpu_threads(engine.cpu.threads))
    raise ConfigError(f"engine.device: {engine.device!r} is not supported yet, use 'cpu'")
