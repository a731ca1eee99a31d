"""Stages, attention and copies that leave a span in the trace for every call.

Lanes of the trace: GPU (stages, and attention of the rows whose KV is there), CPU attention (one
span per task, as its threads timed it), copies. Every span has its layer and its sub-batch; cohorts
in flight have "parked" there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from swiftapex.attention import Attention, BoundBatch, Ticket
from swiftapex.backends.clock import Clock
from swiftapex.core.ops import AttentionBatch
from swiftapex.core.trace import COPIES, CPU_ATTENTION, GPU, TraceRecorder
from swiftapex.kv.staging import Copies, CopyTicket
from swiftapex.model.stages import Stages

T = TypeVar("T")
PARKED = "parked"


class Tracer:
    """Collects what was launched in an iteration, and turns it into spans once it is done.

    `gpu_s`: seconds that the GPU side has computed.
    """

    def __init__(self, trace: TraceRecorder, clock: Clock) -> None:
        self.trace = trace
        self.gpu_s = 0.0
        self._clock = clock
        self._launched: list[tuple[str, Any, Any, dict[str, Any]]] = []
        self._handed_over: list[tuple[str, str, Callable[[], tuple[float, float]], dict[str, Any]]]
        self._handed_over = []

    @property
    def is_on(self) -> bool:
        """Whether calls are timed: always where that costs nothing, else while spans are wanted."""
        return not self._clock.costs or self.trace.active

    def begin(self) -> None:
        """The device is idle and an iteration starts."""
        self._clock.restart()

    def timed(self, name: str, call: Callable[..., T], *args: Any, **tags: object) -> T:
        if not self.is_on:
            return call(*args)
        start = self._clock.mark()
        result = call(*args)
        self._launched.append((name, start, self._clock.mark(), tags))
        return result

    def later(
        self, lane: str, name: str, span: Callable[[], tuple[float, float]], tags: dict[str, Any]
    ) -> None:
        """Work elsewhere that is done at the end of the iteration, and knows its times then."""
        if self.trace.active:
            self._handed_over.append((lane, name, span, tags))

    def end(self) -> None:
        """All that was launched is done."""
        for name, start, end, tags in self._launched:
            start_s, end_s = self._clock.seconds(start), self._clock.seconds(end)
            self.gpu_s += end_s - start_s
            self.trace.span(GPU, name, start_s, end_s, **tags)
        for lane, name, span, tags in self._handed_over:
            self.trace.span(lane, name, *span(), **tags)
        self._launched.clear()
        self._handed_over.clear()


@dataclass(frozen=True, slots=True)
class Observed:
    """What a worker's pipelines see: the parts themselves, or parts that leave spans. `stages` and
    `attention` take the number of the sub-batch that they work for."""

    stages: Callable[[int], Stages]
    attention: Callable[[int], Attention]
    parked_attention: Attention
    copies: Copies | None


def observe(
    stages: Stages, attention: Attention, copies: Copies | None, tracer: Tracer | None
) -> Observed:
    """Without `tracer` nothing is timed."""
    if tracer is None:
        return Observed(lambda _: stages, lambda _: attention, attention, copies)
    return Observed(
        functools.cache(lambda sub_batch: TracedStages(stages, tracer, sub_batch)),
        functools.cache(lambda sub_batch: TracedAttention(attention, tracer, sub_batch)),
        TracedAttention(attention, tracer, PARKED),
        None if copies is None else TracedCopies(copies, tracer),
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

    def submit(self, layer: int, batch: BoundBatch, qkv: Tensor) -> Ticket:
        call = super().submit
        if batch.gpu is None and batch.staged is None:
            return call(layer, batch, qkv)
        tags = {"layer": layer, "sub_batch": self._sub_batch}
        return self._tracer.timed("attention", call, layer, batch, qkv, **tags)

    def _hand_over(self, layer: int, decodes: AttentionBatch, qkv: Tensor) -> Ticket:
        ticket = super()._hand_over(layer, decodes, qkv)
        tags = {"layer": layer, "sub_batch": self._sub_batch, "rows": decodes.num_decodes}
        return _TracedTicket(ticket, self._tracer, CPU_ATTENTION, "attend", tags)


class TracedCopies:
    """The same copies; each leaves its span once it is waited for."""

    def __init__(self, copies: Copies, tracer: Tracer) -> None:
        self._copies = copies
        self._tracer = tracer

    def submit(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> CopyTicket:
        ticket = self._copies.submit(source, source_blocks, target, target_blocks)
        tags = {"blocks": len(source_blocks)}
        return _TracedTicket(ticket, self._tracer, COPIES, "copy", tags)

    @property
    def link_bytes(self) -> int | None:
        return self._copies.link_bytes

    def close(self) -> None:
        self._copies.close()


class _TracedTicket:
    """A ticket of a lane that knows when its work was done (`span`)."""

    def __init__(
        self, ticket: Any, tracer: Tracer, lane: str, name: str, tags: dict[str, Any]
    ) -> None:
        self._ticket = ticket
        self._tracer = tracer
        self._lane = lane
        self._name = name
        self._tags = tags

    def ready(self) -> bool:
        return bool(self._ticket.ready())

    def wait(self) -> Any:
        result = self._ticket.wait()
        if hasattr(self._ticket, "span"):
            self._tracer.later(self._lane, self._name, self._ticket.span, self._tags)
        return result
