"""How many KV blocks each side gets. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from swiftapex.config.schema import EngineConfig
from swiftapex.core.errors import ConfigError
from swiftapex.core.ops import AttentionShape
from swiftapex.core.request import Placement
from swiftapex.kv.host_memory import check_host_memory
from swiftapex.model.config import ModelConfig
from swiftapex.model.shard import Shard

STAGING_DEPTH = 2  # layers that the staging area holds
_STAGING_SHARE = 8  # the staging area takes at most one part in so many of the GPU's blocks


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Blocks per side. `gpu_blocks` is what is left beside the staging area, whose
    `staging_blocks` have as many layers as it is deep."""

    gpu_blocks: int
    cpu_blocks: int
    staging_blocks: int
    cpu_dtype: str

    @property
    def num_blocks(self) -> dict[Placement, int]:
        return {Placement.GPU: self.gpu_blocks, Placement.CPU: self.cpu_blocks}


def attention_shape(config: ModelConfig, engine: EngineConfig) -> AttentionShape:
    """`config`: of this rank's part of the model."""
    return AttentionShape(
        config.num_q_heads, config.num_kv_heads, config.head_dim, engine.block_size
    )


def measures_gpu_kv(engine: EngineConfig) -> bool:
    """Whether the GPU's KV gets what is left of its memory: nobody says how much it should be."""
    gpu = engine.gpu
    return engine.device == "cuda" and gpu.kv_tokens is None and gpu.kv_memory is None


def kv_sizes(
    config: ModelConfig,
    dtype: str,
    engine: EngineConfig,
    max_model_len: int,
    uses_cpu: bool,
    gpu_room: int | None = None,
) -> KVSizes:
    """The sizes that `engine` asks for. Without `uses_cpu` all is on the GPU.

    `gpu_room`: bytes for KV on each GPU, where they are to be measured; before that (None) the GPU
    has one block, in which trial passes write over each other, and no staging area.

    Blocks are those of every rank, each with that rank's heads: `gpu.kv_memory` is a GPU's,
    `cpu.kv_memory` the host's, shared by the ranks. ConfigError where `config` cannot be split, or
    the GPU side has no block.

    The staging area counts inside the GPU's KV: it gets an eighth of the GPU's blocks (one at
    least), and no more than the longest context needs. A prompt longer than the area goes through
    the GPU's own blocks, or is refused where those are fewer still.
    """
    size = engine.block_size
    ranks = engine.tensor_parallel_size
    part = Shard(0, ranks).config(config)
    block_bytes = size * part.kv_bytes_per_token(dtype)
    measures = measures_gpu_kv(engine)
    if measures:
        gpu = 1 if gpu_room is None else gpu_room // block_bytes
    else:
        gpu = engine.gpu.num_blocks(size, block_bytes)
    if gpu == 0:
        tokens = engine.gpu.kv_tokens
        given = gpu_room if measures else engine.gpu.kv_memory
        asked = f"{tokens} tokens" if given is None else f"{given} bytes"
        block = f"{size} tokens ({block_bytes} bytes)"
        raise ConfigError(f"engine.gpu: {asked} of KV are less than a block of {block}")
    if not uses_cpu:
        return KVSizes(gpu, 0, 0, dtype)
    cpu_dtype = dtype if engine.cpu.kv_dtype == "auto" else engine.cpu.kv_dtype
    cpu = engine.cpu.num_blocks(size, size * ranks * part.kv_bytes_per_token(cpu_dtype))
    if cpu == 0:
        return KVSizes(gpu, 0, 0, dtype)
    longest = -(-max_model_len // size)
    if measures and gpu_room is None:
        return KVSizes(gpu, cpu, 0, cpu_dtype)
    share = max(1, gpu // _STAGING_SHARE)
    staging = min(share * config.num_layers // STAGING_DEPTH, longest)
    taken = -(-staging * STAGING_DEPTH // config.num_layers)
    return KVSizes(gpu - taken, cpu, staging, cpu_dtype)


def gpu_tokens_for_staging(staging_blocks: int, num_layers: int, block_size: int) -> int:
    """The least `gpu.kv_tokens` with which the staging area has so many blocks."""
    share = -(-staging_blocks * STAGING_DEPTH // num_layers)
    return (share * _STAGING_SHARE if share > 1 else 1) * block_size


def check_host_room(config: ModelConfig, dtype: str, engine: EngineConfig, sizes: KVSizes) -> None:
    """ConfigError where the host has no room for what these sizes put there: the CPU's KV and, on
    devices that compute on the host, the GPU side's. See `check_host_memory`."""
    ranks = engine.tensor_parallel_size
    part = Shard(0, ranks).config(config)
    total = sizes.cpu_blocks * part.kv_bytes_per_token(sizes.cpu_dtype)
    if engine.device != "cuda":
        total += sizes.gpu_blocks * part.kv_bytes_per_token(dtype)
    check_host_memory(total * engine.block_size * ranks, "engine.cpu and engine.gpu")
