"""The CPU backend: native kernels over a pool of pinned threads, torch where rows are many."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import swiftapex._kernels_cpu as kernels
from swiftapex.backends import takes_native_blocks
from swiftapex.backends.cpu_ops import (
    DTYPE_NUMBERS,
    KV_DTYPE_NUMBERS,
    CpuOps,
    reject,
    torch_threads,
)
from swiftapex.backends.host import HostBackend
from swiftapex.backends.reference import append, gather, split_heads
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.errors import ConfigError
from swiftapex.core.ops import AttentionBatch, AttentionShape, Ops

_HUGE_PAGE = 2 * 1024 * 1024  # bytes
_WEIGHT_CHUNK = 64 * 1024 * 1024  # bytes taken from the system at once for small weights
_WEIGHT_ALIGNMENT = 64  # bytes
_SPIN_US = 200  # Python often takes longer between two kernels than the pool spins by default


class CpuBackend(HostBackend):
    """Decode steps run on the native pool alone. torch keeps to the calling thread, except for
    linear layers of many rows and for prefill attention, where it has as many threads as the pool:
    after each of its parallel operations its threads spin for some milliseconds, on the CPUs that
    the native kernels of a decode step would need. The process's own setting returns on close."""

    def __init__(self, threads: ThreadPlan) -> None:
        self._pool = kernels.ThreadPool(threads.count, list(threads.cpus), spin_us=_SPIN_US)
        self._torch_threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._ops = CpuOps(self._pool)
        self.ops: Ops = self._ops
        self._planned: PlannedDecodes | None = None
        self._weight_room = torch.empty(0, dtype=torch.uint8)  # what is left of the newest chunk

    def allocate_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
    ) -> Tensor:
        """Zeroed memory that the system hands out, in 2 MiB pages where it has them, when a page
        is first written. It is given back with the last reference to the tensor. int8: see
        `kv_row`."""
        row = kv_row(shape.head_dim, dtype)
        size = (num_layers, num_blocks, shape.num_kv_heads, 2, shape.block_size, row)
        return zeroed_huge_pages(size, dtype)

    def allocate_weight(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """From 2 MiB pages that weights share: reading them all in a pass then costs few address
        translations. Given back with the last weight in them."""
        size = torch.Size(shape).numel() * dtype.itemsize
        padded = -(-size // _WEIGHT_ALIGNMENT) * _WEIGHT_ALIGNMENT
        if padded > self._weight_room.numel():
            self._weight_room = zeroed_huge_pages((max(padded, _WEIGHT_CHUNK),), torch.uint8)
        memory, self._weight_room = self._weight_room[:padded], self._weight_room[padded:]
        return memory[:size].view(dtype).view(shape)

    def attend(
        self, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> Tensor:
        out = torch.empty(batch.num_tokens, shape.num_q_heads, shape.head_dim, dtype=qkv.dtype)
        num_native = batch.num_decodes if takes_native(shape) else 0
        if kv.dtype is torch.int8 and num_native < batch.num_requests:
            reject("attend: int8 KV is for native decodes only", kv=kv, qkv=qkv)
        if num_native > 0:
            self._attend_decodes(kv, batch, shape, qkv, out)
        if num_native == batch.num_tokens:
            return out.view(num_native, -1)
        lens = (1,) * (batch.num_decodes - num_native) + batch.chunk_lens
        begin = num_native
        contexts = (*batch.context_lens[num_native : batch.num_decodes].tolist(),)
        contexts += batch.chunk_contexts
        for request, (n, context) in enumerate(zip(lens, contexts, strict=True), start=num_native):
            rows, blocks = slice(begin, begin + n), batch.block_table[request]
            products = n * context * shape.num_q_heads * shape.head_dim
            with torch_threads(self._pool.num_threads, products):
                attend_chunk(kv, blocks, context, shape, qkv[rows], out[rows])
            begin += n
        return out.view(batch.num_tokens, -1)

    def _attend_decodes(
        self, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor, out: Tensor
    ) -> None:
        """The first rows of qkv and out [tokens, heads, head_dim], as far as they are decodes."""
        planned = self._planned
        if planned is None or planned.batch is not batch or planned.shape is not shape:
            planned = self._planned = plan_decodes(batch, shape, self._pool.num_threads)
        kernels.paged_decode_attention(
            self._pool, planned.plan, *decode_arguments(planned, kv, qkv, out)
        )

    def close(self) -> None:
        """Joins the native threads; later kernel calls raise RuntimeError. May be called again."""
        if self._torch_threads_before:
            torch.set_num_threads(self._torch_threads_before)
            self._torch_threads_before = 0
        self._planned = None
        self._ops.clear()
        self._pool.close()


@dataclass(frozen=True, slots=True)
class PlannedDecodes:
    """What does not change between the layers of a pass."""

    batch: AttentionBatch
    shape: AttentionShape
    plan: kernels.DecodePlan
    qkv_shape: tuple[int, int, int]
    qkv_stride: int  # elements from token to token
    kv_shape: tuple[int, int, int]  # of one block, up to its rows
    table_address: int
    table_stride: int


def plan_decodes(batch: AttentionBatch, shape: AttentionShape, num_threads: int) -> PlannedDecodes:
    """Checks the batch's tables and shares its decodes out to the threads."""
    table, lens = batch.block_table, batch.context_lens
    for t in (table, lens):
        if t.dtype is not torch.int32 or not (t.is_contiguous() and t.is_cpu):
            reject("attend", block_table=table, context_lens=lens)
    if min(table.shape[0], lens.shape[0]) < batch.num_requests:
        reject("attend", block_table=table, context_lens=lens)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    return PlannedDecodes(
        batch=batch,
        shape=shape,
        plan=kernels.DecodePlan(
            lens.data_ptr(),
            batch.num_decodes,
            shape.num_kv_heads,
            shape.block_size,
            num_threads,
        ),
        qkv_shape=(batch.num_tokens, heads, shape.head_dim),
        qkv_stride=heads * shape.head_dim,
        kv_shape=(shape.num_kv_heads, 2, shape.block_size),
        table_address=table.data_ptr(),
        table_stride=table.stride(0),
    )


def decode_arguments(
    planned: PlannedDecodes, kv: Tensor, qkv: Tensor, out: Tensor
) -> tuple[float, ...]:
    """Checks a layer's tensors; what the native call takes after the plan. qkv [tokens, q_heads +
    2 * kv_heads, head_dim] and out [tokens, q_heads * head_dim], dense; kv: one layer."""
    shape = planned.shape
    number, kv_number = DTYPE_NUMBERS.get(qkv.dtype), KV_DTYPE_NUMBERS.get(kv.dtype)
    if (
        number is None
        or kv_number is None
        or qkv.shape != planned.qkv_shape
        or kv.shape[1:4] != planned.kv_shape
        or kv.shape[4] != kv_row(shape.head_dim, kv.dtype)
        or not (qkv.is_contiguous() and kv.is_contiguous())
        or not (kv.is_cpu and qkv.is_cpu)
    ):
        reject("attend", kv=kv, qkv=qkv)
    q = qkv.data_ptr()
    head_bytes = shape.head_dim * qkv.element_size()
    k = q + shape.num_q_heads * head_bytes
    return (
        number,
        kv_number,
        q,
        k,
        k + shape.num_kv_heads * head_bytes,
        out.data_ptr(),
        kv.data_ptr(),
        planned.table_address,
        planned.qkv_stride,
        planned.qkv_stride,
        planned.qkv_stride,
        shape.num_q_heads * shape.head_dim,
        planned.table_stride,
        shape.num_q_heads,
        shape.head_dim,
        shape.scale,
    )


def kv_row(head_dim: int, dtype: torch.dtype) -> int:
    """Size of the last dimension of KV. A plane of int8 [block_size, head_dim] is followed by its
    float32 scales [block_size]: they are counted as four more elements of each row."""
    return head_dim + 4 if dtype is torch.int8 else head_dim


def takes_native(shape: AttentionShape) -> bool:
    """Whether the native kernel takes the shape; if not, a decode is computed as a chunk."""
    return takes_native_blocks(shape.block_size) and shape.head_dim % 8 == 0


def attend_chunk(
    kv: Tensor, blocks: Tensor, context: int, shape: AttentionShape, qkv: Tensor, out: Tensor
) -> None:
    """One request's prefill chunk: qkv [n, q_heads + 2 * kv_heads, head_dim] holds the last n of
    `context` tokens. Appends K and V, writes out [n, q_heads, head_dim]."""
    n = qkv.shape[0]
    q, k, v = split_heads(qkv, shape)
    append(kv, blocks, context - n, k, v)
    if n < context:
        k, v = (t.to(q.dtype) for t in gather(kv, blocks, context))
        mask = torch.ones(n, context, dtype=torch.bool).tril_(context - n)
    else:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        mask = None
    o = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=shape.scale,
        enable_gqa=shape.num_q_heads != shape.num_kv_heads,
    )
    out.copy_(o[0].transpose(0, 1))


def zeroed_huge_pages(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zero tensor that starts on a 2 MiB boundary, backed by 2 MiB pages if there are any."""
    count = torch.Size(size).numel()
    if count == 0:
        return torch.zeros(size, dtype=dtype)
    # Private: most systems have no huge pages for shared memory, which is the default here.
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize + _HUGE_PAGE, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        needed = count * dtype.itemsize / 2**30
        raise ConfigError(
            f"{needed:.1f} GiB of KV cannot be had from the host: {error}; use a smaller "
            "kv_tokens or kv_memory"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=-address % _HUGE_PAGE).view(
        size
    )
