"""What the engine records of each iteration. One line of `iterations.jsonl` each."""

from __future__ import annotations

from dataclasses import dataclass

from swiftapex.core.plan import Inequality


@dataclass(frozen=True, slots=True)
class IterationRecord:
    index: int
    start_s: float  # engine clock (time.perf_counter): its planning, or the end of the one before
    duration_us: float  # until its tokens were there; all of an engine's add up to its time
    schedule_us: float  # the policy; beside the iteration before where the engine runs ahead
    pipeline: str
    prefill_tokens: int
    gpu_decodes: int  # decodes over KV on the GPU that ended in it
    cpu_decodes: int  # decodes over KV on the CPU that ended in it, wherever they began
    completed_tokens: int
    waiting: int  # requests that own no blocks
    running: int
    parked: int  # requests whose CPU decode was in flight when it ended
    moves: int  # requests whose KV went to the other side in it
    gpu_blocks_free: int
    cpu_blocks_free: int
    preemptions: int  # in this iteration
    predicted_us: float | None = None
    candidates_us: dict[str, float] | None = None  # predicted for each strategy that was weighed
    inequality: Inequality | None = None  # by which the policy chose
    cpu_attention_us: float | None = None  # that the CPU side attended between its end and the last


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU's memory at a moment."""

    total: int  # what the GPU has
    free: int  # what nobody has taken: other processes, contexts and graphs count as well
    limit: int  # what this process's tensors may take
    reserved: int  # what they have taken, with what the allocator keeps for them
    peak: int  # of `reserved`, since it was last settled


@dataclass(frozen=True, slots=True)
class BusyTimes:
    """Since the start, seconds in which each side computed and bytes that went between them; None
    where that is not measured."""

    gpu_s: float | None  # stages and attention on the GPU side
    cpu_s: float | None  # attention tasks on the CPU side
    link_bytes: int | None = None  # hand-offs and copies of KV, to and from a GPU's memory
