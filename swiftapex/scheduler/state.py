"""What a policy sees and the verbs with which it composes an iteration.

The verbs keep the rules that no policy may break: a row's blocks exist before its pass, limits
hold, requests start and are preempted in order. A policy decides what goes in, and in what order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swiftapex.core.plan import Admission, Row, StepPlan, SubBatch
from swiftapex.core.request import Placement, Request, RequestState
from swiftapex.kv.block_manager import BlockManager
from swiftapex.scheduler.queue import RequestQueue


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_size: int  # rows in one linear batch (a prefill chunk is one row)
    max_tokens_in_batch: int


@dataclass
class BatchDraft:
    """A sub-batch being composed."""

    limits: Limits
    decodes: list[Row] = field(default_factory=list)
    chunks: list[Row] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def room(self) -> int:
        """Tokens that still fit; 0 once all rows are taken."""
        if self.num_rows >= self.limits.max_batch_size:
            return 0
        return self.limits.max_tokens_in_batch - self.num_tokens

    def add(self, row: Row) -> None:
        (self.decodes if row.is_decode else self.chunks).append(row)
        self.num_tokens += row.num_tokens

    def sub_batch(self) -> SubBatch:
        return SubBatch(tuple(self.decodes + self.chunks))


class SchedulerState:
    """Requests, blocks and limits, and the changes since the last plan that workers must learn."""

    def __init__(self, queue: RequestQueue, blocks: BlockManager, limits: Limits) -> None:
        self.queue = queue
        self.blocks = blocks
        self.limits = limits
        self.num_preemptions = 0
        self._admitted: dict[int, Admission] = {}
        self._new_blocks: dict[int, tuple[int, ...]] = {}
        self._released: list[int] = []

    def new_batch(self) -> BatchDraft:
        return BatchDraft(self.limits)

    def decoding(self) -> Iterator[Request]:
        """Running requests whose next step is a decode, oldest first."""
        return (r for r in self.queue.running if r.is_decoding)

    def prefilling(self) -> Iterator[Request]:
        """Running requests with tokens still to prefill, oldest first."""
        return (r for r in self.queue.running if not r.is_decoding)

    def add_decode(self, batch: BatchDraft, request: Request) -> bool:
        """Adds the request's next decode; False where no block is free for it."""
        if not self.blocks.can_append(request.request_id, request.num_tokens):
            return False
        self._note_blocks(request, self.blocks.append(request.request_id, request.num_tokens))
        batch.add(Row(request.request_id, request.placement, request.num_computed, None, True))
        return True

    def can_start(self, request: Request, side: Placement) -> bool:
        """Whether blocks for all tokens that the waiting request has now are free, and one more
        for each running request, so that a start does not at once force a preemption."""
        spare = self.queue.num_running * self.blocks.block_size
        return self.blocks.can_allocate(side, request.num_tokens + spare)

    def start(self, request: Request, side: Placement) -> None:
        """The head of the waiting requests gets blocks for all tokens that it has now."""
        self.queue.start(request)
        request.placement = side
        self._admitted[request.request_id] = Admission(
            request.request_id, len(request.prompt_ids), request.sampling
        )
        self._note_blocks(
            request, self.blocks.allocate(request.request_id, side, request.num_tokens)
        )

    def add_chunk(self, batch: BatchDraft, request: Request, max_tokens: int) -> int:
        """Adds the next prefill chunk of a running request; returns its tokens (0: no room)."""
        assert request.state is RequestState.RUNNING
        start = request.num_computed
        end = min(request.num_tokens, start + min(max_tokens, batch.room))
        if end > start:
            ids = request.token_ids(start, end)
            done = end == request.num_tokens
            batch.add(Row(request.request_id, request.placement, start, ids, done))
        return max(0, end - start)

    def preempt_newest(self) -> Request:
        """Frees the newest running request; it will be computed again from its tokens."""
        request = self.queue.newest_running
        self.queue.preempt(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._release(request)
        return request

    def finish(self, request: Request) -> None:
        """Takes a request out, in whatever state, and frees what it owns."""
        held = request.state is RequestState.RUNNING
        self.queue.remove(request)
        if held:
            self._release(request)

    def step_plan(self, pipeline: str, batches: Sequence[BatchDraft]) -> StepPlan:
        """The plan of these batches, with all that the workers have not been told yet."""
        plan = StepPlan(
            pipeline,
            tuple(batch.sub_batch() for batch in batches),
            tuple(self._admitted.values()),
            dict(self._new_blocks),
            tuple(self._released),
        )
        self._admitted.clear()
        self._new_blocks.clear()
        self._released.clear()
        return plan

    def _note_blocks(self, request: Request, gained: tuple[int, ...]) -> None:
        if gained:
            known = self._new_blocks.get(request.request_id, ())
            self._new_blocks[request.request_id] = known + gained

    def _release(self, request: Request) -> None:
        """A request that no plan has named yet is forgotten; workers hear of the others."""
        self.blocks.free(request.request_id)
        self._new_blocks.pop(request.request_id, None)
        if self._admitted.pop(request.request_id, None) is None:
            self._released.append(request.request_id)
