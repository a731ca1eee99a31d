"""Backends: who computes. `make_backends` builds what an engine's device names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftapex.core.errors import ConfigError

if TYPE_CHECKING:
    from swiftapex.attention import CpuAttention
    from swiftapex.config.schema import EngineConfig
    from swiftapex.core.ops import Backend
    from swiftapex.kv.staging import Copies


@dataclass(frozen=True, slots=True)
class Backends:
    """The GPU side, and with a CPU side: what attends over KV in host memory, and what copies KV
    between the sides."""

    gpu: Backend
    cpu_attention: CpuAttention | None
    copies: Copies | None

    def close(self) -> None:
        """Stops all threads."""
        for part in (self.cpu_attention, self.copies, self.gpu):
            if part is not None:
                part.close()


def make_backends(engine: EngineConfig, with_cpu_side: bool) -> Backends:
    """The backends of `engine.device`. ConfigError where this build or machine has none.

    On the device `cpu` both sides share the cores: with a CPU side, its attention threads get half
    of them (rounded down, one at least; or `cpu.threads`), and the GPU side the others.
    """
    if engine.device == "reference":
        if with_cpu_side and engine.cpu.kv_dtype == "int8":
            raise ConfigError("engine.cpu.kv_dtype: int8 needs the native kernels, use device cpu")
        from swiftapex.backends.reference import ReferenceBackend, ReferenceCopies, ReferenceLane

        reference = ReferenceBackend()
        if not with_cpu_side:
            return Backends(reference, None, None)
        return Backends(reference, ReferenceLane(reference), ReferenceCopies())
    if engine.device == "cpu":
        from swiftapex.backends.cpu import CpuBackend
        from swiftapex.backends.threads import cpu_threads, split_threads

        if not with_cpu_side:
            return Backends(CpuBackend(cpu_threads(engine.cpu.threads)), None, None)
        from swiftapex.backends.cpu_lane import CopyLane, CpuLane

        gpu_threads, cpu_side_threads = split_threads(engine.cpu.threads)
        return Backends(CpuBackend(gpu_threads), CpuLane(cpu_side_threads), CopyLane())
    raise ConfigError(f"engine.device: {engine.device!r} is not supported yet, use 'cpu'")
