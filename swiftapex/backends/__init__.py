"""Backends: who computes. `make_backends` builds what an engine's device names."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swiftapex.backends.clock import Clock, HostClock
from swiftapex.core.errors import ConfigError

if TYPE_CHECKING:
    from swiftapex.attention import CpuAttention
    from swiftapex.config.schema import EngineConfig
    from swiftapex.core.ops import AttentionShape, Backend, Memory
    from swiftapex.kv.staging import Copies
    from swiftapex.model.stages import Stages
    from swiftapex.pipelines.readiness import Progress
    from swiftapex.pipelines.repeated import RecordedSegments, RepeatedPasses


@dataclass(frozen=True, slots=True)
class Backends:
    """The GPU side, and with a CPU side: what attends over KV in host memory, and what copies KV
    between the sides. `memory`: of the GPU side's device, where it is not the host's. `repeated`
    makes what records passes, from the blocks of the longest request, the shape of attention and
    whether spans are being traced; `segments` what records the layer math between two attention
    calls, from the stages and the same question; None: nothing does. `active`: around all work.
    `finish`: waits for what was launched."""

    gpu: Backend
    cpu_attention: CpuAttention | None
    copies: Copies | None
    clock: Clock = field(default_factory=HostClock)
    progress: Progress | None = None
    memory: Memory | None = None
    repeated: Callable[[int, AttentionShape, Callable[[], bool]], RepeatedPasses] | None = None
    segments: Callable[[Stages, Callable[[], bool]], RecordedSegments] | None = None
    active: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    finish: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Stops all threads."""
        for part in (self.cpu_attention, self.copies, self.gpu):
            if part is not None:
                part.close()


def check_settings(engine: EngineConfig, with_cpu_side: bool) -> None:
    """ConfigError for settings that the device cannot have, on whatever machine."""
    if not with_cpu_side:
        return
    device, is_int8 = engine.device, engine.cpu.kv_dtype == "int8"
    if device == "reference" and is_int8:
        raise ConfigError("engine.cpu.kv_dtype: int8 needs the native kernels, use device cpu")
    if device == "cuda" and is_int8:
        raise ConfigError("engine.cpu.kv_dtype: int8 cannot be copied from a GPU yet")
    if (device == "cuda" or is_int8) and not takes_native_blocks(engine.block_size):
        raise ConfigError(
            f"engine.block_size: {engine.block_size}, but KV in host memory needs a multiple of "
            f"16, at most 128, {'in int8' if is_int8 else 'with device cuda'}"
        )


def takes_native_blocks(block_size: int) -> bool:
    """Whether the CPU's native attention takes KV blocks of so many tokens."""
    return block_size % 16 == 0 and block_size <= 128


def check_device(engine: EngineConfig) -> None:
    """ConfigError where this machine or this build has not got `engine.device`."""
    if engine.device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("engine.device: cuda, but torch sees no CUDA device here; use 'cpu'")
    if importlib.util.find_spec("swiftapex._kernels_cuda") is None:
        raise ConfigError(
            "engine.device: cuda, but swiftapex was built without its CUDA kernels: install it "
            "anew where nvcc is on the PATH"
        )


def make_backends(engine: EngineConfig, with_cpu_side: bool) -> Backends:
    """The backends of `engine.device`. ConfigError where this build or machine has none.

    On the device `cpu` both sides share the cores: with a CPU side, its attention threads get half
    of them (rounded down, one at least; or `cpu.threads`), and the GPU side the others.
    """
    check_settings(engine, with_cpu_side)
    check_device(engine)
    ranks = engine.tensor_parallel_size
    if engine.device == "reference":
        from swiftapex.backends.reference import ReferenceBackend, ReferenceCopies, ReferenceLane

        reference = ReferenceBackend()
        if not with_cpu_side:
            return Backends(reference, None, None)
        return Backends(reference, ReferenceLane(reference), ReferenceCopies())
    if engine.device == "cpu":
        from swiftapex.backends.cpu import CpuBackend
        from swiftapex.backends.threads import cpu_threads, split_threads

        if not with_cpu_side:
            return Backends(CpuBackend(cpu_threads(engine.cpu.threads, ranks)), None, None)
        from swiftapex.backends.cpu_lane import CopyLane, CpuLane

        gpu_threads, cpu_side_threads = split_threads(engine.cpu.threads, ranks)
        lane = CpuLane(cpu_side_threads, kernel=engine.cpu.attention_kernel)
        return Backends(CpuBackend(gpu_threads), lane, CopyLane())
    return _cuda_backends(engine, with_cpu_side)


def _cuda_backends(engine: EngineConfig, with_cpu_side: bool) -> Backends:
    """One core is left to the launching thread."""
    import torch

    from swiftapex.backends.cuda import CudaBackend
    from swiftapex.backends.cuda_clock import CudaClock, CudaProgress
    from swiftapex.backends.cuda_graphs import CudaGraphs
    from swiftapex.backends.cuda_lane import CudaCopies, CudaCpuLane
    from swiftapex.backends.cuda_memory import CudaMemory
    from swiftapex.backends.cuda_segments import CudaSegments
    from swiftapex.backends.threads import threads_beside_launching

    copies = None
    if with_cpu_side:  # before the compute stream may be confined to a part of the GPU
        copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    gpu = CudaBackend(engine.gpu.sm_count, engine.gpu.memory)
    lane = None
    if with_cpu_side:
        threads = threads_beside_launching(engine.cpu.threads, engine.tensor_parallel_size)
        lane = CudaCpuLane(threads, gpu.device, engine.cpu.attention_kernel)
    return Backends(
        gpu=gpu,
        cpu_attention=lane,
        copies=copies,
        clock=CudaClock(),
        progress=CudaProgress(),
        memory=CudaMemory(gpu.device, engine.gpu.memory),
        repeated=functools.partial(CudaGraphs, gpu.stream, lane),
        segments=CudaSegments,
        active=gpu.active,
        finish=gpu.stream.synchronize,
    )
