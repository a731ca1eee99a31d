"""Stages and attention that leave a span in the trace for every call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from swiftapex.attention import Attention, BoundBatch, Ticket
from swiftapex.core.trace import GPU, TraceRecorder
from swiftapex.model.stages import Stages

T = TypeVar("T")


def traced_stages(stages: Stages, trace: TraceRecorder | None) -> Callable[[int], Stages]:
    """The stages as a sub-batch's pipeline sees them."""
    if trace is None:
        return lambda sub_batch: stages
    return lambda sub_batch: _TracedStages(stages, trace, sub_batch)


def traced_attention(
    attention: Attention, trace: TraceRecorder | None
) -> Callable[[int], Attention]:
    """Attention as a sub-batch's pipeline sees it."""
    if trace is None:
        return lambda sub_batch: attention
    return lambda sub_batch: _TracedAttention(attention, trace, sub_batch)


class _TracedStages(Stages):
    """The same layer math over the same weights, timed call by call."""

    def __init__(self, stages: Stages, trace: TraceRecorder, sub_batch: int) -> None:
        self.__dict__.update(stages.__dict__)
        self._trace = trace
        self._sub_batch = sub_batch

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._timed("embed", super().embed, token_ids)

    def pre_attn(self, layer: int, x: Tensor, rotation: Tensor) -> Tensor:
        return self._timed("pre_attn", super().pre_attn, layer, x, rotation, layer=layer)

    def post_attn(self, layer: int, o: Tensor, x: Tensor) -> Tensor:
        return self._timed("post_attn", super().post_attn, layer, o, x, layer=layer)

    def _timed(self, name: str, call: Callable[..., T], *args: Any, **tags: int) -> T:
        if not self._trace.active:
            return call(*args)
        start = time.perf_counter()
        result = call(*args)
        end = time.perf_counter()
        self._trace.span(GPU, name, start, end, sub_batch=self._sub_batch, **tags)
        return result


class _TracedAttention(Attention):
    """The same routing. What runs on the GPU side is timed here; the CPU's lane times its tasks."""

    def __init__(self, attention: Attention, trace: TraceRecorder, sub_batch: int) -> None:
        self.__dict__.update(attention.__dict__)
        self._trace = trace
        self._sub_batch = sub_batch

    def submit(self, layer: int, batch: BoundBatch, qkv: Tensor) -> Ticket:
        start = time.perf_counter()
        ticket = super().submit(layer, batch, qkv)
        if self._trace.active and (batch.gpu is not None or batch.staged is not None):
            end = time.perf_counter()
            tags = {"layer": layer, "sub_batch": self._sub_batch}
            self._trace.span(GPU, "attention", start, end, **tags)
        return ticket
