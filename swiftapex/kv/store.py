"""The tensors that hold KV. The block manager decides which blocks; this holds what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swiftapex.core.ops import AttentionShape, Backend
from swiftapex.core.plan import Move
from swiftapex.core.request import Placement

if TYPE_CHECKING:
    from swiftapex.kv.staging import Copies, CopyTicket


_PAGE_BYTES = 4096


class KVStore:
    """One tensor per placement: [layers, blocks, kv_heads, 2, block_size, head_dim], or as its
    backend lays int8 out. That of STAGING has the layers of the staging area."""

    def __init__(self, shape: AttentionShape, num_layers: int) -> None:
        self._shape = shape
        self._num_layers = num_layers
        self._kv: dict[Placement, Tensor] = {}
        self._layers: dict[Placement, tuple[Tensor, ...]] = {}  # its layers: asked for very often

    def allocate(
        self,
        placement: Placement,
        backend: Backend,
        num_blocks: int,
        dtype: torch.dtype,
        num_layers: int | None = None,
    ) -> None:
        """num_layers None: as many as the model has."""
        layers = self._num_layers if num_layers is None else num_layers
        on_host = placement is Placement.CPU
        allocate = backend.allocate_host_kv if on_host else backend.allocate_kv
        self._kv[placement] = allocate(layers, num_blocks, self._shape, dtype)
        self._layers[placement] = self._kv[placement].unbind()

    def release(self, placement: Placement) -> None:
        """Gives back a side's tensor, if there is one."""
        self._kv.pop(placement, None)
        self._layers.pop(placement, None)

    def layer(self, side: Placement, layer: int) -> Tensor:
        """[blocks, ...] of one layer."""
        return self._layers[side][layer]

    def staging(self, slot: int) -> Tensor:
        """[blocks, kv_heads, 2, block_size, head_dim] of one of the staging area's layers."""
        return self._layers[Placement.STAGING][slot]

    def start_moves(self, moves: Sequence[Move], copies: Copies) -> list[CopyTicket]:
        """Starts the copies of all layers, beside whatever computes; the caller waits for them."""
        return [
            copies.submit(
                self.layer(move.source, layer),
                move.source_blocks,
                self.layer(move.target, layer),
                move.target_blocks,
            )
            for layer in range(self._num_layers)
            for move in moves
        ]

    def touch(self) -> None:
        """Writes a byte of every page in host memory, as it is: then it has memory of its own."""
        for kv in self._kv.values():
            if kv.is_cpu and kv.numel():
                kv.view(torch.uint8).view(-1)[::_PAGE_BYTES].bitwise_or_(0)

    def close(self) -> None:
        self._kv.clear()
        self._layers.clear()
