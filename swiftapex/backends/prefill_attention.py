"""Causal attention of a prefill chunk over paged KV, its prefix included, in Triton: one launch per
chunk and layer, which reads K and V where they lie."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftapex.core.ops import AttentionShape

_LOG2_E = 1.0 / math.log(2.0)
_TILES = (16, 64, 128)  # rows; where head_dim or dtype are wide, registers hold 64 at most


@triton.jit(do_not_specialize=["blocks", "num_tokens", "context"])  # type: ignore[untyped-decorator]
def _prefill_attention(  # type: ignore[no-untyped-def]
    qkv,  # [num_tokens, q_heads + 2 * kv_heads, HEAD_DIM]
    kv,  # [blocks, KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM]
    blocks,  # [>= context / BLOCK_SIZE] int32
    out,  # [num_tokens, q_heads * HEAD_DIM]
    num_tokens,
    context,
    q_stride,
    out_stride,
    scale,  # of logits in base 2
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM, up to the next power of two
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A row is a token and one of the query heads that share a KV head: groups fill tiles too. The
    # tiles that see most keys begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, DIM)
    inside = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = token.to(tl.int64)[:, None] * q_stride + head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(qkv + q_at, mask=inside, other=0.0)

    before = context - num_tokens
    position = before + tl.minimum(token, num_tokens - 1)
    last = before + tl.minimum((tile * TILE_ROWS + TILE_ROWS - 1) // GROUP, num_tokens - 1)
    unmasked = (before + tile * TILE_ROWS // GROUP + 1) // TILE_KEYS * TILE_KEYS

    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, DIM], tl.float32)
    for masked in tl.static_range(2):
        begin = unmasked if masked else 0
        end = last + 1 if masked else unmasked
        for first in tl.range(begin, end, TILE_KEYS):
            keys = first + tl.arange(0, TILE_KEYS)
            seen = keys <= last
            block = tl.load(blocks + keys // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            base = (block * KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
            base += keys % BLOCK_SIZE * HEAD_DIM
            at = kv + base[:, None] + dims[None, :]
            exists = seen[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(at, mask=exists, other=0.0)
            v = tl.load(at + BLOCK_SIZE * HEAD_DIM, mask=exists, other=0.0)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if masked:
                logits = tl.where(keys[None, :] <= position[:, None], logits, float("-inf"))
            now = tl.maximum(largest, tl.max(logits, 1))
            weights = tl.math.exp2(logits - now[:, None])
            shrink = tl.math.exp2(largest - now)
            total = total * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            largest = now
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    out_at = token.to(tl.int64)[:, None] * out_stride + head[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + out_at, result, mask=inside)


def prefill_attention(
    kv: Tensor, blocks: Tensor, context: int, shape: AttentionShape, qkv: Tensor, out: Tensor
) -> None:
    """qkv [n, q_heads + 2 * kv_heads, head_dim], n >= 1, holds the queries of the last n of
    `context` tokens of a request, whose K and V lie in `blocks` [width] int32 of kv [blocks,
    kv_heads, 2, block_size, head_dim]. Writes out [n, q_heads * head_dim]. All of one dtype; rows
    of qkv and out may have any stride. float32 is multiplied as such, not as TF32."""
    n, group = len(qkv), shape.num_q_heads // shape.num_kv_heads
    dim = max(16, 1 << (shape.head_dim - 1).bit_length())
    wide = dim > 128 or qkv.dtype is torch.float32
    tile_rows = _tile_rows(n * group, wide)
    grid = (-(-n * group // tile_rows), shape.num_kv_heads)
    _prefill_attention[grid](
        qkv,
        kv,
        blocks,
        out,
        n,
        context,
        qkv.stride(0),
        out.stride(0),
        shape.scale * _LOG2_E,
        KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=shape.block_size,
        HEAD_DIM=shape.head_dim,
        DIM=dim,
        TILE_ROWS=tile_rows,
        TILE_KEYS=32 if wide else 64,
        PRECISION="ieee" if qkv.dtype is torch.float32 else None,
        num_warps=8 if tile_rows == 128 else 4,
        num_stages=2 if wide else 3,
    )


def compile_prefill_attention(kv: Tensor, shape: AttentionShape) -> None:
    """Compiles, or finds in Triton's cache, what chunks of any length need, so that no iteration
    waits for that. kv: one layer, of which block 0 is read."""
    group = shape.num_q_heads // shape.num_kv_heads
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    for rows in _TILES:
        n = -(-rows // group)
        blocks = torch.zeros(-(-n // shape.block_size), dtype=torch.int32, device=kv.device)
        qkv = torch.zeros(n, heads, shape.head_dim, dtype=kv.dtype, device=kv.device)
        out = torch.empty(n, shape.num_q_heads * shape.head_dim, dtype=kv.dtype, device=kv.device)
        prefill_attention(kv, blocks, n, shape, qkv, out)


def _tile_rows(rows: int, wide: bool) -> int:
    most = _TILES[-2] if wide else _TILES[-1]
    return next((tile for tile in _TILES if tile >= rows), most) if rows < most else most
