"""Prefill chunks and admission: which waiting request starts, on which side, how many tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from swiftapex.core.plan import Row
from swiftapex.core.request import CPU, GPU, STAGING, Placement, Request
from swiftapex.cost_model import CostModel, Load, asymmetric_us, overlap_us, visit_us
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.state import SchedulerState

Place = Callable[[BatchDraft, Request], Placement | None]
"""Where a waiting request may start now, beside the batch so far; None: it has to wait."""
CpuFull = Callable[[BatchDraft, Request], bool]
"""Whether the CPU has as much work as it can do, so that the request would only wait there."""


def add_prefill(state: SchedulerState, batch: BatchDraft, place: Place) -> None:
    """Chunks of running requests, oldest first, then of waiting ones, which start in order."""
    for request in state.prefilling():
        state.add_chunk(batch, request)
    while state.queue.num_waiting and batch.room > 0:
        request = state.queue.first_waiting
        placement = place(batch, request)
        if placement is None:
            break
        state.start(request, placement)
        state.add_chunk(batch, request)


def gpu_first(state: SchedulerState, cpu_full: CpuFull, keep_busy: bool = True) -> Place:
    """To the GPU, unless an older CPU request waits for that place; else to the CPU, unless the
    CPU is full. One that holds nothing takes a request even so, unless told not to `keep_busy`:
    then only one that the GPU could never hold."""

    def place(batch: BatchDraft, request: Request) -> Placement | None:
        if _gpu_has_room(state, batch, request) and not _older_waits(state, request):
            return GPU
        idle = state.running_on(CPU) == 0
        idle = idle and (keep_busy or not state.fits_alone(request, GPU))
        if _cpu_has_room(state, request) and (idle or not cpu_full(batch, request)):
            return STAGING
        return None

    return place


def cpu_first(state: SchedulerState) -> Place:
    """To the CPU always; to the GPU only what could never be there."""

    def place(batch: BatchDraft, request: Request) -> Placement | None:
        if state.fits_alone(request, STAGING):
            return STAGING if _cpu_has_room(state, request) else None
        return GPU if _gpu_has_room(state, batch, request) else None

    return place


def _older_waits(state: SchedulerState, request: Request) -> bool:
    """Whether an older CPU request that is not in flight would rather be on the GPU; it may have a
    row in this plan."""
    return any(
        r.request_id < request.request_id and state.fits_alone(r, GPU) for r in state.idle_on_cpu
    )


def _gpu_has_room(state: SchedulerState, batch: BatchDraft, request: Request) -> bool:
    rows = state.running_on(GPU) < batch.max_rows
    return rows and state.can_start(request, GPU)


def _cpu_has_room(state: SchedulerState, request: Request) -> bool:
    """Whether a prompt bound for the CPU can start now, beside what is kept free there for GPU
    requests that may be demoted: as many blocks as they own, at most half of the pool. More would
    leave a CPU pool idle that is no larger than the GPU's."""
    if state.staging_blocks_left == 0 or not state.can_start(request, STAGING):
        return False
    on_gpu = state.blocks.num_owned(GPU)
    kept = min(on_gpu, state.blocks.num_total(CPU) // 2)
    spare = state.running_on(CPU)
    need = state.blocks.blocks_for(request.num_tokens) + spare + kept
    return need <= state.blocks.num_free(CPU)


def full_for_split(state: SchedulerState, cost: CostModel) -> CpuFull:
    """Asymmetric: the CPU is full once attending for all its requests takes the whole cycle."""

    def full(batch: BatchDraft, request: Request) -> bool:
        tokens = state.cpu_tokens + request.num_tokens
        count = state.running_on(CPU) + 1
        load = batch.load
        first = load if load.rows else load.with_rows(1)
        cycle = asymmetric_us(cost, first, Load(rows=count))
        return cost.num_layers * cost.cpu_attention_us(tokens, count) >= cycle

    return full


def full_for_overlap(state: SchedulerState, cost: CostModel, cohorts: int) -> CpuFull:
    """Asynchronous overlap: the CPU is full once one visit of all its requests takes a pass."""

    def full(batch: BatchDraft, request: Request) -> bool:
        tokens = state.cpu_tokens + request.num_tokens
        count = state.running_on(CPU) + 1
        load = batch.load
        load = load if load.rows else load.with_rows(1)
        a_pass = overlap_us(cost, load, count, cohorts)
        return visit_us(cost, tokens, cohorts, count) >= a_pass

    return full


def never_full(batch: BatchDraft, request: Request) -> bool:
    """Only memory limits what the CPU takes in."""
    return False


def overlap_chunk_tokens(
    cost: CostModel, load: Load, in_flight: int, visit: float, cpu_free: float
) -> int:
    """Prefill tokens that a pass of asynchronous overlap should hold, of those in `load`.

    A cohort advances about one layer in a pass, however long that is. So the pass should take
    about as long as the CPU needs for one visit of all cohorts (`visit`, µs). Prompts are what
    gives the CPU work in the first place: while its KV is empty a pass may be twice as long as
    without chunks, and with a share of `cpu_free` left free longer by that share. So prompts come
    in at the rate at which requests end.
    """
    decodes = load.without_chunks()
    alone = overlap_us(cost, decodes, in_flight)
    total = load.rows - decodes.rows
    if alone == 0:
        return total
    longest = max(visit, (1 + cpu_free) * alone)
    chunks = FirstChunks(cost, load)

    def fits(tokens: int) -> bool:
        first, attention_us = chunks.of(tokens)
        return overlap_us(cost, first, in_flight, attention=attention_us) <= longest

    return most_that(fits, total, fine=32)


class FirstChunks:
    """What is left of a load with the first of its prefill tokens only, for a search that asks for
    many numbers of them: whole chunks are summed up once."""

    def __init__(self, cost: CostModel, load: Load) -> None:
        self._cost = cost
        self._load = load
        self._ends = list(accumulate((count for count, _ in load.chunks), initial=0))
        decodes = cost.gpu_attention_us(load.gpu_tokens, load.gpu_requests)
        each = (cost.prefill_attention_us(count, prefix) for count, prefix in load.chunks)
        self._attention_us = list(accumulate(each, initial=decodes))

    def of(self, tokens: int) -> tuple[Load, float]:
        """The load with `tokens` of its prefill tokens, and its T_ga."""
        load, ends = self._load, self._ends
        whole = bisect_right(ends, tokens) - 1
        cut, us = tokens - ends[whole], self._attention_us[whole]
        chunks = load.chunks[:whole]
        if cut:
            prefix = load.chunks[whole][1]
            chunks += ((cut, prefix),)
            us += self._cost.prefill_attention_us(cut, prefix)
        return load.with_chunks(load.rows - ends[-1] + tokens, chunks), us


def most_that(fits: Callable[[int], bool], total: int, fine: int | None = None) -> int:
    """The largest number in [1, total] that fits, by bisection; 1 where none does. With `fine`, one
    that fits and is less by at most 1 / fine."""
    if fits(total):
        return total
    low, high = 1, max(1, total)
    while high - low > (low // fine if fine else 0):
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return min(low, total)


def cut_chunks(state: SchedulerState, batch: BatchDraft, rows: list[Row], keep_tokens: int) -> None:
    """Shortens these chunks of the batch, the last ones first, to `keep_tokens` in all."""
    excess = sum(row.num_tokens for row in rows) - keep_tokens
    for row in reversed(rows):
        if excess <= 0:
            break
        cut = min(excess, row.num_tokens)
        request = state.queue.running_request(row.request_id)
        assert request is not None
        state.shorten_chunk(batch, row, request, row.num_tokens - cut)
        excess -= cut
