"""The batch of a GPU-only iteration: continuous batching with chunked prefill."""

from __future__ import annotations

from swiftapex.core.request import Placement, RequestState
from swiftapex.scheduler.state import BatchDraft, SchedulerState


def gpu_batch(state: SchedulerState) -> BatchDraft:
    """Decodes first, oldest first; then prefill chunks in the room that is left.

    Where a decode finds no free block, the newest request is preempted. The oldest request is
    never preempted and fits alone (admission refuses what never fits), so that it always advances:
    every request ends.
    """
    batch = state.new_batch()
    for request in state.decoding():
        if batch.room == 0 or request.state is not RequestState.RUNNING:
            break
        while not state.add_decode(batch, request):
            if state.preempt_newest() is request:
                break
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
