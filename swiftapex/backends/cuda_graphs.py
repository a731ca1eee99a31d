"""Whole passes of GPU decodes as CUDA graphs: one launch instead of some hundreds.

A graph is recorded per padded number of rows, over tensors of its own. A pass copies its rows
there; the others have no context and no KV slot, so that they read and write no KV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftapex.attention import BoundBatch
from swiftapex.backends.graph_rows import padded_rows
from swiftapex.core.ops import AttentionBatch
from swiftapex.pipelines.walk import Walk


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    x_in: Tensor  # [rows, hidden]
    x_out: Tensor
    rotation: Tensor
    slots: Tensor
    attention: AttentionBatch


class CudaGraphs:
    """`RepeatedPasses` for the compute stream. `max_width`: blocks of the longest request.
    `is_traced`: whether spans are being recorded, which a graph would hide."""

    def __init__(
        self, stream: torch.cuda.Stream, max_width: int, is_traced: Callable[[], bool]
    ) -> None:
        self._stream = stream
        self._max_width = max_width
        self._is_traced = is_traced
        self._recorded: dict[tuple[str, int], _Recorded] = {}
        self._warm: set[tuple[str, int]] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, walk: Walk, layers: Callable[[Walk], None]) -> None:
        batch = walk.decodes
        if batch is None or self._is_traced():
            layers(walk)
            return
        rows = batch.num_tokens
        key = (layers.__qualname__, padded_rows(rows))
        if key not in self._warm:  # the first pass of a size sets up what libraries set up lazily
            self._warm.add(key)
            layers(walk)
            return
        if key not in self._recorded:
            self._recorded[key] = self._record(walk, batch, padded_rows(rows), layers)
        recorded = self._recorded[key]
        _fill(recorded, batch, walk.x)
        recorded.graph.replay()
        walk.x = recorded.x_out[:rows]

    def forget(self) -> None:
        self._recorded.clear()
        self._pool = torch.cuda.graph_pool_handle()  # one whose graphs are gone cannot be shared

    def _record(
        self, walk: Walk, batch: BoundBatch, rows: int, layers: Callable[[Walk], None]
    ) -> _Recorded:
        device, hidden = walk.x.device, walk.x.shape[1]
        attention = AttentionBatch(
            num_decodes=rows,
            chunk_lens=(),
            block_table=torch.zeros(rows, self._max_width, dtype=torch.int32, device=device),
            context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            chunk_contexts=(),
        )
        slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        rotation = torch.zeros(rows, batch.rotation.shape[1], device=device)
        x_in = torch.zeros(rows, hidden, dtype=walk.x.dtype, device=device)
        token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        static = BoundBatch(
            request_ids=(),
            token_ids=token_ids,
            rotation=rotation,
            gpu=attention,
            staged=None,
            cpu=None,
            completing=(),
            token_indices=(),
            last_rows=token_ids[:0],
            slots=slots,
        )
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            other = walk.like(static, x_in.clone())  # stages may write over their input
            layers(other)
            x_out = other.x
        return _Recorded(graph, x_in, x_out, rotation, slots, attention)


def _fill(recorded: _Recorded, batch: BoundBatch, x: Tensor) -> None:
    """The pass's rows in front; the rows behind them without context and slot."""
    assert batch.gpu is not None and batch.slots is not None
    rows, width = batch.num_tokens, batch.gpu.block_table.shape[1]
    static = recorded.attention
    recorded.x_in[:rows].copy_(x)
    recorded.rotation[:rows].copy_(batch.rotation)
    static.block_table[:rows, :width].copy_(batch.gpu.block_table)
    static.context_lens[:rows].copy_(batch.gpu.context_lens)
    recorded.slots[:rows].copy_(batch.slots)
    if rows < len(recorded.slots):
        static.context_lens[rows:].zero_()
        recorded.slots[rows:].fill_(-1)
