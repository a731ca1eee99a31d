"""The CPU's share of an iteration: the order of its decodes, their blocks, halves and cohorts."""

from __future__ import annotations

from swiftapex.core.request import CPU, Request
from swiftapex.scheduler.cohorts import cohorts_wanted
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.index import Lazily
from swiftapex.scheduler.state import SchedulerState


def cpu_decodes(state: SchedulerState) -> Lazily:
    """CPU decodes at a token boundary, least recently served first, older ones before younger.
    Those that are overdue (`SchedulerState.overdue`) come first, therefore."""
    return state.cpu_decodes()


def take_cpu_decode(state: SchedulerState, batch: BatchDraft, request: Request) -> bool:
    """Adds a CPU decode; False where it has to wait for a block.

    Without a free block the newest CPU request that is younger and at a token boundary is
    preempted. Where there is none the request waits, and one that is overdue is preempted itself,
    unless it is the oldest. The oldest is never preempted and goes first once anything comes back,
    so that it always advances.
    """
    if not state.is_free(request) or batch.room == 0:
        return False
    while not state.has_block(request):
        on_cpu = [r for r in state.queue.running if r.placement.side is CPU]
        newest = next(r for r in reversed(on_cpu) if state.is_free(r))
        if newest is request:
            if state.overdue([request]) and on_cpu[0] is not request:
                state.preempt(request)
            return False
        state.preempt(newest)
    state.add_decode(batch, request)
    return True


def take_cpu_decodes(state: SchedulerState, batch: BatchDraft, requests: Lazily, most: int) -> None:
    """`take_cpu_decode` for requests in order, until `most` are in the batch."""
    if state.blocks.num_free(CPU) >= most:  # nobody has to yield
        state.add_decodes(batch, requests.first(most))
        return
    for request in list(requests):
        if batch.num_rows >= most:
            break
        take_cpu_decode(state, batch, request)


def add_cpu_halves(
    state: SchedulerState, first: BatchDraft, second: BatchDraft, requests: Lazily
) -> None:
    """CPU decodes in turn into the sub-batch that holds fewer of them."""
    if state.blocks.num_free(CPU) >= state.num_idle:  # nobody has to yield
        _deal(state, first, second, requests)
        return
    halves = [first, second]
    counts = [len(half.cpu_decodes) for half in halves]
    for request in list(requests):
        fewer = 0 if counts[0] <= counts[1] else 1
        for half in (fewer, 1 - fewer):
            if take_cpu_decode(state, halves[half], request):
                counts[half] += 1
                break


def _deal(state: SchedulerState, first: BatchDraft, second: BatchDraft, requests: Lazily) -> None:
    """As long as both have room they take turns, the first one first; the rest is one's alone."""
    both = min(first.row_room, second.row_room)
    some = requests.first(first.row_room + second.row_room)
    for half, other, begin in ((first, second, 0), (second, first, 1)):
        rest = some[2 * both :] if half.row_room > other.row_room else []
        state.add_decodes(half, some[begin : 2 * both : 2] + rest)


def cohort_rows(state: SchedulerState, setting: int | None) -> int:
    """Rows of the cohort that should start in this iteration; 0: none.

    Cohorts have even sizes, and at most one starts in an iteration, so that they spread over the
    layers. A cohort takes at most half of a batch, beside the GPU rows. Overdue requests start at
    once, in a cohort beyond the wanted number if need be.
    """
    idle = state.num_idle
    if not idle:
        return 0
    on_cpu = state.num_decoding(CPU)
    wanted = cohorts_wanted(on_cpu, setting)
    if len(state.cohorts) >= wanted and not state.overdue(state.idle_on_cpu):
        return 0
    return max(1, min(idle, -(-on_cpu // wanted), _half_batch(state)))


def cohort_reserve(state: SchedulerState, rows: int) -> int:
    """Rows that the main batch keeps free for a new cohort of `rows`. Batches of a single row
    serve the GPU first, until a CPU request is overdue."""
    if rows <= _half_batch(state) or state.overdue(state.idle_on_cpu):
        return rows
    return 0


def _half_batch(state: SchedulerState) -> int:
    return min(state.limits.max_batch_size, state.limits.max_tokens_in_batch) // 2


def new_cohort(state: SchedulerState, main: BatchDraft, rows: int) -> BatchDraft:
    """A cohort of at most `rows` CPU decodes, least recently served first. It goes through the
    first layer together with the main batch, and shares its limits."""
    limits = state.limits
    room = min(limits.max_batch_size - main.num_rows, limits.max_tokens_in_batch - main.num_tokens)
    cohort = state.new_batch()
    take_cpu_decodes(state, cohort, state.cpu_decodes(), max(0, min(rows, room)))
    return cohort
