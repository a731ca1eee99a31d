"""What a policy sees and the verbs with which it composes an iteration.

The verbs keep the rules that no policy may break: a row's blocks exist before its pass, limits
hold, requests start in order, what is in flight or moving is left alone. A policy decides what goes
in, and in what order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

from swiftapex.core.plan import Admission, Inequality, Move, Row, StepPlan, decode_rows
from swiftapex.core.request import Placement, Request, RequestState
from swiftapex.kv.block_manager import BlockManager
from swiftapex.scheduler.cohorts import CohortBook
from swiftapex.scheduler.draft import BatchDraft, Limits
from swiftapex.scheduler.index import Lazily, RequestIndex
from swiftapex.scheduler.queue import RequestQueue


class SchedulerState:
    """Requests, blocks and limits, and the changes since the last plan that workers must learn."""

    def __init__(self, queue: RequestQueue, blocks: BlockManager, limits: Limits) -> None:
        self.queue = queue
        self.blocks = blocks
        self.limits = limits
        self.iteration = 0
        self.num_preemptions = 0
        self.num_moves = 0
        self.cohorts = CohortBook()
        self._index = RequestIndex()
        self._on_gpu = 0  # running requests whose blocks are there
        self._in_flight: frozenset[int] = frozenset()
        self._planned: set[int] = set()  # requests with a row or a move in the plan being composed
        self._staging_left = limits.staging_blocks
        self._admitted: dict[int, Admission] = {}
        self._new_blocks: dict[int, tuple[int, ...]] = {}
        self._moves: list[Move] = []
        self._released: list[int] = []
        self._dropped: list[int] = []
        self._draining: set[int] = set()  # ended in flight: their blocks wait for the cohort

    # What there is

    def new_batch(self) -> BatchDraft:
        return BatchDraft(self.limits)

    def is_free(self, request: Request) -> bool:
        """Running, at a token boundary, and not yet in this plan: may get a row, move or yield."""
        return (
            request.state is RequestState.RUNNING
            and not (request.in_flight or request.moving)
            and request.request_id not in self._planned
        )

    def decoding(self, side: Placement) -> list[Request]:
        """Free requests whose next step is a decode on `side`, oldest first."""
        if side is Placement.GPU:
            return list(self.gpu_decodes())
        return sorted(self.cpu_decodes(), key=lambda r: r.request_id)

    def gpu_decodes(self) -> Lazily:
        """As `decoding` on the GPU. To be read before a request moves, starts or yields."""
        return self._unplanned(self._index.gpu_decodes)

    def cpu_decodes(self) -> Lazily:
        """As `decoding` on the CPU, but least recently served first, older ones before younger. To
        be read before a request moves, starts or yields."""
        return self._unplanned(self._index.cpu_decodes)

    def cpu_decodes_by_age(self) -> Iterator[Request]:
        """As `decoding` on the CPU, one by one; they may have a row in this plan."""
        return self._index.cpu_decodes_by_age()

    @property
    def idle_on_cpu(self) -> Iterable[Request]:
        """CPU decodes that are not in flight; they may have a row in this plan."""
        return self._index.cpu_decodes.values()

    def newest_on_gpu(self) -> Request:
        """The newest free request whose blocks are on the GPU. There has to be one."""
        groups = self._index.gpu_decodes, self._index.prefills
        on_gpu = (r for group in groups for r in self._newest_free(group))
        return max(on_gpu, key=lambda r: r.request_id)

    def prefilling(self) -> list[Request]:
        """Free running requests with tokens still to prefill, oldest first."""
        return list(self._unplanned(self._index.prefills))

    def running_on(self, side: Placement) -> int:
        """Running requests whose blocks are on `side`, in flight or not."""
        return self._on_gpu if side is Placement.GPU else self.queue.num_running - self._on_gpu

    def num_decoding(self, side: Placement) -> int:
        """Running requests that decode on `side`, in flight or not."""
        on_gpu, on_cpu, in_flight = self._index.counts()
        return on_gpu if side is Placement.GPU else on_cpu + in_flight

    @property
    def num_idle(self) -> int:
        """CPU decodes at a token boundary; they may have a row in this plan."""
        return self._index.counts()[1]

    @property
    def num_in_flight(self) -> int:
        return self._index.counts()[2]

    @property
    def cpu_tokens(self) -> int:
        """Tokens of KV that one visit of all CPU requests reads."""
        return self._index.cpu_tokens

    @property
    def cpu_free(self) -> float:
        """Share of the CPU's KV blocks that nobody owns."""
        return self.blocks.num_free(Placement.CPU) / max(1, self.blocks.num_total(Placement.CPU))

    @property
    def moving_tokens(self) -> int:
        """Tokens of KV, whole blocks, that the plan being composed moves to the other side."""
        return sum(len(move.source_blocks) for move in self._moves) * self.blocks.block_size

    @property
    def anything_in_flight(self) -> bool:
        """Whether a cohort is parked, be it only of requests that have ended."""
        return bool(self._draining) or self.num_in_flight > 0

    def overdue(self, requests: Iterable[Request]) -> list[Request]:
        """Those of `requests`, least recently served first, that were left out of the last
        `max_skipped` iterations; of many, as many as have to be taken now so that none is left out
        for twice that. All at once, in one iteration, would make everyone else wait for long."""
        skipped = self.limits.max_skipped
        since = self.iteration - skipped
        most = max(1, -(-self.num_decoding(Placement.CPU) // max(1, skipped)))
        return list(islice(takewhile(lambda r: r.last_served < since, requests), most))

    @property
    def staging_blocks_left(self) -> int:
        """Blocks of the staging area that this plan has not used yet."""
        return self._staging_left

    def tokens_at_most(self, request: Request) -> int:
        """Tokens whose KV the request needs in the end. The last token's is never stored."""
        return len(request.prompt_ids) + request.sampling.max_tokens - 1

    def fits_alone(self, request: Request, placement: Placement) -> bool:
        """Whether the request could run to its end on an otherwise empty machine."""
        need = self.blocks.blocks_for(self.tokens_at_most(request))
        return need <= self._capacity(placement)

    def needs_cpu(self, request: Request) -> bool:
        """Whether the request has its KV on the CPU, or could never have it on the GPU."""
        on_cpu = request.state is RequestState.RUNNING and request.placement.side is Placement.CPU
        return on_cpu or not self.fits_alone(request, Placement.GPU)

    def most_blocks(self, uses_cpu: bool) -> int:
        """Blocks of the largest request that can start, on the GPU alone without `uses_cpu`."""
        on_gpu = self._capacity(Placement.GPU)
        return max(on_gpu, self._capacity(Placement.STAGING)) if uses_cpu else on_gpu

    def capacity_words(self, uses_cpu: bool) -> str:
        """What there is, for a message that says that it is too little."""
        gpu = self.blocks.num_total(Placement.GPU)
        cpu = self.blocks.num_total(Placement.CPU)
        if not cpu or not uses_cpu:
            return f"{gpu} exist"
        return (
            f"and the GPU has {gpu}; the CPU has {cpu}, but a prompt goes there through a staging "
            f"area of {self.limits.staging_blocks}, which grows with gpu.kv_tokens"
        )

    def _capacity(self, placement: Placement) -> int:
        total = self.blocks.num_total(placement.side)
        return min(total, self.limits.staging_blocks) if placement is Placement.STAGING else total

    # Rows

    def has_block(self, request: Request) -> bool:
        """Whether the next decode's token has a place, or could get one."""
        return self.blocks.can_append(request.request_id, request.num_tokens)

    def add_decode(self, batch: BatchDraft, request: Request) -> None:
        """Adds the request's next decode. Needs room in the batch and `has_block`."""
        assert batch.room > 0 and request.is_decoding and self.is_free(request)
        self._note_blocks(request, self.blocks.append(request.request_id, request.num_tokens))
        batch.add(Row(request.request_id, request.placement, request.num_computed, None, True))
        self._serve(request)

    def add_decodes(self, batch: BatchDraft, requests: Sequence[Request]) -> int:
        """`add_decode` for free requests that decode on one side, in order, until the batch is full
        or one finds no block; returns how many were added."""
        requests = list(requests[: batch.row_room])
        if not requests:
            return 0
        count, iteration = len(requests), self.iteration
        ids = [request.request_id for request in requests]
        starts = [request.num_computed for request in requests]
        size = self.blocks.block_size
        ends = [index for index, start in enumerate(starts) if start % size == 0]  # of a block
        rooms = self.blocks.rooms_of([ids[index] for index in ends])
        full = [index for index, room in zip(ends, rooms, strict=True) if starts[index] >= room]
        gained = self.blocks.append_one([ids[index] for index in full])
        for index, block in zip(full, gained, strict=False):
            self._note_blocks(requests[index], (block,))
        if len(gained) < len(full):
            count = full[len(gained)]
            del requests[count:], ids[count:], starts[count:]
        if requests:
            for request in requests:
                request.last_served = iteration
            self._planned.update(ids)
            batch.add_decodes(decode_rows(ids, requests[0].placement, starts), sum(starts) + count)
        return count

    def add_chunk(self, batch: BatchDraft, request: Request, max_tokens: int) -> int:
        """Adds the next prefill chunk of a running request; returns its tokens (0: no room)."""
        assert self.is_free(request)
        start = request.num_computed
        end = min(request.num_tokens, start + min(max_tokens, batch.room))
        if request.placement is Placement.STAGING:
            end = min(end, self._staging_left * self.blocks.block_size)
        if end <= start:
            return 0
        if request.placement is Placement.STAGING:
            self._staging_left -= self.blocks.blocks_for(end)
        ids = request.token_ids(start, end)
        done = end == request.num_tokens
        batch.add(Row(request.request_id, request.placement, start, ids, done))
        self._serve(request)
        return end - start

    def shorten_chunk(self, batch: BatchDraft, row: Row, request: Request, num_tokens: int) -> None:
        """Cuts a chunk of the plan being composed to `num_tokens`; 0 takes it out."""
        assert row.request_id == request.request_id and num_tokens < row.num_tokens
        batch.remove(row)
        self._planned.remove(request.request_id)
        if row.placement is Placement.STAGING:
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
        self._on_gpu += placement is Placement.GPU
        self._changed(request)
        last_token = request.output_ids[-1] if request.output_ids else 0
        self._admitted[request.request_id] = Admission(
            request.request_id, len(request.prompt_ids), request.sampling, last_token
        )
        gained = self.blocks.allocate(request.request_id, placement.side, request.num_tokens)
        self._note_blocks(request, gained)

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
        self._moves.append(Move(request_id, source, target, old, new))
        self.num_moves += 1
        self._on_gpu += 1 if target is Placement.GPU else -1
        request.placement, request.moving = target, True
        self._serve(request)
        self._changed(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, in whatever state, and frees what it owns. The blocks of one that
        is in flight are freed once its cohort has let it go."""
        held = request.state is RequestState.RUNNING
        if held:
            self._left(request)
        self.queue.remove(request)
        if request.in_flight:
            self._draining.add(request.request_id)
            self._dropped.append(request.request_id)
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
        for cohort in cohorts:
            self.cohorts.add(row.request_id for row in cohort.rows)
        plan = StepPlan(
            pipeline,
            tuple(batch.sub_batch() for batch in batches),
            tuple(cohort.sub_batch() for cohort in cohorts if cohort.rows),
            tuple(self._moves),
            tuple(self._admitted.values()),
            dict(self._new_blocks),
            tuple(self._released),
            tuple(self._dropped),
            predicted_us,
            dict(candidates_us or {}),
            inequality,
        )
        for pending in (self._moves, self._released, self._dropped):
            pending.clear()
        for known in (self._admitted, self._new_blocks, self._planned):
            known.clear()
        self._staging_left = self.limits.staging_blocks
        self.iteration += 1
        return plan

    def settle(self, plan: StepPlan, in_flight: frozenset[int]) -> None:
        """Books what an executed plan has ended: moves, cohorts, prefills through the staging area.
        The tokens that were computed (`num_computed`, of decodes too) are booked before, those that
        were sampled after it."""
        self.cohorts.settle(in_flight)
        running = self.queue.running_request
        for move in plan.moves:
            self.blocks.finish_move(move.request_id)
            if (request := running(move.request_id)) is not None:
                request.moving = False
        served = []  # CPU decodes
        for row in (row for b in plan.sub_batches + plan.new_cohorts for row in b.rows):
            if row.placement is Placement.GPU and row.is_decode:
                continue  # stays what and where it is
            if row.request_id in in_flight or (request := running(row.request_id)) is None:
                continue  # see below, or it has ended
            if row.is_decode and request.num_computed > row.start:  # not a cohort left alone
                served.append(row.request_id)
            else:
                self._advanced(request)
        turn = self.iteration - 1  # until then it was under way
        for request_id in self._in_flight ^ in_flight:
            if (request := running(request_id)) is not None:
                request.last_served = turn
                request.in_flight = request_id in in_flight
                if request.in_flight:
                    self._index.park(request)
                else:
                    served.append(request_id)
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
        assert self._on_gpu == sum(r.placement is Placement.GPU for r in running)
        assert self.num_in_flight == sum(r.in_flight for r in running)
        on_cpu = [r.num_tokens for r in running if r.placement is not Placement.GPU]
        assert self.cpu_tokens == sum(on_cpu)

    def _unplanned(self, requests: dict[int, Request]) -> Lazily:
        planned = self._planned
        if requests.keys().isdisjoint(planned):
            return Lazily(requests.values())
        return Lazily(request for i, request in requests.items() if i not in planned)

    def _newest_free(self, oldest_first: dict[int, Request]) -> Iterator[Request]:
        """The newest of them that is free and on the GPU, if any."""
        newest_first = reversed(oldest_first.values())
        found = (r for r in newest_first if r.placement is Placement.GPU and self.is_free(r))
        return islice(found, 1)

    def _advanced(self, request: Request) -> None:
        """A chunk of it has been launched, or a pass left its cohort alone."""
        if request.placement is Placement.STAGING and (
            request.is_decoding or request.num_computed == request.num_tokens
        ):
            request.placement = Placement.CPU
        self._index.touch(request)

    def _changed(self, request: Request) -> None:
        self._index.touch(request)

    def _left(self, request: Request) -> None:
        """A running request is about to run no longer."""
        self._on_gpu -= request.placement is Placement.GPU
        self._index.discard(request)

    def _serve(self, request: Request) -> None:
        self._planned.add(request.request_id)
        request.last_served = self.iteration

    def _note_blocks(self, request: Request, gained: tuple[int, ...]) -> None:
        if gained:
            known = self._new_blocks.get(request.request_id, ())
            self._new_blocks[request.request_id] = known + gained

    def _release(self, request_id: int) -> None:
        """A request that no plan has named yet is forgotten; workers hear of the others."""
        self.blocks.free(request_id)
        self._new_blocks.pop(request_id, None)
        if self._admitted.pop(request_id, None) is None:
            self._released.append(request_id)
