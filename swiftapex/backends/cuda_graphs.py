"""Whole passes of decodes as CUDA graphs: one launch instead of some hundreds.

A graph is recorded per padded numbers of rows, over tensors of its own: for each sub-batch those of
the GPU decodes, then those of the CPU decodes. A pass copies its rows there. The others have no
context and no KV slot, so that they read and write no KV; those of CPU decodes are no part of the
CPU's tasks and hold old numbers that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftapex.attention import BoundBatch
from swiftapex.backends.cuda_hand_off import RecordedHandOffs
from swiftapex.backends.cuda_lane import CudaCpuLane
from swiftapex.backends.graph_rows import HYBRID_SEEN_BEFORE, Recordings, padded_rows
from swiftapex.core.ops import AttentionBatch, AttentionShape
from swiftapex.pipelines.walk import Walk


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sub-batch lies in a recorded pass."""

    batch: BoundBatch  # its tensors are the graph's
    x_in: Tensor  # [rows, hidden]
    x_out: Tensor

    def fill(self, batch: BoundBatch, x: Tensor) -> None:
        """The pass's rows in front of each kind; GPU decodes behind them have no context."""
        n, begin = _num_gpu(batch), _num_gpu(self.batch)
        for mine, given in ((self.x_in, x), (self.batch.rotation, batch.rotation)):
            if n:
                mine[:n].copy_(given[:n])
            if n < len(given):
                mine[begin : begin + len(given) - n].copy_(given[n:])
        static, slots = self.batch.gpu, self.batch.slots
        if batch.gpu is None or batch.slots is None or static is None or slots is None:
            return
        static.block_table[:n, : batch.gpu.block_table.shape[1]].copy_(batch.gpu.block_table)
        static.context_lens[:n].copy_(batch.gpu.context_lens)
        slots[:n].copy_(batch.slots[:n])
        if n < begin:
            static.context_lens[n:].zero_()
            slots[n:begin].fill_(-1)

    def result(self, batch: BoundBatch) -> Tensor:
        """x [tokens, hidden] of the pass's rows."""
        n, begin = _num_gpu(batch), _num_gpu(self.batch)
        if n in (begin, batch.num_tokens):
            return self.x_out[: batch.num_tokens]
        return torch.cat((self.x_out[:n], self.x_out[begin : begin + batch.num_tokens - n]))


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    places: Sequence[_Place]
    hand_offs: RecordedHandOffs | None


class CudaGraphs:
    """`RepeatedPasses` for the compute stream. `lane`: the CPU side's, if there is one.
    `max_width`: blocks of the longest request. `is_traced`: whether spans are being recorded, which
    a graph would hide."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        lane: CudaCpuLane | None,
        max_width: int,
        shape: AttentionShape,
        is_traced: Callable[[], bool],
    ) -> None:
        self._stream = stream
        self._lane = lane
        self._max_width = max_width
        self._shape = shape
        self._is_traced = is_traced
        # All kinds of GPU decodes alone are recorded, of those with CPU rows about as many as a
        # policy needs whose numbers of rows vary by two or three sizes each.
        self._gpu_only: Recordings[_Recorded] = Recordings(seen_before=1, most=2**16)
        self._hybrid: Recordings[_Recorded] = Recordings(HYBRID_SEEN_BEFORE, most=64)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, layers: Callable[..., None], *walks: Walk) -> None:
        batches = [batch for walk in walks if (batch := walk.decodes) is not None]
        if self._is_traced() or len(batches) < len(walks):
            layers(*walks)
            return
        kind = (layers.__qualname__, *map(_padded_size, batches))
        kept = self._gpu_only if all(batch.cpu is None for batch in batches) else self._hybrid
        recorded = kept.find(kind)
        if recorded is None:
            if not kept.may_add(kind):
                layers(*walks)  # which sets up what libraries set up lazily
                return
            recorded = self._record(layers, walks, batches)
            kept.add(kind, recorded)
        for place, batch, walk in zip(recorded.places, batches, walks, strict=True):
            place.fill(batch, walk.x)
        try:
            self._replay(recorded, batches)
        except BaseException:
            kept.drop(kind)
            raise
        for place, batch, walk in zip(recorded.places, batches, walks, strict=True):
            walk.x = place.result(batch)

    def forget(self) -> None:
        self._gpu_only.clear()
        self._hybrid.clear()
        self._pool = torch.cuda.graph_pool_handle()  # one whose graphs are gone cannot be shared

    def _replay(self, recorded: _Recorded, batches: Sequence[BoundBatch]) -> None:
        if recorded.hand_offs is None:
            recorded.graph.replay()
            return
        assert self._lane is not None
        cpu = [batch.cpu for batch in batches]
        self._lane.replay(recorded.hand_offs, cpu, recorded.graph.replay)

    def _record(
        self, layers: Callable[..., None], walks: Sequence[Walk], batches: Sequence[BoundBatch]
    ) -> _Recorded:
        statics = [self._static(batch) for batch in batches]
        x_ins = [
            walk.x.new_zeros(static.num_tokens, walk.x.shape[1])
            for walk, static in zip(walks, statics, strict=True)
        ]
        graph = torch.cuda.CUDAGraph()
        with self._hand_offs([static.cpu for static in statics], x_ins[0].dtype) as hand_offs:
            torch.cuda.synchronize(x_ins[0].device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                others = [
                    walk.like(static, x_in.clone())  # stages may write over their input
                    for walk, static, x_in in zip(walks, statics, x_ins, strict=True)
                ]
                layers(*others)
                x_outs = [other.x for other in others]
        return _Recorded(graph, list(map(_Place, statics, x_ins, x_outs)), hand_offs)

    def _hand_offs(
        self, batches: Sequence[AttentionBatch | None], dtype: torch.dtype
    ) -> AbstractContextManager[RecordedHandOffs | None]:
        if all(batch is None for batch in batches):
            return nullcontext()
        assert self._lane is not None
        return self._lane.recording(batches, self._shape, dtype)

    def _static(self, batch: BoundBatch) -> BoundBatch:
        """The graph's own tensors for batches of this size, padded."""
        num_gpu, num_cpu = _padded_size(batch)
        rows, device = num_gpu + num_cpu, batch.rotation.device
        token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        return BoundBatch(
            request_ids=(),
            token_ids=token_ids,
            rotation=torch.zeros(rows, batch.rotation.shape[1], device=device),
            gpu=_no_context(num_gpu, self._max_width, device) if num_gpu else None,
            staged=None,
            cpu=_no_context(num_cpu, 1, torch.device("cpu")) if num_cpu else None,
            completing=(),
            token_indices=(),
            last_rows=token_ids[:0],
            token_slots=token_ids[:0],
            slots=token_ids.new_full((rows,), -1) if num_gpu else None,
        )


def _no_context(rows: int, width: int, device: torch.device) -> AttentionBatch:
    return AttentionBatch(
        num_decodes=rows,
        chunk_lens=(),
        block_table=torch.zeros(rows, width, dtype=torch.int32, device=device),
        context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
        chunk_contexts=(),
    )


def _num_gpu(batch: BoundBatch) -> int:
    return 0 if batch.gpu is None else batch.gpu.num_tokens


def _padded_size(batch: BoundBatch) -> tuple[int, int]:
    """GPU and CPU decodes of the graph that serves this batch."""
    num_gpu = _num_gpu(batch)
    return padded_rows(num_gpu), padded_rows(batch.num_tokens - num_gpu)
