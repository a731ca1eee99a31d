"""The GPU's share of an iteration: decodes, demotion, promotion, and the GPU-only batch."""

from __future__ import annotations

from dataclasses import replace

from swiftapex.core.request import Placement, Request
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.state import SchedulerState


def main_batch(state: SchedulerState, reserve: int = 0) -> BatchDraft:
    """The batch that parked cohorts may join at any layer. It keeps room for the largest one in
    flight, or for the `reserve` rows of a new one."""
    reserve = max(reserve, state.cohorts.largest)
    limits = state.limits
    return BatchDraft(
        replace(
            limits,
            max_batch_size=limits.max_batch_size - reserve,
            max_tokens_in_batch=limits.max_tokens_in_batch - reserve,
        )
    )


def add_gpu_decodes(state: SchedulerState, batch: BatchDraft, demote: bool) -> None:
    """All GPU decodes, oldest first. Where one finds no free block, the newest GPU request yields:
    to the CPU where `demote` says so and it fits there, else it is preempted (recomputed).

    Blocks that a move leaves are free after this iteration only, so that a decode may wait once.
    The oldest request never yields and fits alone, so that it always advances: every request ends.
    """
    coming = 0  # blocks that moves of this plan leave, not yet promised to a waiting decode
    for request in state.decoding(Placement.GPU):
        if batch.room == 0:
            break
        while state.is_free(request) and not state.has_block(request):
            if coming:
                coming -= 1
                break
            victim = _newest(state, Placement.GPU)
            if demote and _can_demote(state, victim):
                coming += len(state.blocks.owned(victim.request_id)) - 1
                state.move(victim, Placement.CPU)
                break
            state.preempt(victim)
        if state.is_free(request) and state.has_block(request):
            state.add_decode(batch, request)


def _newest(state: SchedulerState, side: Placement) -> Request:
    """The newest request on `side` that may yield. There is one: the asking request itself."""
    return next(
        r for r in reversed(state.queue.running) if r.placement.side is side and state.is_free(r)
    )


def _can_demote(state: SchedulerState, request: Request) -> bool:
    """Whether the CPU has room, with one more block for each request there: a demotion that makes
    another request recompute gains nothing."""
    need = len(state.blocks.owned(request.request_id)) + state.running_on(Placement.CPU) + 1
    fits = need <= state.blocks.num_free(Placement.CPU)
    return fits and state.can_move(request, Placement.CPU)


def promote(state: SchedulerState, batch: BatchDraft) -> None:
    """The oldest CPU requests at a token boundary move to the GPU while it has room for them and
    one more block for each GPU request: the CPU tier is where a request makes progress instead of
    waiting, and a promoted one decodes at least once before it could be demoted again.

    First come, first served: where the oldest does not fit, none younger is let past it.
    """
    on_gpu = state.running_on(Placement.GPU)
    if state.blocks.num_free(Placement.GPU) <= on_gpu:
        return
    for request in state.decoding(Placement.CPU):
        if not state.fits_alone(request, Placement.GPU):
            continue
        on_gpu += 1
        need = len(state.blocks.owned(request.request_id)) + on_gpu
        fits = need <= state.blocks.num_free(Placement.GPU)
        if not fits or on_gpu > batch.limits.max_batch_size:
            break
        state.move(request, Placement.GPU)


def gpu_batch(state: SchedulerState) -> BatchDraft:
    """The batch of a GPU-only iteration: continuous batching with chunked prefill."""
    batch = state.new_batch()
    add_gpu_decodes(state, batch, demote=False)
    for request in state.prefilling():
        state.add_chunk(batch, request, batch.room)
    while batch.room > 0 and state.queue.num_waiting:
        request = state.queue.waiting[0]
        full = state.queue.num_running >= state.limits.max_batch_size
        if full or not state.can_start(request, Placement.GPU):
            break
        state.start(request, Placement.GPU)
        state.add_chunk(batch, request, batch.room)
    return batch
