"""A sub-batch being composed, within the limits of an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

from swiftapex.core.plan import Row, SubBatch, row_order
from swiftapex.core.request import Placement


@dataclass(frozen=True, slots=True)
class Limits:
    """`staging_blocks`: blocks of one layer that the staging area holds; prompts bound for the CPU
    are prefilled through it. `max_skipped`: iterations that a running CPU request may be left out
    before a policy has to take it in (see `SchedulerState.overdue`)."""

    max_batch_size: int  # rows in one linear batch (a prefill chunk is one row)
    max_tokens_in_batch: int
    staging_blocks: int = 0
    max_skipped: int = 64


@dataclass
class BatchDraft:
    limits: Limits
    rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def room(self) -> int:
        """Tokens that still fit; 0 once all rows are taken."""
        if len(self.rows) >= self.limits.max_batch_size:
            return 0
        return max(0, self.limits.max_tokens_in_batch - self.num_tokens)

    @property
    def gpu_decodes(self) -> list[Row]:
        return [r for r in self.rows if r.is_decode and r.placement is Placement.GPU]

    @property
    def cpu_decodes(self) -> list[Row]:
        return [r for r in self.rows if r.is_decode and r.placement is Placement.CPU]

    @property
    def chunks(self) -> list[Row]:
        return [r for r in self.rows if not r.is_decode]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.num_tokens += row.num_tokens

    def remove(self, row: Row) -> None:
        self.rows.remove(row)
        self.num_tokens -= row.num_tokens

    def sub_batch(self) -> SubBatch:
        return SubBatch(tuple(sorted(self.rows, key=row_order)))
