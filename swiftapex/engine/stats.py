"""What an engine counts and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.core.records import IterationRecord
from swiftapex.core.request import CPU, GPU, Request
from swiftapex.cost_model import Load
from swiftapex.kv.block_manager import BlockManager
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at a moment. Requests: `waiting` own no blocks, `running_gpu` and `running_cpu` own
    blocks on that side, `parked` are those of the CPU's whose decode is in flight. Since the start:
    `preemptions` (recomputed), `moves` between the sides, `cpu_decoded_tokens`."""

    gpu_blocks_free: int
    gpu_blocks_total: int
    cpu_blocks_free: int
    cpu_blocks_total: int
    waiting: int
    running_gpu: int
    running_cpu: int
    parked: int
    preemptions: int
    moves: int
    cpu_decoded_tokens: int


def count(
    queue: RequestQueue, state: SchedulerState, blocks: BlockManager, cpu_decoded_tokens: int
) -> EngineStats:
    return EngineStats(
        gpu_blocks_free=blocks.num_free(GPU),
        gpu_blocks_total=blocks.num_total(GPU),
        cpu_blocks_free=blocks.num_free(CPU),
        cpu_blocks_total=blocks.num_total(CPU),
        waiting=queue.num_waiting,
        running_gpu=state.running_on(GPU),
        running_cpu=state.running_on(CPU),
        parked=state.num_in_flight,
        preemptions=state.num_preemptions,
        moves=state.num_moves,
        cpu_decoded_tokens=cpu_decoded_tokens,
    )


def book_progress(
    live: Mapping[int, Request], plan: StepPlan, completing: Iterable[int]
) -> tuple[list[Request], int]:
    """Books the tokens that a launched iteration computes. Returns the `live` requests that
    complete a token in it, and how many of them decode on the CPU."""
    requests = [live[i] for i in completing if i in live]
    for request in requests:  # decodes compute the token before the one that they complete
        request.num_computed += 1
    for batch in plan.sub_batches:
        for row in batch.rows:
            if row.token_ids is not None:
                live[row.request_id].num_computed += len(row.token_ids) - row.completes
    return requests, len([request for request in requests if request.placement is CPU])


def record_launch(
    state: SchedulerState,
    plan: StepPlan,
    result: StepResult,
    *,
    index: int,
    start_s: float,
    schedule_us: float,
    cpu_decodes: int,
    preemptions: int,
) -> IterationRecord:
    """What is known of an iteration once it is launched and booked; its duration follows with the
    tokens. `start_s` by time.perf_counter."""
    loads = [Load.of(sub_batch.rows) for sub_batch in plan.sub_batches]
    return IterationRecord(
        index=index,
        start_s=start_s,
        duration_us=0.0,
        schedule_us=schedule_us,
        pipeline=plan.pipeline,
        prefill_tokens=sum(tokens for load in loads for tokens, _ in load.chunks),
        gpu_decodes=sum(load.gpu_requests for load in loads),
        cpu_decodes=cpu_decodes,
        completed_tokens=len(result.completing),
        waiting=state.queue.num_waiting,
        running=state.queue.num_running,
        parked=state.num_in_flight,
        moves=len(plan.moves),
        gpu_blocks_free=state.blocks.num_free(GPU),
        cpu_blocks_free=state.blocks.num_free(CPU),
        preemptions=preemptions,
        predicted_us=plan.predicted_us,
        candidates_us=dict(plan.candidates_us) or None,
        inequality=plan.inequality,
    )
