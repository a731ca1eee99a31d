"""The data plane of one device: weights, KV, attention and the pipelines over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swiftapex.attention import Attention
from swiftapex.backends import make_backends
from swiftapex.config.schema import EngineConfig
from swiftapex.core.errors import EngineError
from swiftapex.core.ops import AttentionBatch, Group
from swiftapex.core.plan import StepPlan, StepResult, Tokens
from swiftapex.core.plugins import misreturned
from swiftapex.core.records import BusyTimes, DeviceMemory
from swiftapex.core.request import Placement
from swiftapex.core.trace import TraceRecorder
from swiftapex.kv.sizing import STAGING_DEPTH, KVSizes, attention_shape
from swiftapex.kv.staging import BlockCopies, StagedPrefill
from swiftapex.kv.store import KVStore
from swiftapex.model.shard import WHOLE, Shard
from swiftapex.model.source import ModelSource, as_torch_dtype
from swiftapex.model.stages import Stages
from swiftapex.pipelines import pipeline_class
from swiftapex.pipelines.base import Pipeline, PipelineParts
from swiftapex.pipelines.parked import ParkedCohorts
from swiftapex.pipelines.readiness import LaunchAhead, OwnReadiness, Readiness
from swiftapex.pipelines.repeated import (
    EachPassAnew,
    NothingRecorded,
    RecordedSegments,
    RepeatedPasses,
)
from swiftapex.worker.bind import Binder
from swiftapex.worker.completion import Completion
from swiftapex.worker.request_table import RequestTable
from swiftapex.worker.traced import Tracer, observe


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's place among the ranks of tensor parallelism."""

    shard: Shard
    group: Group
    readiness: Readiness


