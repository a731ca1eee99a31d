"""Attention routing: each row's attention goes to the backend of the side that holds its KV."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from swiftapex.core.ops import AttentionBatch, AttentionShape, Backend
from swiftapex.core.request import Placement
from swiftapex.kv.store import KVStore


class Ticket(Protocol):
    """One attention call in flight. Consumed once."""

    def ready(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""

    def wait(self) -> Tensor:
        """O [tokens, q_heads * head_dim]."""


class _Done:
    """A ticket whose work was done when it was submitted."""

    def __init__(self, output: Tensor) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._output


class Attention:
    """`submit` starts the attention of a sub-batch at one layer and returns its ticket."""

    def __init__(self, store: KVStore, gpu: Backend, shape: AttentionShape) -> None:
        self._store = store
        self._gpu = gpu
        self._shape = shape

    def submit(self, layer: int, batch: AttentionBatch, qkv: Tensor) -> Ticket:
        """qkv [tokens, q_heads + 2 * kv_heads, head_dim]: K and V are appended, then attended."""
        kv = self._store.layer(Placement.GPU, layer)
        return _Done(self._gpu.attend(kv, batch, self._shape, qkv))
