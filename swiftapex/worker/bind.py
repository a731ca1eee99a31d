"""From a sub-batch's rows to the tensors that a pass works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftapex.attention import BoundBatch
from swiftapex.core.ops import AttentionBatch, Backend
from swiftapex.core.plan import Row, SubBatch, row_order
from swiftapex.core.request import Placement
from swiftapex.kv.staging import BlockCopies, StagedPrefill
from swiftapex.model.stages import Stages
from swiftapex.worker.request_table import RequestEntry, RequestTable

MakeStaged = Callable[[AttentionBatch, BlockCopies, BlockCopies], StagedPrefill]
_KINDS = 4  # of rows, in the order of `row_order`


class Binder:
    """Binds sub-batches to the requests' state: last tokens, block tables, positions. What a pass
    needs on the device goes there in one transfer."""

    def __init__(
        self,
        table: RequestTable,
        stages: Stages,
        block_size: int,
        backend: Backend,
        make_staged: MakeStaged,
    ) -> None:
        self._table = table
        self._stages = stages
        self._block_size = block_size
        self._backend = backend
        self._make_staged = make_staged

    def bind(self, sub_batch: SubBatch) -> BoundBatch:
        """Rows must lie in the order of `row_order`, as SubBatch says."""
        rows = sub_batch.rows
        entries = [self._table[row.request_id] for row in rows]
        kinds = [row_order(row) for row in rows]
        assert kinds == sorted(kinds), "rows of one attention call must lie side by side"
        bounds = np.searchsorted(kinds, range(_KINDS + 1))
        lens = np.array([row.num_tokens for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = np.cumsum(lens)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
        parcel = _Parcel(self._backend)
        sent_positions = parcel.add(positions)
        sent_lengths = None
        if self._stages.rope.needs_lengths:
            # The prompt is rotated as a whole; a generated token as the newest one.
            prompt_lens = np.array([entry.prompt_len for entry in entries], dtype=np.int64)
            sent_lengths = parcel.add(np.maximum(positions + 1, np.repeat(prompt_lens, lens)))
        tokens = _Tokens(rows, entries, lens, parcel)
        completing = [i for i, row in enumerate(rows) if row.completes]
        last_rows = parcel.add(ends[completing] - 1)
        token_slots = parcel.add(np.array([entries[i].slot for i in completing], dtype=np.int64))
        gpu = self._calls(rows[: bounds[2]], entries[: bounds[2]])
        staged, copies = self._staged_calls(rows[bounds[2] : bounds[3]], entries[bounds[2] :])
        cpu = self._calls(rows[bounds[3] :], entries[bounds[3] :])
        sent_slots = None
        if gpu is not None:
            gpu.add_to(parcel)
            if self._backend.rotates:
                slots = gpu.slots()
                others = np.full(ends[-1] - len(slots), -1, dtype=np.int64)
                sent_slots = parcel.add(np.concatenate((slots, others)))
        if staged is not None:
            staged.add_to(parcel, with_slots=self._backend.rotates)
        parcel.send()
        return BoundBatch(
            request_ids=tuple(row.request_id for row in rows),
            token_ids=tokens.ids(self._table.last_tokens, parcel),
            rotation=self._stages.rotation(
                parcel[sent_positions], None if sent_lengths is None else parcel[sent_lengths]
            ),
            gpu=None if gpu is None else gpu.on_device(parcel),
            staged=None if staged is None else self._make_staged(staged.on_device(parcel), *copies),
            cpu=None if cpu is None else cpu.on_host(),
            completing=tuple(rows[i].request_id for i in completing),
            token_indices=tuple(
                rows[i].start + rows[i].num_tokens - entries[i].prompt_len for i in completing
            ),
            last_rows=parcel[last_rows],
            token_slots=parcel[token_slots],
            slots=None if sent_slots is None else parcel[sent_slots],
        )

    def _calls(self, rows: Sequence[Row], entries: Sequence[RequestEntry]) -> _Calls | None:
        """Over the requests' own blocks."""
        if not rows:
            return None
        width = max(1, max(entry.num_blocks for entry in entries))
        slots = np.array([entry.slot for entry in entries])
        return _Calls(rows, self._table.block_table[slots, :width], self._block_size)

    def _staged_calls(
        self, rows: Sequence[Row], entries: Sequence[RequestEntry]
    ) -> tuple[_Calls | None, tuple[BlockCopies, BlockCopies]]:
        """Over blocks of the staging area, handed out anew for each pass; what to read back before
        a layer, and what to write out after it."""
        prefix, touched, used = BlockCopies(), BlockCopies(), 0
        if not rows:
            return None, (prefix, touched)
        size = self._block_size
        counts = [-(-(row.start + row.num_tokens) // size) for row in rows]
        block_table = np.zeros((len(rows), max(counts)), dtype=np.int32)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            assert row.placement is Placement.STAGING
            local = range(used, used + count)
            block_table[i, :count] = local
            used += count
            remote = self._table.block_table[entries[i].slot, :count].tolist()
            read_back, first = -(-row.start // size), row.start // size
            prefix.local.extend(local[:read_back])
            prefix.remote.extend(remote[:read_back])
            touched.local.extend(local[first:])
            touched.remote.extend(remote[first:])
        return _Calls(rows, block_table, size), (prefix, touched)


class _Parcel:
    """Arrays that go to the device together."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._arrays: list[NDArray[Any]] = []
        self._tensors: list[Tensor] = []

    def add(self, array: NDArray[Any]) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1

    def send(self) -> None:
        self._tensors = self._backend.upload(self._arrays)

    def __getitem__(self, index: int) -> Tensor:
        return self._tensors[index]


class _Tokens:
    """The batch's token ids: chunks bring theirs, decodes take the last sampled token, which only
    the device needs to know."""

    def __init__(
        self,
        rows: Sequence[Row],
        entries: Sequence[RequestEntry],
        lens: NDArray[np.int64],
        parcel: _Parcel,
    ) -> None:
        self._given: int | None = None
        self._slots: int | None = None
        decodes = sum(row.is_decode for row in rows)
        if decodes:
            slots = np.array([entry.slot for entry in entries], dtype=np.int64)
            self._slots = parcel.add(np.repeat(slots, lens))
        if decodes < len(rows):
            given: list[int] = []
            for row in rows:
                given.extend((-1,) if row.token_ids is None else row.token_ids)
            self._given = parcel.add(np.array(given, dtype=np.int64))

    def ids(self, last_tokens: Tensor, parcel: _Parcel) -> Tensor:
        """[tokens] int64."""
        if self._slots is None:
            assert self._given is not None
            return parcel[self._given]
        last = last_tokens[parcel[self._slots]]
        if self._given is None:
            return last
        given = parcel[self._given]
        return torch.where(given < 0, last, given)


@dataclass(slots=True)
class _Calls:
    """An AttentionBatch whose arrays are not tensors yet."""

    rows: Sequence[Row]
    block_table: NDArray[np.int32]
    block_size: int
    _first: int = 0  # where its arrays lie in the parcel
    _with_slots: bool = False

    def add_to(self, parcel: _Parcel, with_slots: bool = False) -> None:
        self._first = parcel.add(np.ascontiguousarray(self.block_table))
        parcel.add(self._contexts())
        self._with_slots = with_slots
        if with_slots:
            parcel.add(self.slots())

    def on_device(self, parcel: _Parcel) -> AttentionBatch:
        first = self._first
        slots = parcel[first + 2] if self._with_slots else None
        return self._batch(parcel[first], parcel[first + 1], slots)

    def on_host(self) -> AttentionBatch:
        table = torch.from_numpy(np.ascontiguousarray(self.block_table))
        return self._batch(table, torch.from_numpy(self._contexts()), None)

    def _batch(self, table: Tensor, contexts: Tensor, slots: Tensor | None) -> AttentionBatch:
        chunks = [row for row in self.rows if not row.is_decode]
        return AttentionBatch(
            num_decodes=len(self.rows) - len(chunks),
            chunk_lens=tuple(row.num_tokens for row in chunks),
            block_table=table,
            context_lens=contexts,
            chunk_contexts=tuple(row.start + row.num_tokens for row in chunks),
            slots=slots,
        )

    def _contexts(self) -> NDArray[np.int32]:
        return np.array([row.start + row.num_tokens for row in self.rows], dtype=np.int32)

    def slots(self) -> NDArray[np.int64]:
        """[tokens]: block * block_size + offset of each token's K and V."""
        size, pieces = self.block_size, []
        for row, blocks in zip(self.rows, self.block_table, strict=True):
            positions = np.arange(row.start, row.start + row.num_tokens)
            pieces.append(blocks[positions // size].astype(np.int64) * size + positions % size)
        return np.concatenate(pieces)
