"""From a sub-batch's rows to the tensors that a pass works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from swiftapex.attention import BoundBatch
from swiftapex.core.ops import AttentionBatch
from swiftapex.core.plan import Row, SubBatch, row_order
from swiftapex.core.request import Placement
from swiftapex.kv.staging import BlockCopies, StagedPrefill
from swiftapex.model.stages import Stages
from swiftapex.worker.request_table import RequestTable

MakeStaged = Callable[[AttentionBatch, BlockCopies, BlockCopies], StagedPrefill]
_KINDS = 4  # of rows, in the order of `row_order`


class Binder:
    """Binds sub-batches to the requests' state: last tokens, block tables, positions."""

    def __init__(
        self, table: RequestTable, stages: Stages, block_size: int, make_staged: MakeStaged
    ) -> None:
        self._table = table
        self._stages = stages
        self._block_size = block_size
        self._make_staged = make_staged

    def bind(self, sub_batch: SubBatch) -> BoundBatch:
        """Rows must lie in the order of `row_order`, as SubBatch says."""
        rows, table = sub_batch.rows, self._table
        lens = np.array([row.num_tokens for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = np.cumsum(lens)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
        prompt_lens = np.array([table[row.request_id].prompt_len for row in rows], dtype=np.int64)
        rope_lengths = None
        if self._stages.rope.needs_lengths:
            # The prompt is rotated as a whole; a generated token as the newest one.
            longest = np.maximum(positions + 1, np.repeat(prompt_lens, lens))
            rope_lengths = torch.from_numpy(longest)
        contexts = starts + lens
        kinds = [row_order(row) for row in rows]
        assert kinds == sorted(kinds), "rows of one attention call must lie side by side"
        bounds = np.searchsorted(kinds, range(_KINDS + 1))
        completing = [i for i, row in enumerate(rows) if row.completes]
        return BoundBatch(
            request_ids=tuple(row.request_id for row in rows),
            token_ids=self._token_ids(rows, starts),
            rotation=self._stages.rotation(torch.from_numpy(positions), rope_lengths),
            gpu=self._attention(rows[: bounds[2]]),
            staged=self._staged(rows[bounds[2] : bounds[3]]),
            cpu=self._attention(rows[bounds[3] :]),
            completing=tuple(rows[i].request_id for i in completing),
            token_indices=tuple(int(contexts[i] - prompt_lens[i]) for i in completing),
            last_rows=torch.from_numpy(ends[completing] - 1),
        )

    def _token_ids(self, rows: Sequence[Row], starts: NDArray[np.int64]) -> torch.Tensor:
        """[tokens] int64: chunks bring their ids, decodes take the last sampled token."""
        if all(row.is_decode for row in rows):
            slots = [self._table[row.request_id].slot for row in rows]
            return self._table.last_tokens[torch.tensor(slots)]
        last = self._table.last_tokens
        ids: list[int] = []
        for row in rows:
            if row.token_ids is None:
                ids.append(int(last[self._table[row.request_id].slot]))
            else:
                ids.extend(row.token_ids)
        return torch.tensor(ids, dtype=torch.int64)

    def _attention(self, rows: Sequence[Row]) -> AttentionBatch | None:
        """Over the requests' own blocks."""
        if not rows:
            return None
        entries = [self._table[row.request_id] for row in rows]
        width = max(1, max(entry.num_blocks for entry in entries))
        slots = np.array([entry.slot for entry in entries])
        return _batch(rows, self._table.block_table[slots, :width])

    def _staged(self, rows: Sequence[Row]) -> StagedPrefill | None:
        """Over blocks of the staging area, handed out anew for each pass."""
        if not rows:
            return None
        size = self._block_size
        counts = [-(-(row.start + row.num_tokens) // size) for row in rows]
        block_table = np.zeros((len(rows), max(counts)), dtype=np.int32)
        prefix, touched, used = BlockCopies(), BlockCopies(), 0
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            assert row.placement is Placement.STAGING
            local = range(used, used + count)
            block_table[i, :count] = local
            used += count
            slot = self._table[row.request_id].slot
            remote = self._table.block_table[slot, :count].tolist()
            read_back, first = -(-row.start // size), row.start // size
            prefix.local.extend(local[:read_back])
            prefix.remote.extend(remote[:read_back])
            touched.local.extend(local[first:])
            touched.remote.extend(remote[first:])
        return self._make_staged(_batch(rows, block_table), prefix, touched)


def _batch(rows: Sequence[Row], block_table: NDArray[np.int32]) -> AttentionBatch:
    contexts = [row.start + row.num_tokens for row in rows]
    return AttentionBatch(
        num_decodes=sum(row.is_decode for row in rows),
        chunk_lens=tuple(row.num_tokens for row in rows if not row.is_decode),
        block_table=torch.from_numpy(np.ascontiguousarray(block_table)),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
    )