class Worker:
    """Executes plans. One per device; knows nothing of queues or policies, and of other workers
    only what `membership` says (None: there are none)."""

    def __init__(
        self,
        source: ModelSource,
        engine: EngineConfig,
        sizes: KVSizes,
        max_model_len: int,
        trace: TraceRecorder | None = None,
        membership: Membership | None = None,
    ) -> None:
        shard = WHOLE if membership is None else membership.shard
        group = None if membership is None else membership.group
        config, dtype = shard.config(source.shape), as_torch_dtype(source.dtype)
        self._num_layers = config.num_layers
        shape = attention_shape(config, engine)
        self._backends = make_backends(engine, with_cpu_side=sizes.cpu_blocks > 0)
        gpu = self._backends.gpu
        try:
            with self._backends.active():
                weights = source.load(dtype, gpu.device, gpu.allocate_weight, shard)
                self._stages = Stages(config, weights, gpu.ops, not gpu.rotates, group)
                self._stages.rope.keep(max_model_len)
                self._store = KVStore(shape, config.num_layers)
                self._allocate_gpu_kv(sizes, dtype)
                if sizes.cpu_blocks:
                    cpu_dtype = as_torch_dtype(sizes.cpu_dtype)
                    self._store.allocate(Placement.CPU, gpu, sizes.cpu_blocks, cpu_dtype)
        except BaseException:
            self._backends.close()
            raise
        max_blocks = -(-max_model_len // engine.block_size)
        self._table = RequestTable(max_blocks, weights.device)
        self._staged: list[StagedPrefill] = []
        self._attention = Attention(self._store, gpu, self._backends.cpu_attention, shape)
        self._tracer = None if trace is None else Tracer(trace, self._backends.clock)
        observed = observe(self._stages, self._attention, self._backends.copies, self._tracer)
        self._copies = observed.copies
        completion = Completion(
            observed.stages(0).logits, self._stages.ops.argmax, self._table, gpu
        )
        launch_ahead = LaunchAhead(progress=self._backends.progress, meanwhile=completion.look)

        def is_traced() -> bool:
            return trace is not None and trace.active

        self._repeated: RepeatedPasses = EachPassAnew()
        if self._backends.repeated is not None:
            self._repeated = self._backends.repeated(max_blocks, shape, is_traced)
        segments: RecordedSegments = NothingRecorded()
        if self._backends.segments is not None:
            segments = self._backends.segments(self._stages, is_traced)
        readiness = OwnReadiness() if membership is None else membership.readiness
        self._parked = ParkedCohorts(observed.parked_attention, readiness, launch_ahead)
        binder = Binder(self._table, self._stages, engine.block_size, gpu, self._make_staged)
        self._parts = PipelineParts(
            num_layers=config.num_layers,
            stages=observed.stages,
            walk_stages=lambda index: segments.walk_stages(observed.stages(index)),
            attention=observed.attention,
            parked=self._parked,
            repeated=self._repeated,
            bind=binder.bind,
            complete=completion.complete,
        )
        self._pipelines: dict[str, Pipeline] = {}

    @property
    def runs_ahead(self) -> bool:
        """Whether `execute` returns while the device still computes."""
        return self._backends.progress is not None

    @property
    def device_name(self) -> str:
        """The GPU side's device, as its maker calls it; "cpu" for the host."""
        device = self._backends.gpu.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    @property
    def notes(self) -> tuple[str, ...]:
        """What users should know of how memory was had, a line each."""
        return tuple(self._backends.gpu.notes)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Launches one iteration. What is launched later comes after it, its copies included. While
        spans are traced it is waited for."""
        with self._backends.active():
            traced = self._tracer is not None and self._tracer.is_on
            if self._tracer is not None and traced:
                self._backends.finish()
                self._tracer.begin()
            result = self._execute(plan)
            if self._tracer is not None and traced:
                self._backends.finish()
                self._tracer.end()
        return result

    def _execute(self, plan: StepPlan) -> StepResult:
        self._table.apply(plan)
        self._parked.drop(plan.dropped)
        moves = []
        if plan.moves:
            assert self._copies is not None, "this engine has no CPU side"
            moves = self._store.start_moves(plan.moves, self._copies)
        result = StepResult()
        if self._parked.request_ids or any(b.rows for b in plan.sub_batches + plan.new_cohorts):
            pipeline = self._pipeline(plan.pipeline)
            result = pipeline.step(plan)
            wrong = misreturned(pipeline, "step", result, StepResult, "parts.complete")
            if wrong:
                raise EngineError(wrong)
        for staged in self._staged:
            staged.finish()
        self._staged.clear()
        for ticket in moves:
            ticket.wait()

        def fetch() -> Tokens:
            tokens = result.fetch()  # waits
            lane = self._backends.cpu_attention
            if lane is None:
                return tokens
            lane.check()  # before anyone sees them
            return replace(tokens, cpu_work=lane.work)

        return StepResult(result.completing, self._parked.request_ids, fetch)

    def touch_kv(self) -> None:
        """Writes a byte of every page of the KV in host memory, as it is."""
        self._store.touch()

    def settle_memory(self) -> None:
        """Waits, gives back what no tensor on the device uses, and begins a new peak."""
        if self._backends.memory is not None:
            self._backends.memory.settle()

    def memory(self) -> DeviceMemory | None:
        """Of the GPU side's device; None where that is the host."""
        return None if self._backends.memory is None else self._backends.memory.now()

    def resize_gpu_kv(self, sizes: KVSizes) -> None:
        """Other KV on the GPU, with nothing in it, before the first request."""
        self._backends.finish()
        self._repeated.forget()
        for placement in (Placement.GPU, Placement.STAGING):
            self._store.release(placement)
        self.settle_memory()
        with self._backends.active():
            self._allocate_gpu_kv(sizes, self._stages.weights.embedding.dtype)

    def _allocate_gpu_kv(self, sizes: KVSizes, dtype: torch.dtype) -> None:
        gpu = self._backends.gpu
        self._store.allocate(Placement.GPU, gpu, sizes.gpu_blocks, dtype)
        if sizes.cpu_blocks:
            self._store.allocate(Placement.STAGING, gpu, sizes.staging_blocks, dtype, STAGING_DEPTH)

    def busy(self) -> BusyTimes:
        """Seconds of computing and bytes between the sides so far. The GPU side is only timed while
        there is a trace, and where that does not slow it down."""
        lane, copies = self._backends.cpu_attention, self._backends.copies
        crossed = [part.link_bytes for part in (lane, copies) if part is not None]
        counted = [count for count in crossed if count is not None]
        work = None if lane is None else lane.work
        return BusyTimes(
            None if self._tracer is None or self.runs_ahead else self._tracer.gpu_s,
            None if work is None else work.busy_s,
            sum(counted) if counted else None,
        )

    def close(self) -> None:
        """Frees KV and weights and stops all threads."""
        with self._backends.active():
            self._parked.close()
        self._pipelines.clear()
        self._backends.close()
        del self._parts, self._parked, self._attention, self._stages, self._copies, self._repeated
        self._store.close()

    def _pipeline(self, name: str) -> Pipeline:
        if name not in self._pipelines:
            self._pipelines[name] = pipeline_class(name)(self._parts)
        return self._pipelines[name]

    def _make_staged(
        self, batch: AttentionBatch, prefix: BlockCopies, touched: BlockCopies
    ) -> StagedPrefill:
        assert self._copies is not None and not self._staged, "one sub-batch a pass is staged"
        staged = StagedPrefill(self._store, self._copies, batch, prefix, touched, self._num_layers)
        self._staged.append(staged)
        return staged
