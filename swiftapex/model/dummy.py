"""Random weights for speed studies: right shapes and a sane scale, no checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftapex.model.config import ModelConfig
from swiftapex.model.weights import Allocate, LayerWeights, ModelWeights

_POOL = 4_194_301  # a prime: no matrix's rows repeat within it
_STRIDE = 1_000_003  # each matrix starts this much further in the pool


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    allocate: Allocate | None = None,
) -> ModelWeights:
    """Random weights, the same for the same seed and dtype.

    Matrices are uniform with standard deviation 1 / sqrt(in), so that activations keep their scale
    through any number of layers and logits differ from each other. Their numbers come from one
    pool, repeated: filling memory is then as fast as copying.
    """
    c = config
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(_POOL).uniform_(-1, 1, generator=generator).to(device)
    begin = 0

    def matrix(rows: int, columns: int) -> Tensor:
        nonlocal begin
        bound = (3.0 / columns) ** 0.5
        tile = (pool.roll(-begin) * bound).to(dtype)
        begin = (begin + _STRIDE) % _POOL
        if allocate is None:
            out = torch.empty(rows * columns, dtype=dtype, device=device)
        else:
            out = allocate((rows * columns,), dtype)
        for piece in torch.split(out, _POOL):
            piece.copy_(tile[: len(piece)])
        return out.view(rows, columns)

    def vector(size: int, value: float = 1.0) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        return LayerWeights(
            attn_norm=vector(c.hidden_size),
            qkv=matrix(c.num_qkv_heads * c.head_dim, c.hidden_size),
            qkv_bias=vector(c.num_qkv_heads * c.head_dim, 0.01) if c.qkv_bias else None,
            q_norm=vector(c.head_dim) if c.qk_norm else None,
            k_norm=vector(c.head_dim) if c.qk_norm else None,
            o=matrix(c.hidden_size, c.num_q_heads * c.head_dim),
            o_bias=vector(c.hidden_size, 0.01) if c.o_bias else None,
            ffn_norm=vector(c.hidden_size),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=vector(2 * c.intermediate_size, 0.01) if c.mlp_bias else None,
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=vector(c.hidden_size, 0.01) if c.mlp_bias else None,
        )

    embedding = matrix(c.vocab_size, c.hidden_size)
    layers = tuple(layer() for _ in range(c.num_layers))
    head = embedding if c.tied else matrix(c.vocab_size, c.hidden_size)
    return ModelWeights(embedding, layers, vector(c.hidden_size), head)
