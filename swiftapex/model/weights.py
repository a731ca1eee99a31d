"""The tensors of a model, fused as the layer math wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Memory for a weight of this shape and dtype, where the backend reads it best."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in] as in `Ops.linear`; None: the model has no such part."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [(q_heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, q_heads * head_dim]
    o_bias: Tensor | None
    ffn_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All layers, the embedding and the head. Tied: `head` is `embedding`, or a rank's part of it.
    Where the head is split, its last part ends with rows of zeros (model/shard.py)."""

    embedding: Tensor  # [vocab, hidden]; rows beyond the vocabulary are zeros
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors, a tied head counted once."""
        tensors = {id(t): t for t in (self.embedding, self.norm, self.head)}
        offset = self.head.data_ptr() - self.embedding.data_ptr()
        if 0 <= offset < self.embedding.nbytes:  # a part of the embedding
            tensors = {id(t): t for t in (self.embedding, self.norm)}
        for layer in self.layers:
            parts = (getattr(layer, f.name) for f in fields(layer))
            tensors.update({id(t): t for t in parts if t is not None})
        return sum(t.numel() * t.element_size() for t in tensors.values())


def copy_part(out: Tensor, whole: Tensor, part: slice, dim: int = 0) -> None:
    """Copies rows (dim 0) or columns (1) `part` of a matrix or vector to `out`, which has as many;
    those beyond the end of `whole` become zeros."""
    end = min(part.stop, whole.shape[dim])
    count = max(0, end - part.start)
    if count:
        out.narrow(dim, 0, count).copy_(whole.narrow(dim, part.start, count))
    if count < out.shape[dim]:
        out.narrow(dim, count, out.shape[dim] - count).zero_()
