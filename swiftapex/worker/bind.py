"""From a sub-batch's rows to the tensors that a pass works on."""

from __future__ import annotations

import numpy as np
import torch

from swiftapex.core.ops import AttentionBatch
from swiftapex.core.plan import SubBatch
from swiftapex.model.stages import Stages
from swiftapex.pipelines.base import BoundBatch
from swiftapex.worker.request_table import RequestTable


def bind(sub_batch: SubBatch, table: RequestTable, stages: Stages) -> BoundBatch:
    """Rows must be decodes first, then prefill chunks, as SubBatch says."""
    rows = sub_batch.rows
    slots = np.array([table[row.request_id].slot for row in rows], dtype=np.int64)
    lens = np.array([row.num_tokens for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    ends = np.cumsum(lens)
    num_decodes = sum(row.is_decode for row in rows)

    chunk_ids = [i for row in rows if row.token_ids is not None for i in row.token_ids]
    token_ids = torch.cat(
        (
            table.last_tokens[torch.from_numpy(slots[:num_decodes])],
            torch.tensor(chunk_ids, dtype=torch.int64),
        )
    )
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
    prompt_lens = np.array([table[row.request_id].prompt_len for row in rows], dtype=np.int64)
    # The prompt is rotated as a whole; a generated token as the newest one (dynamic RoPE).
    rope_lengths = np.maximum(positions + 1, np.repeat(prompt_lens, lens))
    contexts = (starts + lens).astype(np.int32)
    width = max(1, max(table[row.request_id].num_blocks for row in rows))
    attention = AttentionBatch(
        num_decodes=num_decodes,
        chunk_lens=tuple(int(n) for n in lens[num_decodes:]),
        block_table=torch.from_numpy(table.block_table[slots, :width]),
        context_lens=torch.from_numpy(contexts),
    )
    completing = [i for i, row in enumerate(rows) if row.completes]
    return BoundBatch(
        token_ids=token_ids,
        rotation=stages.rotation(torch.from_numpy(positions), torch.from_numpy(rope_lengths)),
        attention=attention,
        completing=tuple(rows[i].request_id for i in completing),
        token_indices=tuple(int(contexts[i] - prompt_lens[i]) for i in completing),
        last_rows=torch.from_numpy(ends[completing] - 1),
    )
