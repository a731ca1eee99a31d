"""How much of a GPU's memory is left for KV: the largest pass tries it out. No torch.

With one block of KV, in which all dummy requests write over each other, the workers run the
largest pass there can be and record the graph of every number of GPU decodes. What weights,
libraries, graphs and other processes hold then, and what that pass needed beside it, is not there
for KV. Graphs of passes with CPU rows are recorded as they come, in what `memory_share` leaves:
their kinds are too many to try out, and their number is bounded.
"""

from __future__ import annotations

import logging

from swiftapex.backends.graph_rows import recorded_rows
from swiftapex.config.schema import EngineConfig
from swiftapex.core.errors import ConfigError
from swiftapex.core.records import DeviceMemory
from swiftapex.core.request import Placement, SamplingParams
from swiftapex.executor.base import Executor
from swiftapex.kv.sizing import KVSizes, kv_sizes
from swiftapex.model.config import ModelConfig
from swiftapex.model.shard import Shard
from swiftapex.profiler.probe import Probe, Work

logger = logging.getLogger(__name__)

_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)  # of all, the one that needs most memory


def fit_gpu_kv(
    executor: Executor,
    config: ModelConfig,
    dtype: str,
    engine: EngineConfig,
    trial: KVSizes,
    max_model_len: int,
) -> tuple[KVSizes, str]:
    """Measures on workers that were made with the sizes `trial`, and gives them the KV for which
    there is room: its sizes, and where they come from in words. ConfigError, with the numbers,
    where not even a block fits."""
    uses_cpu = trial.cpu_blocks > 0
    probe = Probe(executor, trial.num_blocks, engine.block_size, sampling=_SAMPLING)
    probe.run("sequential", [Work(Placement.GPU, 0)])  # libraries set themselves up
    executor.settle_memory()
    try:
        probe.run("sequential", largest_pass(engine, max_model_len, uses_cpu))
    except ConfigError as error:
        raise ConfigError(
            f"engine.max_tokens_in_batch: no pass of {engine.max_tokens_in_batch} tokens fits "
            f"beside the weights: {error}"
        ) from error
    peaks = [memory.peak for memory in executor.memory()]
    executor.settle_memory()
    passes = [peak - memory.reserved for peak, memory in zip(peaks, executor.memory(), strict=True)]
    for rows in recorded_rows(min(engine.max_batch_size, engine.max_tokens_in_batch)):
        # The first one of a size warms it up, the second records it.
        probe.run("sequential", [Work(Placement.GPU, 0)] * rows, times=2)
    executor.settle_memory()
    part = Shard(0, engine.tensor_parallel_size).config(config)
    trial_kv = trial.gpu_blocks * engine.block_size * part.kv_bytes_per_token(dtype)
    share, held = engine.gpu.memory_share, executor.memory()
    rooms = [room_for_kv(m, share, p) + trial_kv for m, p in zip(held, passes, strict=True)]
    room, memory, needs = min(zip(rooms, held, passes, strict=True), key=lambda each: each[0])
    words = (
        f"of {share:g} x {_gib(memory.limit)} of GPU memory, {_gib(memory.reserved - trial_kv)} "
        f"are weights and graphs, {_gib(needs)} the largest pass ({engine.max_tokens_in_batch} "
        f"tokens), and of the GPU's {_gib(memory.total)} are {_gib(memory.free + trial_kv)} free"
    )
    try:
        sizes = kv_sizes(config, dtype, engine, max_model_len, uses_cpu, max(0, room))
    except ConfigError as error:
        raise ConfigError(
            f"{error}: {words}; use a smaller max_tokens_in_batch, more memory, a larger "
            "memory_share, or say what KV gets (kv_tokens)"
        ) from error
    note = f"KV on the GPU has {_gib(room)}: {words}."
    logger.info(note)
    executor.resize_gpu_kv(sizes)
    return sizes, note


def largest_pass(engine: EngineConfig, max_model_len: int, uses_cpu: bool) -> list[Work]:
    """As many rows as a batch may have, all of which complete a token, and as many tokens: decodes,
    and chunks for the tokens that they leave. One row is on the CPU, if there is one: the results
    of both sides are then put together."""
    rows = min(engine.max_batch_size, engine.max_tokens_in_batch)
    more = engine.max_tokens_in_batch - rows
    works = []
    for row in range(rows):
        longer = min(more, max_model_len - 1)
        more -= longer
        on_cpu = uses_cpu and row == rows - 1 and not longer
        side = Placement.CPU if on_cpu else Placement.GPU
        works.append(Work(side, 0, longer + 1 if longer else 0))
    return works


def room_for_kv(memory: DeviceMemory, share: float, passes: int) -> int:
    """Bytes, beside what is held and what `passes` need; below 0 where even those are too many.

    `share` of the device's memory is for everybody on it, `share` of `limit` for the tensors of
    this process: the smaller rest counts."""
    on_device = memory.free - round((1 - share) * memory.total)
    within_limit = round(share * memory.limit) - memory.reserved
    return min(on_device, within_limit) - passes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
