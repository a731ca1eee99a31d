"""The staging area: prompts bound for the CPU are prefilled on the GPU, layer by layer.

It holds two layers of KV blocks on the GPU. Layer i uses slot i % 2:

    copy in    the prefix of later chunks comes back from the CPU, one layer ahead
    attend     the chunk's K and V are appended, the chunk attends over prefix and itself
    copy out   the blocks that the chunk touched go to the CPU, while the next layer is computed

Copies run in order on one lane. Slot i % 2 is written again (copy in, or append, of layer i + 2)
only after the copy out of layer i has retired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from swiftapex.core.ops import AttentionBatch, AttentionShape, Backend
from swiftapex.core.request import Placement
from swiftapex.kv.sizing import STAGING_DEPTH
from swiftapex.kv.store import KVStore


class CopyTicket(Protocol):
    def wait(self) -> object:
        """Blocks until the copy has retired."""


class Copies(Protocol):
    """Copies KV blocks between two layers of KV, in the order of submission."""

    def submit(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> CopyTicket: ...

    @property
    def link_bytes(self) -> int | None:
        """Bytes that crossed, or are about to, to a device's memory and from it; None where there
        is no device beside the host."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """local[i] in the staging area belongs to remote[i] on the CPU."""

    local: list[int] = field(default_factory=list)
    remote: list[int] = field(default_factory=list)


class StagedPrefill:
    """The staged chunks of one sub-batch on their pass. Made anew for every pass; the area is in
    use by one of them at a time.

    batch: chunks only, its block table holds blocks of the area. prefix: blocks to read back.
    touched: blocks to write out after a layer.
    """

    def __init__(
        self,
        store: KVStore,
        copies: Copies,
        batch: AttentionBatch,
        prefix: BlockCopies,
        touched: BlockCopies,
        num_layers: int,
    ) -> None:
        self.batch = batch
        self._store = store
        self._copies = copies
        self._prefix = prefix
        self._touched = touched
        self._num_layers = num_layers
        self._last: list[CopyTicket | None] = [
            None
        ] * STAGING_DEPTH  # newest copy from or to a slot
        self._copy_in(0)

    def attend(self, layer: int, backend: Backend, shape: AttentionShape, qkv: Tensor) -> Tensor:
        """One layer: O [tokens, q_heads * head_dim]. Layers must come in order."""
        slot = layer % STAGING_DEPTH
        if layer + 1 < self._num_layers:
            self._copy_in(layer + 1)
        self._wait(slot)
        kv = self._store.staging(slot)
        output = backend.attend(kv, self.batch, shape, qkv)
        self._last[slot] = self._copies.submit(
            kv, self._touched.local, self._store.layer(Placement.CPU, layer), self._touched.remote
        )
        return output

    def finish(self) -> None:
        """Waits until everything lies on the CPU, so that decodes may read it."""
        for slot in range(STAGING_DEPTH):
            self._wait(slot)

    def _copy_in(self, layer: int) -> None:
        """Starts reading the prefix into the layer's slot. It is behind the slot's last copy out
        on the same lane: to wait for it is to wait for both."""
        if self._prefix.local:
            slot = layer % STAGING_DEPTH
            source = self._store.layer(Placement.CPU, layer)
            self._last[slot] = self._copies.submit(
                source, self._prefix.remote, self._store.staging(slot), self._prefix.local
            )

    def _wait(self, slot: int) -> None:
        ticket, self._last[slot] = self._last[slot], None
        if ticket is not None:
            ticket.wait()
