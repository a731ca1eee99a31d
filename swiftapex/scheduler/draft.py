"""A sub-batch being composed, within the limits of an iteration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from swiftapex.core.plan import Row, SubBatch, row_order
from swiftapex.core.request import GPU
from swiftapex.cost_model import Load

_NUM_KINDS = 4  # of rows, as `row_order` numbers them
_GPU_DECODES, _GPU_CHUNKS, _STAGED_CHUNKS, _CPU_DECODES = range(_NUM_KINDS)


@dataclass(frozen=True, slots=True)
class Limits:
    """`staging_blocks`: blocks of one layer that the staging area holds; prompts bound for the CPU
    are prefilled through it. `max_skipped`: iterations that a running CPU request may be left out
    before a policy has to take it in (see `SchedulerState.overdue`)."""

    max_batch_size: int  # rows in one linear batch (a prefill chunk is one row)
    max_tokens_in_batch: int
    staging_blocks: int = 0
    max_skipped: int = 64


class BatchDraft:
    """Rows by kind, in the order in which they were added, and their load so far. `reserve`: rows
    of one token that are kept free."""

    __slots__ = ("_kinds", "_load", "_read", "max_rows", "max_tokens", "num_rows", "num_tokens")

    def __init__(self, limits: Limits, reserve: int = 0) -> None:
        self.max_rows = limits.max_batch_size - reserve
        self.max_tokens = limits.max_tokens_in_batch - reserve
        self.num_rows = 0
        self.num_tokens = 0
        self._kinds: tuple[list[Row], ...] = ([], [], [], [])
        self._read = [0] * _NUM_KINDS  # tokens of KV that the rows of a kind read
        self._load: Load | None = None  # None: to be read anew

    @property
    def room(self) -> int:
        """Tokens that still fit; 0 once all rows are taken."""
        if self.num_rows >= self.max_rows:
            return 0
        return max(0, self.max_tokens - self.num_tokens)

    @property
    def row_room(self) -> int:
        """Decodes that still fit."""
        return max(0, min(self.max_rows - self.num_rows, self.max_tokens - self.num_tokens))

    @property
    def rows(self) -> list[Row]:
        """In the order of `row_order`."""
        return list(chain.from_iterable(self._kinds))

    @property
    def gpu_decodes(self) -> list[Row]:
        return self._kinds[_GPU_DECODES]

    @property
    def cpu_decodes(self) -> list[Row]:
        return self._kinds[_CPU_DECODES]

    @property
    def chunks(self) -> list[Row]:
        """Those of prompts for the GPU first."""
        return self._kinds[_GPU_CHUNKS] + self._kinds[_STAGED_CHUNKS]

    @property
    def staged_chunks(self) -> list[Row]:
        """Chunks of prompts bound for the CPU."""
        return self._kinds[_STAGED_CHUNKS]

    @property
    def load(self) -> Load:
        """`Load.of` its rows."""
        if self._load is None:
            kinds, read, chunks = self._kinds, self._read, self.chunks
            self._load = Load(
                self.num_tokens,
                read[_GPU_DECODES],
                read[_CPU_DECODES],
                tuple([(row.num_tokens, row.start) for row in chunks]) if chunks else (),
                len(kinds[_GPU_DECODES]),
                len(kinds[_CPU_DECODES]),
            )
        return self._load

    def add(self, row: Row) -> None:
        kind = row_order(row)
        self._kinds[kind].append(row)
        self._count(kind, 1, row.num_tokens, row.start + 1)

    def add_decodes(self, rows: list[Row], read: int) -> None:
        """Decodes of one side, which read `read` tokens of KV together."""
        kind = _GPU_DECODES if rows[0].placement is GPU else _CPU_DECODES
        self._kinds[kind].extend(rows)
        self._count(kind, len(rows), len(rows), read)

    def remove(self, row: Row) -> None:
        kind = row_order(row)
        self._kinds[kind].remove(row)
        self._count(kind, -1, -row.num_tokens, -(row.start + 1))

    def sub_batch(self) -> SubBatch:
        return SubBatch(tuple(chain.from_iterable(self._kinds)))

    def _count(self, kind: int, rows: int, tokens: int, read: int) -> None:
        self.num_rows += rows
        self.num_tokens += tokens
        self._read[kind] += read
        self._load = None
