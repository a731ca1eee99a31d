"""The data plane of one device: weights, KV, attention and the pipelines over them."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftapex.attention import Attention
from swiftapex.backends import make_backend
from swiftapex.config.schema import EngineConfig
from swiftapex.core.ops import AttentionShape
from swiftapex.core.plan import StepPlan, StepResult, SubBatch
from swiftapex.core.plugins import load_class
from swiftapex.core.request import Placement
from swiftapex.core.trace import TraceRecorder
from swiftapex.kv.store import KVStore, kv_block_bytes
from swiftapex.model.sampling import sample
from swiftapex.model.source import ModelSource, as_torch_dtype
from swiftapex.model.stages import Stages
from swiftapex.pipelines import PIPELINES
from swiftapex.pipelines.base import BoundBatch, Pipeline, PipelineParts
from swiftapex.worker.bind import bind
from swiftapex.worker.request_table import RequestTable
from swiftapex.worker.traced import TracedAttention, TracedStages

_NOT_FINITE = "the model's logits are not finite: numbers overflowed in this dtype"


class Worker:
    """Executes plans. One per device; knows nothing of queues, policies or other workers."""

    def __init__(
        self,
        source: ModelSource,
        engine: EngineConfig,
        max_model_len: int,
        trace: TraceRecorder | None = None,
    ) -> None:
        config, dtype = source.config, as_torch_dtype(source.dtype)
        self.shape = AttentionShape(
            config.num_q_heads, config.num_kv_heads, config.head_dim, engine.block_size
        )
        block_bytes = kv_block_bytes(config.num_layers, self.shape, dtype)
        self.num_blocks = {
            Placement.GPU: engine.gpu.num_blocks(engine.block_size, block_bytes),
        }
        self._backend = make_backend(engine)
        try:
            weights = source.load(dtype)
            stages = Stages(config, weights, self._backend.ops)
            self._store = KVStore()
            self._store.allocate(
                Placement.GPU,
                self._backend,
                config.num_layers,
                self.num_blocks[Placement.GPU],
                self.shape,
                dtype,
            )
        except BaseException:
            self._backend.close()
            raise
        self._table = RequestTable(-(-max_model_len // engine.block_size))
        attention = Attention(self._store, self._backend, self.shape)
        self._stages = stages if trace is None else TracedStages(stages, trace)
        self._parts = PipelineParts(
            self._stages,
            attention if trace is None else TracedAttention(attention, trace),
            self._bind,
            self._complete,
        )
        self._pipelines: dict[str, Pipeline] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one iteration and returns once its tokens are known."""
        self._table.apply(plan)
        if not any(batch.rows for batch in plan.sub_batches):
            return StepResult({})
        if plan.pipeline not in self._pipelines:
            pipeline_class = load_class("pipeline", plan.pipeline, PIPELINES)
            self._pipelines[plan.pipeline] = pipeline_class(self._parts)
        return self._pipelines[plan.pipeline].step(plan)

    def close(self) -> None:
        """Frees KV and weights and stops the backend's threads."""
        self._pipelines.clear()
        del self._parts, self._stages
        self._store.close()
        self._backend.close()

    def _bind(self, sub_batch: SubBatch) -> BoundBatch:
        return bind(sub_batch, self._table, self._stages)

    def _complete(self, batch: BoundBatch, x: Tensor) -> StepResult:
        """x [tokens, hidden] after the last layer: samples one token per completing row."""
        if not batch.completing:
            return StepResult({})
        logits = self._stages.logits(x[batch.last_rows])
        params = [self._table[request_id].sampling for request_id in batch.completing]
        sampled = sample(logits, params, batch.token_indices)
        self._table.store_tokens(batch.completing, sampled.token_ids)
        tokens = dict(zip(batch.completing, sampled.token_ids.tolist(), strict=True))
        bad = [batch.completing[i] for i in sampled.invalid.nonzero().flatten().tolist()]
        for request_id in bad:
            del tokens[request_id]
        return StepResult(tokens, failures=dict.fromkeys(bad, _NOT_FINITE))
