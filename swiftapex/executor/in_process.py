"""One worker in this process."""

from __future__ import annotations

from swiftapex.config.schema import EngineConfig
from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.core.records import BusyTimes, DeviceMemory
from swiftapex.core.trace import TraceRecorder
from swiftapex.kv.sizing import KVSizes
from swiftapex.model.source import ModelSource
from swiftapex.worker.worker import Worker


class InProcessExecutor:
    """Calls the worker directly."""

    def __init__(
        self,
        source: ModelSource,
        engine: EngineConfig,
        sizes: KVSizes,
        max_model_len: int,
        trace: TraceRecorder | None = None,
    ) -> None:
        self._worker = Worker(source, engine, sizes, max_model_len, trace)
        self.runs_ahead = self._worker.runs_ahead
        self.device_name = self._worker.device_name
        self.notes = self._worker.notes

    def execute(self, plan: StepPlan) -> StepResult:
        return self._worker.execute(plan)

    def touch_kv(self) -> None:
        self._worker.touch_kv()

    def busy(self) -> BusyTimes:
        return self._worker.busy()

    def settle_memory(self) -> None:
        self._worker.settle_memory()

    def memory(self) -> list[DeviceMemory]:
        memory = self._worker.memory()
        return [] if memory is None else [memory]

    def resize_gpu_kv(self, sizes: KVSizes) -> None:
        self._worker.resize_gpu_kv(sizes)

    def close(self) -> None:
        self._worker.close()
