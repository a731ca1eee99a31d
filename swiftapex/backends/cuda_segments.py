"""The layer math between two attention calls as CUDA graphs: one launch instead of some ten.

A segment is the post-projection of a layer and the pre-projection of the next one. Attention, and
whatever pipelines do around it, stays outside: cohorts join and leave between two segments. Graphs
are recorded per layer and padded number of rows, over tensors of their own, into which a batch is
copied; the rows behind it hold old numbers that nobody reads.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swiftapex.backends.graph_rows import padded_rows
from swiftapex.model.stages import Stages

_MAX_ROWS = 64  # beyond it a layer takes longer than its launches, and padding costs more

Work = Callable[[], Tensor | None]


def record(pool: Any, work: Work) -> Work:
    """What replays `work` as one graph, with the result of the recording. On the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = work()
    finally:
        graph.capture_end()

    def replay() -> Tensor | None:
        graph.replay()
        return result

    return replay


class CudaSegments:
    """Lends each walk the tensors of the sizes that it needs, and takes them back at its end.
    `is_traced`: whether spans are being recorded, which a graph would hide."""

    def __init__(
        self,
        stages: Stages,
        is_traced: Callable[[], bool],
        recorder: Callable[[Work], Work] | None = None,
    ) -> None:
        assert not stages.rotates, "a segment has no rotation"
        self._recorder = recorder or functools.partial(record, torch.cuda.graph_pool_handle())
        self._stages = stages
        self._is_traced = is_traced
        self._free: dict[int, list[_Segments]] = defaultdict(list)  # by padded rows

    def walk_stages(self, plain: Stages) -> Stages:
        """For one batch on its way through the layers."""
        return plain if self._is_traced() else _SegmentStages(self, plain)

    def take(self, rows: int) -> _Segments:
        free = self._free[rows]
        return free.pop() if free else _Segments(self._stages, rows, self._recorder)

    def give_back(self, rows: int, segments: _Segments) -> None:
        self._free[rows].append(segments)


class _Segments:
    """All segments over one set of tensors."""

    def __init__(self, stages: Stages, rows: int, recorder: Callable[[Work], Work]) -> None:
        config, embedding = stages.config, stages.weights.embedding
        width = config.num_q_heads * config.head_dim
        self.x = embedding.new_zeros(rows, config.hidden_size)
        self.o = embedding.new_zeros(rows, width)
        self._stages = stages
        self._recorder = recorder
        self._recorded: dict[int, Work | None] = {}  # by layer; None: ran once, as it is

    def run(self, layer: int) -> Tensor | None:
        """Takes x through post_attn of `layer`; Q, K, V [rows, heads, head_dim] of the next layer,
        if there is one, until the next call. The first time sets up what libraries set up lazily.
        """
        if layer not in self._recorded:
            self._recorded[layer] = None
            return self._work(layer)
        segment = self._recorded[layer]
        if segment is None:
            segment = self._recorded[layer] = self._recorder(lambda: self._work(layer))
        return segment()

    def _work(self, layer: int) -> Tensor | None:
        stages, x = self._stages, self.x
        moved = stages.post_attn(layer, self.o, x)
        if moved is not x:
            x.copy_(moved)
        if layer + 1 == stages.config.num_layers:
            return None
        return stages.pre_attn(layer + 1, x, x[:0])  # rotated as K and V are appended


class _SegmentStages(Stages):
    """The same layer math for one batch. The projection for the attention of a layer comes with
    the segment before; it counts only if the batch is still the same."""

    def __init__(self, segments: CudaSegments, plain: Stages) -> None:
        self.__dict__.update(plain.__dict__)
        self._plain = plain
        self._segments = segments
        self._held: dict[int, _Segments] = {}
        self._ahead: tuple[int, Tensor, Tensor] | None = None  # layer, x, its Q, K, V

    def pre_attn(self, layer: int, x: Tensor, rotation: Tensor) -> Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == layer and ahead[1] is x:
            return ahead[2]
        return self._plain.pre_attn(layer, x, rotation)

    def post_attn(self, layer: int, o: Tensor, x: Tensor) -> Tensor:
        self._ahead = None
        n = x.shape[0]  # `len` of a tensor takes a detour through Python
        if n > _MAX_ROWS:
            return self._plain.post_attn(layer, o, x)
        rows = padded_rows(n)
        held = self._held.get(rows)
        if held is None:
            held = self._held[rows] = self._segments.take(rows)
        held.o[:n].copy_(o)
        if x.data_ptr() != held.x.data_ptr():  # it comes from elsewhere
            held.x[:n].copy_(x)
        qkv = held.run(layer)
        moved = held.x[:n]
        if qkv is not None:
            self._ahead = (layer + 1, moved, qkv[:n])
        return moved

    def __del__(self) -> None:
        for rows, held in self._held.items():
            self._segments.give_back(rows, held)
