"""The interface of an executor: it hides where the workers run."""

from __future__ import annotations

from typing import Protocol

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.core.records import BusyTimes, DeviceMemory
from swiftapex.kv.sizing import KVSizes


class Executor(Protocol):
    runs_ahead: bool  # whether `execute` returns while the workers still compute
    notes: tuple[str, ...]  # what users should know of how memory was had, a line each
    device_name: str  # of the GPU side's device, as its maker calls it; "cpu" for the host

    def execute(self, plan: StepPlan) -> StepResult:
        """Launches one iteration on all workers; its result's `fetch` waits for the tokens."""

    def touch_kv(self) -> None:
        """Makes the KV in host memory real, while nothing runs: what was never written is one page
        of zeros, read again and again, and no measurement of reading KV would be true."""

    def busy(self) -> BusyTimes:
        """Seconds of computing so far, on average over the workers."""

    def settle_memory(self) -> None:
        """Waits, gives back what no tensor on a device uses, and begins new peaks."""

    def memory(self) -> list[DeviceMemory]:
        """Of each worker's device; none where the GPU side is the host."""

    def resize_gpu_kv(self, sizes: KVSizes) -> None:
        """Other KV on the GPUs, with nothing in it, before the first request."""

    def close(self) -> None:
        """Ends the workers and frees what they hold."""
