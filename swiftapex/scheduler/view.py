"""What a policy can read of requests, blocks and limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from swiftapex.core.request import CPU, GPU, STAGING, Placement, Request, RequestState
from swiftapex.kv.block_manager import BlockManager
from swiftapex.scheduler.cohorts import CohortBook
from swiftapex.scheduler.draft import BatchDraft, Limits
from swiftapex.scheduler.index import Lazily, RequestIndex
from swiftapex.scheduler.news import News
from swiftapex.scheduler.queue import RequestQueue

_RUNNING = RequestState.RUNNING  # asked for very often: see `Placement`


class SchedulerView:
    """The questions that `SchedulerState` answers; none of them changes anything."""

    def __init__(self, queue: RequestQueue, blocks: BlockManager, limits: Limits) -> None:
        self.queue = queue
        self.blocks = blocks
        self.limits = limits
        self.iteration = 0
        self.num_preemptions = 0
        self.num_moves = 0
        self.cohorts = CohortBook()
        self._index = RequestIndex()
        self._news = News()
        self._on_gpu = 0  # running requests whose blocks are there
        self._planned: set[int] = set()  # requests with a row or a move in the plan being composed
        self._staging_left = limits.staging_blocks
        self._draining: set[int] = set()  # ended in flight: their blocks wait for the cohort

    def new_batch(self) -> BatchDraft:
        return BatchDraft(self.limits)

    def is_free(self, request: Request) -> bool:
        """Running, at a token boundary, and not yet in this plan: may get a row, move or yield."""
        return (
            request.state is _RUNNING
            and not (request.in_flight or request.moving)
            and request.request_id not in self._planned
        )

    def decoding(self, side: Placement) -> list[Request]:
        """Free requests whose next step is a decode on `side`, oldest first."""
        if side is GPU:
            return self.gpu_decodes(self._on_gpu)
        return sorted(self.cpu_decodes(), key=lambda r: r.request_id)

    def gpu_decodes(self, most: int) -> list[Request]:
        """As `decoding` on the GPU, the first ones."""
        requests = self._index.gpu_decodes
        if self._planned:
            return self._unplanned(requests).first(most)
        return list(islice(requests.values(), most))

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
        prefills = self._index.prefills
        return list(self._unplanned(prefills)) if prefills else []

    def running_on(self, side: Placement) -> int:
        """Running requests whose blocks are on `side`, in flight or not."""
        return self._on_gpu if side is GPU else self.queue.num_running - self._on_gpu

    def num_decoding(self, side: Placement) -> int:
        """Running requests that decode on `side`, in flight or not."""
        on_gpu, on_cpu, in_flight = self._index.counts()
        return on_gpu if side is GPU else on_cpu + in_flight

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
        return self.blocks.num_free(CPU) / max(1, self.blocks.num_total(CPU))

    @property
    def moving_tokens(self) -> int:
        """Tokens of KV, whole blocks, that the plan being composed moves to the other side."""
        return self._news.num_moved_blocks * self.blocks.block_size

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
        most = 0
        found: list[Request] = []
        for request in requests:
            if request.last_served >= since:
                break
            most = most or max(1, -(-self.num_decoding(CPU) // max(1, skipped)))
            if len(found) == most:
                break
            found.append(request)
        return found

    @property
    def staging_blocks_left(self) -> int:
        """Blocks of the staging area that this plan has not used yet."""
        return self._staging_left

    # What would fit an otherwise empty machine

    def tokens_at_most(self, request: Request) -> int:
        """Tokens whose KV the request needs in the end. The last token's is never stored."""
        return len(request.prompt_ids) + request.sampling.max_tokens - 1

    def fits_alone(self, request: Request, placement: Placement) -> bool:
        """Whether the request could run to its end on an otherwise empty machine."""
        need = self.blocks.blocks_for(self.tokens_at_most(request))
        return need <= self._capacity(placement)

    def needs_cpu(self, request: Request) -> bool:
        """Whether the request has its KV on the CPU, or could never have it on the GPU."""
        on_cpu = request.state is _RUNNING and request.placement.side is CPU
        return on_cpu or not self.fits_alone(request, GPU)

    def most_blocks(self, uses_cpu: bool) -> int:
        """Blocks of the largest request that can start, on the GPU alone without `uses_cpu`."""
        on_gpu = self._capacity(GPU)
        return max(on_gpu, self._capacity(STAGING)) if uses_cpu else on_gpu

    def capacity_words(self, uses_cpu: bool) -> str:
        """What there is, for a message that says that it is too little."""
        gpu = self.blocks.num_total(GPU)
        cpu = self.blocks.num_total(CPU)
        if not cpu or not uses_cpu:
            return f"{gpu} exist"
        return (
            f"and the GPU has {gpu}; the CPU has {cpu}, but a prompt goes there through a staging "
            f"area of {self.limits.staging_blocks}, which grows with gpu.kv_tokens"
        )

    def _capacity(self, placement: Placement) -> int:
        total = self.blocks.num_total(placement.side)
        return min(total, self.limits.staging_blocks) if placement is STAGING else total

    def _unplanned(self, requests: dict[int, Request]) -> Lazily:
        planned = self._planned
        if requests.keys().isdisjoint(planned):
            return Lazily(requests.values())
        return Lazily(request for i, request in requests.items() if i not in planned)

    def _newest_free(self, oldest_first: dict[int, Request]) -> Iterator[Request]:
        """The newest of them that is free and on the GPU, if any."""
        newest_first = reversed(oldest_first.values())
        found = (r for r in newest_first if r.placement is GPU and self.is_free(r))
        return islice(found, 1)
