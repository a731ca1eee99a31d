"""Executors: where the workers run. `make_executor` builds what an engine's settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swiftapex.config.schema import EngineConfig, ModelSection
from swiftapex.core.trace import TraceRecorder
from swiftapex.kv.sizing import KVSizes
from swiftapex.model.source import ModelSource

if TYPE_CHECKING:
    from swiftapex.executor.base import Executor

ExecutorFactory = Callable[
    [ModelSection, ModelSource, EngineConfig, KVSizes, int, TraceRecorder | None], "Executor"
]


def make_executor(
    model: ModelSection,
    source: ModelSource,
    engine: EngineConfig,
    sizes: KVSizes,
    max_model_len: int,
    trace: TraceRecorder | None,
) -> Executor:
    """One worker in this process, or Ray actors where `tensor_parallel_size` asks for ranks.
    `source` is what `model` names."""
    if engine.tensor_parallel_size == 1:
        from swiftapex.executor.in_process import InProcessExecutor

        return InProcessExecutor(source, engine, sizes, max_model_len, trace)
    from swiftapex.executor.ray_executor import RayExecutor

    return RayExecutor(model, engine, sizes, max_model_len, trace)
