"""What each rank of tensor parallelism holds: parts that make up the whole, and refusals."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swiftapex.backends.reference import ReferenceBackend
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig
from swiftapex.core.errors import ConfigError
from swiftapex.kv.sizing import kv_sizes
from swiftapex.model.config import ModelConfig, named_architecture
from swiftapex.model.shard import Shard
from swiftapex.model.source import ModelSource, open_model
from swiftapex.model.stages import Stages
from swiftapex.model.weights import ModelWeights
from tests.tiny import checkpoint, settings

WIDE = dict(num_attention_heads=12, hidden_size=96, head_dim=8, intermediate_size=48)
MODELS: dict[str, Callable[[], ModelSource]] = {
    "llama": lambda: open_model(settings(checkpoint(num_key_value_heads=4, **WIDE))),
    "tied": lambda: open_model(
        settings(checkpoint(num_key_value_heads=2, tie_word_embeddings=True, **WIDE))
    ),
    "biases": lambda: open_model(
        settings(checkpoint(num_key_value_heads=6, attention_bias=True, mlp_bias=True, **WIDE))
    ),
    "qwen3": lambda: open_model(settings(checkpoint("qwen3", num_key_value_heads=1, **WIDE))),
    "dummy": lambda: open_model(settings(architecture="tiny", weights="dummy")),
}


def sizes_of(config: ModelConfig) -> list[int]:
    found = []
    for size in range(2, config.num_q_heads + 1):
        try:
            Shard(0, size).config(config)
        except ConfigError:
            continue
        found.append(size)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_parts_make_up_the_whole(name: str) -> None:
    source = MODELS[name]()
    config, whole = source.config, source.load()
    sizes = sizes_of(config)
    assert 2 in sizes and sizes[-1] > 3
    for size in sizes:
        parts = [source.load(shard=Shard(rank, size)) for rank in range(size)]
        heads, inner = [], []
        for rank, part in enumerate(parts):
            shard = Shard(rank, size)
            own = shard.config(config)
            q, kv = own.num_q_heads * own.head_dim, own.num_kv_heads * own.head_dim
            layer, all_of = part.layers[1], whole.layers[1]
            queries, keys, values = layer.qkv.split((q, kv, kv))
            _, all_keys, all_values = all_of.qkv.split(
                [n * own.head_dim for n in (config.num_q_heads, *(config.num_kv_heads,) * 2)]
            )
            heads.append((queries, layer.o))
            assert torch.equal(keys, all_keys[shard.kv_rows(config)])
            assert torch.equal(values, all_values[shard.kv_rows(config)])
            gate, up = layer.gate_up.chunk(2)
            inner.append((gate, up, layer.down))
            assert (layer.o_bias is None) == (all_of.o_bias is None or rank > 0)
            assert (layer.down_bias is None) == (all_of.down_bias is None or rank > 0)
        assert torch.equal(
            torch.cat([q for q, _ in heads]), all_of.qkv[: config.num_q_heads * config.head_dim]
        )
        assert torch.equal(torch.cat([o for _, o in heads], dim=1), all_of.o)
        assert torch.equal(torch.cat([g for g, _, _ in inner]), all_of.gate_up.chunk(2)[0])
        assert torch.equal(torch.cat([u for _, u, _ in inner]), all_of.gate_up.chunk(2)[1])
        assert torch.equal(torch.cat([d for _, _, d in inner], dim=1), all_of.down)
        head = torch.cat([part.head for part in parts])
        assert torch.equal(head[: config.vocab_size], whole.head)
        assert not head[config.vocab_size :].any(), "padding is zeros"
        if config.tied:
            assert part.num_bytes < whole.num_bytes


class Threads:
    """`core.ops.Group` of ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Tensor | None] = [None] * size

    def of(self, rank: int) -> ThreadGroup:
        return ThreadGroup(self, rank)


class ThreadGroup:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads = threads
        self._rank = rank

    def _all(self, x: Tensor) -> list[Tensor]:
        self._threads.given[self._rank] = x.clone()
        self._threads.barrier.wait(20)
        given = [t for t in self._threads.given if t is not None]
        self._threads.barrier.wait(20)
        return given

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), dim=1)


def without_attention(
    config: ModelConfig, stages: Stages, ids: Tensor, positions: Tensor
) -> Tensor:
    """Logits of a pass in which each query head gets the values of its own token."""
    x, rotation = stages.embed(ids), stages.rotation(positions)
    group_size = config.num_q_heads // config.num_kv_heads
    for layer in range(config.num_layers):
        qkv = stages.pre_attn(layer, x, rotation)
        keys_and_values = qkv[:, config.num_q_heads :]
        k, v = keys_and_values.chunk(2, dim=1)
        o = qkv[:, : config.num_q_heads] + (k * v).repeat_interleave(group_size, dim=1)
        x = stages.post_attn(layer, o.reshape(len(ids), -1), x)
    return stages.logits(x)


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_math_of_all_ranks_together_is_that_of_one(name: str) -> None:
    source = MODELS[name]()
    ids, positions = torch.arange(3, 20), torch.arange(17)
    ops = ReferenceBackend().ops
    expected = without_attention(
        source.config, Stages(source.config, source.load(), ops), ids, positions
    )
    for size in sizes_of(source.config):
        threads, logits = Threads(size), {}

        def run(rank: int) -> None:
            shard = Shard(rank, size)  # noqa: B023
            config = shard.config(source.config)
            weights: ModelWeights = source.load(shard=shard)
            stages = Stages(config, weights, ops, group=threads.of(rank))  # noqa: B023
            logits[rank] = without_attention(config, stages, ids, positions)  # noqa: B023

        ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(30)
        assert sorted(logits) == list(range(size))
        for got in logits.values():
            assert torch.equal(got, logits[0]), "all ranks have the same bits"
        torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "size", "numbers"),
    [
        ({}, 2, r"2 ranks .* 9 query heads evenly: expected one of 1, 3$"),
        ({"num_q_heads": 12, "num_kv_heads": 6}, 4, r"4 ranks .* 6 key-value heads .* 1, 2, 3, 6"),
        ({"intermediate_size": 1537}, 3, r"3 ranks .* 1537 inner dimensions"),
        ({"num_q_heads": 8, "num_kv_heads": 4}, 16, r"16 ranks .* 8 query heads"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    changes: dict[str, int], size: int, numbers: str
) -> None:
    config = dataclasses.replace(named_architecture("smollm2-135m"), **changes)
    with pytest.raises(ConfigError, match=numbers):
        Shard(0, size).config(config)


def test_kv_sizes_are_those_of_each_rank() -> None:
    """kv_tokens stay tokens; kv_memory is a GPU's on the GPU, and the host's on the CPU."""
    config = named_architecture("llama3-8b")

    def sizes(ranks: int, **kv: object) -> tuple[int, int]:
        engine = EngineConfig(gpu=GpuConfig(**kv), cpu=CpuConfig(**kv), tensor_parallel_size=ranks)
        found = kv_sizes(config, "float16", engine, 8192, uses_cpu=True)
        taken = -(-found.staging_blocks * 2 // config.num_layers)
        return found.gpu_blocks + taken, found.cpu_blocks

    assert sizes(1, kv_tokens=65536) == sizes(8, kv_tokens=65536) == (2048, 2048)
    gpu, cpu = sizes(1, kv_memory=1 << 30)
    assert sizes(4, kv_memory=1 << 30) == (4 * gpu, cpu)
    assert sizes(8, kv_memory=1 << 30) == (8 * gpu, cpu)
    assert sizes(32, kv_memory=1 << 30) == (8 * gpu, cpu // 4), "each KV head is on four ranks"
