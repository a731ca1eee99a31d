"""Random weights for speed studies: right shapes and a sane scale, no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swiftapex.model.config import ModelConfig
from swiftapex.model.shard import WHOLE, Shard
from swiftapex.model.weights import Allocate, LayerWeights, ModelWeights, copy_part

_POOL = 4_194_301  # a prime: no matrix's rows repeat within it
_STRIDE = 1_000_003  # each matrix starts this much further in the pool


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    allocate: Allocate | None = None,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """Random weights, the same for the same seed and dtype. A `shard` is cut out of the same whole
    matrices, each of which exists for a moment.

    Matrices are uniform with standard deviation 1 / sqrt(in), so that activations keep their scale
    through any number of layers and logits differ from each other. Their numbers come from one
    pool, repeated: filling memory is then as fast as copying.
    """
    c = config
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(_POOL).uniform_(-1, 1, generator=generator).to(device)
    begin = 0

    def room(rows: int, columns: int, stays: bool = True) -> Tensor:
        if allocate is None or not stays:
            return torch.empty((rows, columns), dtype=dtype, device=device)
        return allocate((rows, columns), dtype)

    def matrix(rows: int, columns: int, parts: Sequence[slice], dim: int = 0) -> Tensor:
        """The rows (dim 0) or columns (1) `parts` of a matrix, one after the other."""
        nonlocal begin
        bound = (3.0 / columns) ** 0.5
        tile = (pool.roll(-begin) * bound).to(dtype)
        begin = (begin + _STRIDE) % _POOL
        whole = room(rows, columns, stays=shard.is_whole)
        for piece in torch.split(whole.view(-1), _POOL):
            piece.copy_(tile[: len(piece)])
        if shard.is_whole:
            return whole
        sizes = [part.stop - part.start for part in parts]
        out = room(sum(sizes), columns) if dim == 0 else room(rows, sum(sizes))
        for piece, part in zip(torch.split(out, sizes, dim), parts, strict=True):
            copy_part(piece, whole, part, dim)
        return out

    def vector(size: int, value: float = 1.0) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    part, hidden = shard.config(c), c.hidden_size
    q, kv, inner = shard.q_rows(c), shard.kv_rows(c), shard.inner_rows(c)
    k_begin = c.num_q_heads * c.head_dim
    v_begin = k_begin + c.num_kv_heads * c.head_dim

    def layer() -> LayerWeights:
        return LayerWeights(
            attn_norm=vector(hidden),
            qkv=matrix(
                c.num_qkv_heads * c.head_dim,
                hidden,
                (q, _moved(kv, k_begin), _moved(kv, v_begin)),
            ),
            qkv_bias=vector(part.num_qkv_heads * c.head_dim, 0.01) if c.qkv_bias else None,
            q_norm=vector(c.head_dim) if c.qk_norm else None,
            k_norm=vector(c.head_dim) if c.qk_norm else None,
            o=matrix(hidden, c.num_q_heads * c.head_dim, (q,), dim=1),
            o_bias=vector(hidden, 0.01) if c.o_bias and shard.is_first else None,
            ffn_norm=vector(hidden),
            gate_up=matrix(
                2 * c.intermediate_size, hidden, (inner, _moved(inner, c.intermediate_size))
            ),
            gate_up_bias=vector(2 * part.intermediate_size, 0.01) if c.mlp_bias else None,
            down=matrix(hidden, c.intermediate_size, (inner,), dim=1),
            down_bias=vector(hidden, 0.01) if c.mlp_bias and shard.is_first else None,
        )

    embedding = matrix(c.vocab_size, hidden, (slice(0, shard.padded_vocab(c)),))
    layers = tuple(layer() for _ in range(c.num_layers))
    rows = shard.vocab_rows(c)
    if c.tied:
        head = embedding if shard.is_whole else embedding[rows]
    else:
        head = matrix(c.vocab_size, hidden, (rows,))
    return ModelWeights(embedding, layers, vector(hidden), head)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
