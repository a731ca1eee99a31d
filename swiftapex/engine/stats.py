"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass

from swiftapex.core.request import Placement
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
    gpu, cpu = Placement.GPU, Placement.CPU
    return EngineStats(
        gpu_blocks_free=blocks.num_free(gpu),
        gpu_blocks_total=blocks.num_total(gpu),
        cpu_blocks_free=blocks.num_free(cpu),
        cpu_blocks_total=blocks.num_total(cpu),
        waiting=queue.num_waiting,
        running_gpu=state.running_on(gpu),
        running_cpu=state.running_on(cpu),
        parked=state.num_in_flight,
        preemptions=state.num_preemptions,
        moves=state.num_moves,
        cpu_decoded_tokens=cpu_decoded_tokens,
    )
