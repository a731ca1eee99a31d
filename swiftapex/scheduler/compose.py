"""The GPU's share of an iteration: decodes, demotion, promotion, and the GPU-only batch."""

from __future__ import annotations

from swiftapex.core.request import CPU, GPU, Request
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.state import SchedulerState


def main_batch(state: SchedulerState, reserve: int = 0) -> BatchDraft:
    """The batch that parked cohorts may join at any layer. It keeps room for the largest one in
    flight, or for the `reserve` rows of a new one."""
    return BatchDraft(state.limits, max(reserve, state.cohorts.largest))


def add_gpu_decodes(state: SchedulerState, batch: BatchDraft, demote: bool) -> None:
    """GPU decodes, oldest first, as many as there is room for. Where one finds no free block, the
    newest GPU request yields: to the CPU where `demote` says so and it fits there, else it is
    preempted (recomputed).

    Blocks that a move leaves are free after this iteration only, so that a decode may wait once.
    The oldest request never yields and fits alone, so that it always advances: every request ends.
    """
    coming = 0  # blocks that moves of this plan leave, not yet promised to a waiting decode
    requests = state.gpu_decodes(batch.row_room)
    while (added := state.add_decodes(batch, requests)) < len(requests) and batch.room:
        request = requests[added]
        coming = _make_room(state, request, demote, coming)
        requests = [r for r in requests[added:] if state.is_free(r)]
        if request in requests[:1] and not state.has_block(request):
            requests.pop(0)  # waits for what is coming


def _make_room(state: SchedulerState, request: Request, demote: bool, coming: int) -> int:
    """Makes others yield until this GPU decode has a block, or is promised one of the `coming`;
    returns how many are coming then. It may be the one that yields."""
    while state.is_free(request) and not state.has_block(request):
        if coming:
            return coming - 1
        victim = state.newest_on_gpu()  # there is one: the asking request itself
        if demote and _can_demote(state, victim):
            coming += state.blocks.num_blocks_of(victim.request_id) - 1
            state.move(victim, CPU)
            return coming
        state.preempt(victim)
    return coming


def _can_demote(state: SchedulerState, request: Request) -> bool:
    """Whether the CPU has room, with one more block for each request there: a demotion that makes
    another request recompute gains nothing."""
    need = state.blocks.num_blocks_of(request.request_id) + state.running_on(CPU) + 1
    fits = need <= state.blocks.num_free(CPU)
    return fits and state.can_move(request, CPU)


def promote(state: SchedulerState, batch: BatchDraft) -> None:
    """The oldest CPU requests at a token boundary move to the GPU while it has room for them and
    one more block for each GPU request: the CPU tier is where a request makes progress instead of
    waiting, and a promoted one decodes at least once before it could be demoted again.

    First come, first served: where the oldest does not fit, none younger is let past it.
    """
    if not state.num_idle:
        return
    on_gpu = state.running_on(GPU)
    if state.blocks.num_free(GPU) <= on_gpu:
        return
    for request in state.cpu_decodes_by_age():
        if not state.is_free(request) or not state.fits_alone(request, GPU):
            continue
        on_gpu += 1
        if not _fits_beside(state, request, on_gpu) or on_gpu > batch.max_rows:
            break
        state.move(request, GPU)


def _fits_beside(state: SchedulerState, request: Request, on_gpu: int) -> bool:
    """Whether the GPU has the request's blocks, and one more for each of `on_gpu` requests."""
    need = state.blocks.num_blocks_of(request.request_id) + on_gpu
    return need <= state.blocks.num_free(GPU)


def gpu_batch(state: SchedulerState) -> BatchDraft:
    """The batch of a GPU-only iteration: continuous batching with chunked prefill."""
    batch = state.new_batch()
    add_gpu_decodes(state, batch, demote=False)
    for request in state.prefilling():
        state.add_chunk(batch, request)
    while batch.room > 0 and state.queue.num_waiting:
        request = state.queue.first_waiting
        full = state.queue.num_running >= state.limits.max_batch_size
        if full or not state.can_start(request, GPU):
            break
        state.start(request, GPU)
        state.add_chunk(batch, request)
    return batch
