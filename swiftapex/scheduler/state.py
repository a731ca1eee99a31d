"""The verbs with which a policy composes an iteration, and what happens between two of them.

The verbs keep the rules that no policy may break: a row's blocks exist before its pass, limits
hold, requests start in order, what is in flight or moving is left alone. A policy decides what goes
in, and in what order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swiftapex.core.plan import Inequality, Move, Row, StepPlan, decode_rows
from swiftapex.core.request import CPU, GPU, STAGING, Placement, Request, RequestState
from swiftapex.kv.block_manager import BlockManager
from swiftapex.scheduler.draft import BatchDraft, Limits
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.view import SchedulerView


class SchedulerState(SchedulerView):
    """Requests, blocks and limits, and the verbs that change them."""

    def __init__(self, queue: RequestQueue, blocks: BlockManager, limits: Limits) -> None:
        super().__init__(queue, blocks, limits)
        self._in_flight: frozenset[int] = frozenset()

    # Rows

    def has_block(self, request: Request) -> bool:
        """Whether the next decode's token has a place, or could get one."""
        return self.blocks.can_append(request.request_id, request.num_tokens)

    def add_decode(self, batch: BatchDraft, request: Request) -> None:
        """Adds the request's next decode. Needs room in the batch and `has_block`."""
        assert batch.room > 0 and request.is_decoding and self.is_free(request)
        gained = self.blocks.append(request.request_id, request.num_tokens)
        self._news.gain(request.request_id, gained)
        batch.add(Row(request.request_id, request.placement, request.num_computed, None, True))
        self._serve(request)

    def add_decodes(self, batch: BatchDraft, requests: list[Request]) -> int:
        """`add_decode` for free requests that decode on one side, in order, until the batch is full
        or one finds no block; returns how many were added."""
        requests = requests[: batch.row_room]
        if not requests:
            return 0
        count, iteration, size = len(requests), self.iteration, self.blocks.block_size
        ids: list[int] = []
        starts: list[int] = []
        ends: list[int] = []  # indices of those that need another block, or have it already
        for index, request in enumerate(requests):
            start = request.num_computed
            ids.append(request.request_id)
            starts.append(start)
            if start % size == 0:
                ends.append(index)
        if ends:
            count = self._extend(ids, starts, ends)
            del requests[count:], ids[count:], starts[count:]
        if requests:
            for request in requests:
                request.last_served = iteration
            self._planned.update(ids)
            batch.add_decodes(decode_rows(ids, requests[0].placement, starts), sum(starts) + count)
        return count

    def add_chunk(self, batch: BatchDraft, request: Request, max_tokens: int | None = None) -> int:
        """Adds the next prefill chunk of a running request, of `max_tokens` tokens at most (None:
        all that the batch has room for); returns its tokens (0: no room)."""
        assert self.is_free(request)
        start, placement, num_tokens = request.num_computed, request.placement, request.num_tokens
        room = batch.room if max_tokens is None else min(max_tokens, batch.room)
        end = min(num_tokens, start + room)
        if placement is STAGING:
            end = min(end, self._staging_left * self.blocks.block_size)
        if end <= start:
            return 0
        if placement is STAGING:
            self._staging_left -= self.blocks.blocks_for(end)
        ids = request.token_ids(start, end)
        batch.add(Row(request.request_id, placement, start, ids, end == num_tokens))
        self._serve(request)
        return end - start

    def shorten_chunk(self, batch: BatchDraft, row: Row, request: Request, num_tokens: int) -> None:
        """Cuts a chunk of the plan being composed to `num_tokens`; 0 takes it out."""
        assert row.request_id == request.request_id and num_tokens < row.num_tokens
        batch.remove(row)
        self._planned.remove(request.request_id)
        if row.placement is STAGING:
            self._staging_left += self.blocks.blocks_for(row.start + row.num_tokens)
        if num_tokens:
            self.add_chunk(batch, request, num_tokens)

    # Starting, preempting, moving, ending

    def can_start(self, request: Request, placement: Placement) -> bool:
        """Whether blocks for all tokens that the waiting request has now are free, and one more
        for each request on that side, so that a start does not at once force a preemption."""
        side = placement.side
        spare = self.running_on(side) * self.blocks.block_size
        fits = self.blocks.can_allocate(side, request.num_tokens + spare)
        # A preempted request's newest token may not be known yet.
        return fits and request.num_pending == 0 and self.fits_alone(request, placement)

    def start(self, request: Request, placement: Placement) -> None:
        """The oldest waiting request gets blocks for all tokens that it has now."""
        self.queue.start(request)
        request.placement, request.last_served = placement, self.iteration
        self._on_gpu += placement is GPU
        self._index.touch(request)
        self._news.admit(request)
        gained = self.blocks.allocate(request.request_id, placement.side, request.num_tokens)
        self._news.gain(request.request_id, gained)

    def preempt(self, request: Request) -> None:
        """Frees a request; it will be computed again from its tokens."""
        assert self.is_free(request)
        self._left(request)
        self.queue.preempt(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._release(request.request_id)

    def can_move(self, request: Request, target: Placement) -> bool:
        return (
            request.is_decoding
            and self.fits_alone(request, target)
            and self.blocks.can_move(request.request_id, target)
        )

    def move(self, request: Request, target: Placement) -> None:
        """Sends a decoding request's KV to the other side; it has no row in this iteration."""
        assert self.is_free(request)
        request_id, source = request.request_id, request.placement
        old = self.blocks.owned(request_id)
        new = self.blocks.begin_move(request_id, target)
        self._news.move(Move(request_id, source, target, old, new))
        self.num_moves += 1
        self._on_gpu += 1 if target is GPU else -1
        request.placement, request.moving = target, True
        self._serve(request)
        self._index.touch(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, in whatever state, and frees what it owns. The blocks of one that
        is in flight are freed once its cohort has let it go."""
        held = request.state is RequestState.RUNNING
        if held:
            self._left(request)
        self.queue.remove(request)
        if request.in_flight:
            self._draining.add(request.request_id)
            self._news.drop(request.request_id)
        elif held:
            self._release(request.request_id)

    # Between plans

    def step_plan(
        self,
        pipeline: str,
        batches: Sequence[BatchDraft],
        cohorts: Sequence[BatchDraft] = (),
        predicted_us: float | None = None,
        candidates_us: Mapping[str, float] | None = None,
        inequality: Inequality | None = None,
    ) -> StepPlan:
        """The plan of these batches, with all that the workers have not been told yet."""
        new_cohorts = [cohort.sub_batch() for cohort in cohorts if cohort.num_rows]
        for new in new_cohorts:
            self.cohorts.add([row.request_id for row in new.rows])
        plan = StepPlan(
            pipeline,
            tuple(map(BatchDraft.sub_batch, batches)),
            tuple(new_cohorts),
            predicted_us=predicted_us,
            candidates_us=dict(candidates_us or {}),
            inequality=inequality,
            **self._news.take(),
        )
        self._planned.clear()
        self._staging_left = self.limits.staging_blocks
        self.iteration += 1
        return plan

    def settle(self, plan: StepPlan, in_flight: frozenset[int]) -> None:
        """Books what an executed plan has ended: moves, cohorts, prefills through the staging area.
        The tokens that were computed (`num_computed`, of decodes too) are booked before, those that
        were sampled after it."""
        before, running = self._in_flight, self.queue.running_request
        returned = before - in_flight
        self.cohorts.settle(in_flight, returned)
        for move in plan.moves:
            self.blocks.finish_move(move.request_id)
            if (request := running(move.request_id)) is not None:
                request.moving = False
        served = []  # CPU decodes
        for batch in plan.sub_batches + plan.new_cohorts:
            for row in reversed(batch.rows):
                if row.placement is GPU and row.token_ids is None:
                    break  # stays what and where it is, as do all before it
                request_id = row.request_id
                if request_id in in_flight or (request := running(request_id)) is None:
                    continue  # see below, or it has ended
                if row.token_ids is None and request.num_computed > row.start:
                    served.append(request_id)
                elif row.token_ids is None or request.num_computed >= request.num_tokens - 1:
                    self._advanced(request)  # of a cohort that was left alone, or it will decode
        turn = self.iteration - 1  # until then it was under way
        if len(in_flight) > len(before) - len(returned):
            left = [request for i in in_flight - before if (request := running(i)) is not None]
            for request in left:
                request.last_served, request.in_flight = turn, True
            self._index.park(left)
        for request_id in returned:
            if (request := running(request_id)) is not None:
                request.last_served, request.in_flight = turn, False
                served.append(request_id)
        if served:
            self._index.serve(served)
        self._in_flight = in_flight
        for request_id in [r for r in self._draining if r not in in_flight]:
            self._draining.remove(request_id)
            self._release(request_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the running and the draining requests own blocks."""
        self.blocks.check_integrity()
        self.queue.check_integrity()
        owners = {r.request_id for r in self.queue.running} | self._draining
        assert self.blocks.owners() == owners, "blocks are owned by a request that does not run"
        running = self.queue.running
        assert self._on_gpu == sum(r.placement is GPU for r in running)
        self._index.check_integrity(running)
        self.cohorts.check_integrity(self._in_flight)

    def _extend(self, ids: list[int], starts: list[int], ends: list[int]) -> int:
        """Another block for each of the requests at `ends` whose blocks are full; returns how many
        of all requests, the first ones, have room for their next token then."""
        rooms = self.blocks.rooms_of([ids[index] for index in ends])
        full = [index for index, room in zip(ends, rooms, strict=True) if starts[index] >= room]
        gained = self.blocks.append_one([ids[index] for index in full])
        for index, block in zip(full, gained, strict=False):
            self._news.gain(ids[index], (block,))
        return full[len(gained)] if len(gained) < len(full) else len(ids)

    def _advanced(self, request: Request) -> None:
        """A chunk of it has been launched behind which it may decode, or a pass left its cohort
        alone. Behind any other chunk it goes on prefilling, and nothing else changes."""
        if request.placement is STAGING and (
            request.is_decoding or request.num_computed == request.num_tokens
        ):
            request.placement = CPU
        self._index.touch(request)

    def _left(self, request: Request) -> None:
        """A running request is about to run no longer."""
        self._on_gpu -= request.placement is GPU
        self._index.discard(request)

    def _serve(self, request: Request) -> None:
        self._planned.add(request.request_id)
        request.last_served = self.iteration

    def _release(self, request_id: int) -> None:
        self.blocks.free(request_id)
        self._news.release(request_id)
