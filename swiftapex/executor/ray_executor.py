"""Workers that share every layer, each a Ray actor: tensor parallelism.

The driver plans once and sends the plan to every rank; rank 0 answers for all, since all compute
the same tokens. Nothing else crosses processes through the driver: the ranks' sums go through
torch.distributed, their decisions on readiness through memory that they share.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from swiftapex.config.schema import EngineConfig, ModelSection
from swiftapex.core.errors import EngineError
from swiftapex.core.plan import StepPlan, StepResult, Tokens
from swiftapex.core.records import BusyTimes, DeviceMemory
from swiftapex.core.trace import TraceRecorder
from swiftapex.executor.rank import Launched, WorkerSettings, mean_busy
from swiftapex.executor.ray_ranks import RayRanks
from swiftapex.kv.sizing import KVSizes


@dataclass(slots=True)
class ControlTraffic:
    """What crossed between the driver and the ranks since the start. `overhead_us`: of `execute`,
    what rank 0 did not compute: plans to bytes, both ways, and answers back."""

    iterations: int = 0
    bytes_sent: int = 0  # to all ranks
    bytes_received: int = 0
    overhead_us: float = 0.0


class RayExecutor:
    """`ranks`: those of an earlier executor, which stay open when this one is closed (None: its
    own). EngineError where a rank fails; then all are ended."""

    def __init__(
        self,
        model: ModelSection,
        engine: EngineConfig,
        sizes: KVSizes,
        max_model_len: int,
        trace: TraceRecorder | None = None,
        ranks: RayRanks | None = None,
    ) -> None:
        self.traffic = ControlTraffic()
        self._trace = trace
        self._owns_ranks = ranks is None
        self.ranks = ranks or RayRanks(engine.tensor_parallel_size, engine.device)
        settings = WorkerSettings(model, engine, sizes, max_model_len, trace is not None)
        try:
            answers: list[tuple[bool, str, tuple[str, ...]]] = self.ranks.ask("start", settings)
            self.runs_ahead, self.device_name, _ = answers[0]
            self.notes = tuple(
                f"Rank {rank}: {note}" for rank, (*_, notes) in enumerate(answers) for note in notes
            )
        except BaseException:
            self.close()
            raise

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        ranks, traffic = self.ranks, self.traffic
        sent, received = ranks.bytes_sent, ranks.bytes_received
        with_spans = self._trace is not None and self._trace.active
        ranks.send(range(ranks.size), "execute", plan, with_spans)
        launched: Launched = ranks.receive(0)
        if self._trace is not None:
            for span in launched.spans:
                self._trace.span(*span[:4], **span.args)
        traffic.iterations += 1
        traffic.bytes_sent += ranks.bytes_sent - sent
        traffic.bytes_received += ranks.bytes_received - received
        traffic.overhead_us += (time.perf_counter() - begin) * 1e6 - launched.duration_us
        tokens = launched.tokens
        fetch = self._fetch if tokens is None else lambda: tokens
        return StepResult(launched.completing, launched.in_flight, fetch)

    def touch_kv(self) -> None:
        self.ranks.ask("touch_kv")

    def busy(self) -> BusyTimes:
        """Nothing is known any more where ranks have failed."""
        try:
            return mean_busy(self.ranks.ask("busy"))
        except EngineError:
            return BusyTimes(None, None)

    def settle_memory(self) -> None:
        self.ranks.ask("settle_memory")

    def memory(self) -> list[DeviceMemory]:
        return [memory for memory in self.ranks.ask("memory") if memory is not None]

    def resize_gpu_kv(self, sizes: KVSizes) -> None:
        self.ranks.ask("resize_gpu_kv", sizes)

    def close(self) -> None:
        """Also where ranks have failed, or were left in the middle of an iteration."""
        if self._owns_ranks:
            self.ranks.close()
        else:
            with suppress(EngineError):  # the ranks have failed
                self.ranks.ask("stop")

    def _fetch(self) -> Tokens:
        self.ranks.send([0], "fetch")
        tokens: Tokens = self.ranks.receive(0)
        return tokens
