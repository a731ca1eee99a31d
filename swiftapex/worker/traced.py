"""Stages, attention and copies that leave a span in the trace for every call.

Lanes of the trace: GPU (stages, and attention of the rows whose KV is there), CPU attention (one
span per task, as its threads timed it), copies. Every span has its layer and its sub-batch; cohorts
in flight have "parked" there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from swiftapex.attention import Attention, BoundBatch, CpuAttention, Ticket
from swiftapex.core.ops import AttentionBatch, AttentionShape
from swiftapex.core.trace import COPIES, CPU_ATTENTION, GPU, TraceRecorder
from swiftapex.kv.staging import Copies, CopyTicket
from swiftapex.model.stages import Stages

T = TypeVar("T")
PARKED = "parked"


@dataclass(slots=True)
class BusyClock:
    """Seconds that the GPU side has computed."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tracer:
    """Where spans of the GPU side go, and the clock that adds them up."""

    trace: TraceRecorder
    busy: BusyClock

    def timed(self, name: str, call: Callable[..., T], *args: Any, **tags: object) -> T:
        start = time.perf_counter()
        result = call(*args)
        end = time.perf_counter()
        self.busy.seconds += end - start
        self.trace.span(GPU, name, start, end, **tags)
        return result


@dataclass(frozen=True, slots=True)
class Observed:
    """What a worker's pipelines see: the parts themselves, or parts that leave spans. `stages` and
    `attention` take the number of the sub-batch that they work for."""

    stages: Callable[[int], Stages]
    attention: Callable[[int], Attention]
    parked_attention: Attention
    copies: Copies | None


def observe(
    stages: Stages,
    attention: Attention,
    copies: Copies | None,
    trace: TraceRecorder | None,
    busy: BusyClock,
) -> Observed:
    """Without `trace` nothing is timed, and `busy` stands still."""
    if trace is None:
        return Observed(lambda _: stages, lambda _: attention, attention, copies)
    tracer = Tracer(trace, busy)
    return Observed(
        functools.cache(lambda sub_batch: TracedStages(stages, tracer, sub_batch)),
        functools.cache(lambda sub_batch: TracedAttention(attention, tracer, sub_batch)),
        TracedAttention(attention, tracer, PARKED),
        None if copies is None else TracedCopies(copies, trace),
    )


class TracedStages(Stages):
    """The same layer math over the same weights, timed call by call."""

    def __init__(self, stages: Stages, tracer: Tracer, sub_batch: int) -> None:
        self.__dict__.update(stages.__dict__)
        self._tracer = tracer
        self._sub_batch = sub_batch

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._timed("embed", super().embed, token_ids)

    def pre_attn(self, layer: int, x: Tensor, rotation: Tensor) -> Tensor:
        return self._timed("pre_attn", super().pre_attn, layer, x, rotation, layer=layer)

    def post_attn(self, layer: int, o: Tensor, x: Tensor) -> Tensor:
        return self._timed("post_attn", super().post_attn, layer, o, x, layer=layer)

    def logits(self, x: Tensor) -> Tensor:
        return self._timed("logits", super().logits, x)

    def _timed(self, name: str, call: Callable[..., T], *args: Any, **tags: object) -> T:
        return self._tracer.timed(name, call, *args, sub_batch=self._sub_batch, **tags)


class TracedAttention(Attention):
    """The same routing, timed call by call; tasks on the CPU leave their span once taken."""

    def __init__(self, attention: Attention, tracer: Tracer, sub_batch: int | str) -> None:
        self.__dict__.update(attention.__dict__)
        self._tracer = tracer
        self._sub_batch = sub_batch
        if self._cpu is not None:
            self._cpu = _TracedLane(self._cpu, tracer.trace, sub_batch)

    def submit(self, layer: int, batch: BoundBatch, qkv: Tensor) -> Ticket:
        call = super().submit
        if batch.gpu is None and batch.staged is None:
            return call(layer, batch, qkv)
        tags = {"layer": layer, "sub_batch": self._sub_batch}
        return self._tracer.timed("attention", call, layer, batch, qkv, **tags)


class _TracedLane:
    def __init__(self, lane: CpuAttention, trace: TraceRecorder, sub_batch: int | str) -> None:
        self._lane = lane
        self._trace = trace
        self._sub_batch = sub_batch

    def submit(
        self, layer: int, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> Ticket:
        ticket = self._lane.submit(layer, kv, batch, shape, qkv)
        tags = {"layer": layer, "sub_batch": self._sub_batch, "rows": batch.num_decodes}
        return _TracedTicket(ticket, self._trace, CPU_ATTENTION, "attend", tags)

    def close(self) -> None:
        self._lane.close()


class TracedCopies:
    """The same copies; each leaves its span once it is waited for."""

    def __init__(self, copies: Copies, trace: TraceRecorder) -> None:
        self._copies = copies
        self._trace = trace

    def submit(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> CopyTicket:
        ticket = self._copies.submit(source, source_blocks, target, target_blocks)
        tags = {"blocks": len(source_blocks)}
        return _TracedTicket(ticket, self._trace, COPIES, "copy", tags)

    def close(self) -> None:
        self._copies.close()


class _TracedTicket:
    """A ticket of a lane that knows when its work was done (`span`)."""

    def __init__(
        self, ticket: Any, trace: TraceRecorder, lane: str, name: str, tags: dict[str, Any]
    ) -> None:
        self._ticket = ticket
        self._trace = trace
        self._lane = lane
        self._name = name
        self._tags = tags

    def ready(self) -> bool:
        return bool(self._ticket.ready())

    def wait(self) -> Any:
        result = self._ticket.wait()
        if self._trace.active and hasattr(self._ticket, "span"):
            self._trace.span(self._lane, self._name, *self._ticket.span(), **self._tags)
        return result
