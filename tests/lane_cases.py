"""Decode batches for the tests of the CPU side's lanes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from swiftapex.backends.cpu_lane import CpuLane, LaneTicket
from swiftapex.backends.reference import ReferenceBackend
from swiftapex.core.ops import AttentionBatch, AttentionShape

Order = Literal["fifo", "deepest_first"]
ORDERS: tuple[Order, ...] = ("fifo", "deepest_first")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=32, block_size=16)


@dataclass
class Case:
    kv: Tensor
    batch: AttentionBatch
    qkv: Tensor
    shape: AttentionShape = SHAPE

    def submit(self, lane: CpuLane, layer: int = 0, **words: Tensor) -> LaneTicket[Tensor]:
        return lane.submit(layer, self.kv, self.batch, self.shape, self.qkv, **words)

    def expected(self) -> Tensor:
        """O and, in `kv`, the appended K and V; computed on a copy."""
        kv = self.kv.clone()
        return ReferenceBackend().attend(kv, self.batch, self.shape, self.qkv)


def make_case(
    contexts: list[int],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    shape: AttentionShape = SHAPE,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    rows, width = len(contexts), -(-max(contexts) // shape.block_size)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    size = (rows * width + 2, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
    kv = torch.randn(size, generator=g).to(kv_dtype)
    table = torch.randperm(rows * width + 2, generator=g)[: rows * width].int().view(rows, width)
    lens = torch.tensor(contexts, dtype=torch.int32)
    qkv = torch.randn(rows, heads, shape.head_dim, generator=g).to(dtype)
    return Case(kv, AttentionBatch(rows, (), table, lens, ()), qkv, shape)


def long_case(rows: int = 96) -> Case:
    """Some 100 ms of work on little memory: rows share all blocks but their last one."""
    shape = AttentionShape(num_q_heads=16, num_kv_heads=4, head_dim=64, block_size=16)
    case = make_case([4000], shape=shape)
    tail = torch.randn(rows, *case.kv.shape[1:])
    first = case.kv.shape[0]
    table = case.batch.block_table.repeat(rows, 1)
    table[:, -1] = torch.arange(first, first + rows, dtype=torch.int32)
    lens = case.batch.context_lens.repeat(rows)
    return Case(
        torch.cat((case.kv, tail)),
        AttentionBatch(rows, (), table, lens, ()),
        case.qkv.repeat(rows, 1, 1),
        shape,
    )


def word() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0002)
