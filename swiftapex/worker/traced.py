"""Stages and attention that leave a span in the trace for every call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from swiftapex.attention import Attention, Ticket
from swiftapex.core.ops import AttentionBatch
from swiftapex.core.trace import TraceRecorder
from swiftapex.model.stages import Stages

T = TypeVar("T")


def _spanned(trace: TraceRecorder, name: str, call: Callable[..., T], *args: Any, **tags: int) -> T:
    if not trace.active:
        return call(*args)
    start = time.perf_counter()
    result = call(*args)
    trace.span("GPU", name, start, time.perf_counter(), **tags)
    return result


class TracedStages(Stages):
    """The same layer math over the same weights, timed call by call."""

    def __init__(self, stages: Stages, trace: TraceRecorder) -> None:
        self.__dict__.update(stages.__dict__)
        self._trace = trace

    def embed(self, token_ids: Tensor) -> Tensor:
        return _spanned(self._trace, "embed", super().embed, token_ids)

    def pre_attn(self, layer: int, x: Tensor, rotation: Tensor) -> Tensor:
        call = super().pre_attn
        return _spanned(self._trace, "pre_attn", call, layer, x, rotation, layer=layer)

    def post_attn(self, layer: int, o: Tensor, x: Tensor) -> Tensor:
        return _spanned(self._trace, "post_attn", super().post_attn, layer, o, x, layer=layer)

    def logits(self, x: Tensor) -> Tensor:
        return _spanned(self._trace, "logits", super().logits, x)


class TracedAttention(Attention):
    """The same routing, timed call by call."""

    def __init__(self, attention: Attention, trace: TraceRecorder) -> None:
        self.__dict__.update(attention.__dict__)
        self._trace = trace

    def submit(self, layer: int, batch: AttentionBatch, qkv: Tensor) -> Ticket:
        return _spanned(
            self._trace, "attention", super().submit, layer, batch, qkv, layer=layer
        )
