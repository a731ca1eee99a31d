"""The CPU backend: native kernels over a pool of pinned threads, torch where rows are many."""

from __future__ import annotations

import mmap

import torch
import torch.nn.functional as F
from torch import Tensor

import swiftapex._kernels_cpu as kernels
from swiftapex.backends.cpu_ops import CpuOps
from swiftapex.backends.reference import append, causal_attention, gather, split_heads
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.ops import AttentionBatch, AttentionShape, Ops

_HUGE_PAGE = 2 * 1024 * 1024  # bytes


class CpuBackend:
    """Decode steps run on the native pool alone; torch's own threads work on prefill chunks and on
    sampling only. Both have as many threads as the plan says, and take turns."""

    def __init__(self, threads: ThreadPlan) -> None:
        self._pool = kernels.ThreadPool(threads.count, list(threads.cpus))
        torch.set_num_threads(threads.count)
        self.ops: Ops = CpuOps(self._pool)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
    ) -> Tensor:
        """Zeroed memory that the system hands out, in 2 MiB pages where it has them, when a page
        is first written. It is given back with the last reference to the tensor."""
        size = (num_layers, num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        return zeroed_huge_pages(size, dtype)

    def attend(
        self, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> Tensor:
        out = torch.empty((batch.num_tokens, shape.num_q_heads, shape.head_dim), dtype=qkv.dtype)
        context_lens = batch.context_lens.tolist()
        for row in range(batch.num_decodes):
            attend_decode(kv, batch.block_table[row], context_lens[row], shape, qkv, out, row)
        begin = batch.num_decodes
        for request, n in enumerate(batch.chunk_lens, start=batch.num_decodes):
            rows = slice(begin, begin + n)
            blocks, context = batch.block_table[request], context_lens[request]
            attend_chunk(kv, blocks, context, shape, qkv[rows], out[rows])
            begin += n
        return out.flatten(1)

    def close(self) -> None:
        """Joins the native threads; later kernel calls raise RuntimeError."""
        self._pool.close()


def attend_decode(
    kv: Tensor,
    blocks: Tensor,
    context: int,
    shape: AttentionShape,
    qkv: Tensor,
    out: Tensor,
    row: int,
) -> None:
    q, k, v = split_heads(qkv[row : row + 1], shape)
    append(kv, blocks, context - 1, k, v)
    keys, values = gather(kv, blocks, context)
    out[row : row + 1] = causal_attention(q, keys, values, shape.scale)


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
    memory = mmap.mmap(-1, count * dtype.itemsize + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=-address % _HUGE_PAGE).view(
        size
    )
