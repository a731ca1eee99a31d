"""Parts of an iteration that several policies share."""

from __future__ import annotations

from swiftapex.core.request import Placement, Request, RequestState
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.state import SchedulerState


def add_gpu_decodes(state: SchedulerState, batch: BatchDraft, demote: bool) -> None:
    """All GPU decodes, oldest first. Where one finds no free block, the newest GPU request yields:
    to the CPU where `demote` says so and it fits there, else it is preempted (recomputed).

    Blocks that a move leaves are free after this iteration only, so that a decode may wait once.
    The oldest request never yields and fits alone, so that it always advances: every request ends.
    """
    for request in state.decoding(Placement.GPU):
        if batch.room == 0 or not state.is_free(request):
            break
        while not state.has_block(request):
            victim = newest(state, Placement.GPU)
            if demote and victim is not request and state.can_move(victim, Placement.CPU):
                state.move(victim, Placement.CPU)
                break
            state.preempt(victim)
            if victim is request:
                break
        if state.is_free(request) and state.has_block(request):
            state.add_decode(batch, request)


def newest(state: SchedulerState, side: Placement) -> Request:
    """The newest request on `side` that may yield. There is one: the asking request itself."""
    return next(
        r for r in reversed(state.queue.running) if r.placement.side is side and state.is_free(r)
    )


def add_chunks(state: SchedulerState, batch: BatchDraft, max_tokens: int) -> None:
    """Prefill chunks of running requests, oldest first, `max_tokens` in all."""
    for request in state.prefilling():
        max_tokens -= state.add_chunk(batch, request, max_tokens)


def gpu_batch(state: SchedulerState) -> BatchDraft:
    """The batch of a GPU-only iteration: continuous batching with chunked prefill."""
    batch = state.new_batch()
    add_gpu_decodes(state, batch, demote=False)
    add_chunks(state, batch, batch.room)
    while batch.room > 0 and state.queue.num_waiting:
        request = state.queue.waiting[0]
        full = state.queue.num_running >= state.limits.max_batch_size
        if full or not state.can_start(request, Placement.GPU):
            break
        state.start(request, Placement.GPU)
        state.add_chunk(batch, request, batch.room)
    return batch
