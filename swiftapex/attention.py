"""Attention routing: each row's attention goes to the backend of the side that holds its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from swiftapex.core.ops import AttentionBatch, AttentionShape, Backend
from swiftapex.core.plan import CpuWork
from swiftapex.core.request import Placement
from swiftapex.kv.staging import StagedPrefill
from swiftapex.kv.store import KVStore
from swiftapex.sending import send


class Ticket(Protocol):
    """One attention call in flight. Its result is consumed once."""

    def ready(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""

    def wait(self) -> Tensor:
        """O [rows, q_heads * head_dim]. RuntimeError the second time."""


class CpuAttention(Protocol):
    """Starts decode attention over KV in host memory: appends K and V, attends, sets a word."""

    def submit(
        self, layer: int, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> Ticket: ...

    def check(self) -> None:
        """Raises what went wrong in calls whose result a device, not the host, has taken; of others
        `Ticket.wait` does. Does not wait."""

    @property
    def work(self) -> CpuWork | None:
        """What calls have attended so far; None where nobody counts it."""

    @property
    def link_bytes(self) -> int | None:
        """Bytes that crossed, or are about to, to a device's memory and from it; None where there
        is no device beside the host."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BoundBatch:
    """A sub-batch or cohort as tensors, bound to its requests' state in the worker.

    Its tokens lie in the order of their attention calls: `gpu` (decodes, then chunks), `staged`
    (chunks of prompts bound for the CPU), `cpu` (decodes).
    """

    request_ids: tuple[int, ...]  # one per row, in row order
    token_ids: Tensor  # [tokens] int64
    rotation: Tensor  # [tokens, head_dim] float32
    gpu: AttentionBatch | None
    staged: StagedPrefill | None
    cpu: AttentionBatch | None
    completing: tuple[int, ...]  # requests whose token the pass completes
    token_indices: tuple[int, ...]  # of those tokens in their requests' outputs: 0 is the first
    last_rows: Tensor  # [completing] int64: where in the batch their last positions lie
    token_slots: Tensor  # [completing] int64: where their tokens lie in the request table
    slots: Tensor | None = None  # [tokens] int64, where the GPU side `rotates`; -1: not in its KV

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def select(self, rows: Sequence[int]) -> BoundBatch:
        """Some rows of a batch of CPU decodes only, as a batch of its own."""
        assert self.cpu is not None and self.gpu is None and self.staged is None
        index = torch.tensor(rows, dtype=torch.int64)
        cpu = replace(
            self.cpu,
            num_decodes=len(rows),
            block_table=self.cpu.block_table[index],
            context_lens=self.cpu.context_lens[index],
        )
        device = self.token_ids.device
        index = send(rows, device, torch.int64)
        return replace(
            self,
            request_ids=tuple(self.request_ids[i] for i in rows),
            token_ids=self.token_ids[index],
            rotation=self.rotation[index],
            cpu=cpu,
            slots=None,
            completing=tuple(self.completing[i] for i in rows),
            token_indices=tuple(self.token_indices[i] for i in rows),
            last_rows=torch.arange(len(rows), device=device),
            token_slots=self.token_slots[index],
        )


class Attention:
    """`submit` starts the attention of a batch at one layer and returns its ticket."""

    def __init__(
        self, store: KVStore, gpu: Backend, cpu: CpuAttention | None, shape: AttentionShape
    ) -> None:
        self._store = store
        self._gpu = gpu
        self._cpu = cpu
        self._shape = shape

    def submit(self, layer: int, batch: BoundBatch, qkv: Tensor) -> Ticket:
        """qkv [tokens, q_heads + 2 * kv_heads, head_dim]: K and V are appended, then attended.
        CPU rows are handed over first, and are attended while the others are computed here."""
        kv = None if batch.gpu is None else self._store.layer(Placement.GPU, layer)
        if self._gpu.rotates:
            self._gpu.rotate_append(kv, batch.slots, qkv, batch.rotation, self._shape)
        end = batch.num_tokens
        on_cpu: Ticket | None = None
        if batch.cpu is not None:
            end -= batch.cpu.num_tokens
            on_cpu = self._hand_over(layer, batch.cpu, qkv[end:])
        outputs = []
        begin = 0
        if batch.gpu is not None and kv is not None:
            begin = batch.gpu.num_tokens
            outputs.append(self._gpu.attend(kv, batch.gpu, self._shape, qkv[:begin]))
        if batch.staged is not None:
            outputs.append(batch.staged.attend(layer, self._gpu, self._shape, qkv[begin:end]))
        return on_cpu if on_cpu is not None and not outputs else _Parts(outputs, on_cpu)

    def _hand_over(self, layer: int, decodes: AttentionBatch, qkv: Tensor) -> Ticket:
        assert self._cpu is not None, "this engine has no CPU side"
        host_kv = self._store.layer(Placement.CPU, layer)
        return self._cpu.submit(layer, host_kv, decodes, self._shape, qkv)


class _Parts:
    """Outputs that are there already, and those of the CPU rows behind them."""

    def __init__(self, outputs: list[Tensor], on_cpu: Ticket | None) -> None:
        self._outputs: list[Tensor] | None = outputs
        self._on_cpu = on_cpu

    def ready(self) -> bool:
        return self._on_cpu is None or self._on_cpu.ready()

    def wait(self) -> Tensor:
        if self._outputs is None:
            raise RuntimeError("the attention result has been taken already")
        outputs, self._outputs = self._outputs, None
        if self._on_cpu is not None:
            outputs.append(self._on_cpu.wait())
        return joined(outputs)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Rows behind each other; nothing is copied where there is one tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
