"""The tensors that hold KV. The block manager decides which blocks; this holds what is in them."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftapex.core.ops import AttentionShape, Backend
from swiftapex.core.request import Placement


def kv_block_bytes(num_layers: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V together."""
    elements = num_layers * shape.num_kv_heads * 2 * shape.block_size * shape.head_dim
    return elements * dtype.itemsize


class KVStore:
    """One tensor per side: [layers, blocks, kv_heads, 2, block_size, head_dim]."""

    def __init__(self) -> None:
        self._kv: dict[Placement, Tensor] = {}

    def allocate(
        self,
        side: Placement,
        backend: Backend,
        num_layers: int,
        num_blocks: int,
        shape: AttentionShape,
        dtype: torch.dtype,
    ) -> None:
        self._kv[side] = backend.allocate_kv(num_layers, num_blocks, shape, dtype)

    def layer(self, side: Placement, layer: int) -> Tensor:
        """[blocks, kv_heads, 2, block_size, head_dim] of one layer."""
        return self._kv[side][layer]

    def close(self) -> None:
        self._kv.clear()
