"""Iterations of dummy requests, run through an executor as real ones are, and timed. No torch.

Dummy requests have negative ids and no tokens of their own: a decode at position p reads p tokens
of whatever lies in the blocks that it was given. Blocks are given out in turn, so that requests
share them once a pool is used up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from swiftapex.backends.graph_rows import HYBRID_SEEN_BEFORE
from swiftapex.core.plan import Admission, Move, Row, StepPlan, SubBatch, row_order
from swiftapex.core.request import Placement, SamplingParams
from swiftapex.executor.base import Executor

_CLOSE = 0.03  # spread of the timed iterations with which a measurement is good enough
# Iterations not timed, after one more: libraries set themselves up, the last one records a graph.
_WARM = HYBRID_SEEN_BEFORE
_TOKEN = 3  # any token id


@dataclass(frozen=True, slots=True)
class Work:
    """A dummy request's share of an iteration: a decode (`tokens` 0) over `prefix` tokens, its own
    not counted, or a chunk of `tokens` behind them."""

    placement: Placement
    prefix: int
    tokens: int = 0

    @property
    def context(self) -> int:
        return self.prefix + max(1, self.tokens)


def decodes(side: Placement, count: int, tokens: int) -> list[Work]:
    """`count` decodes that read `tokens` tokens of KV together, their own included."""
    each, more = divmod(tokens, count)
    return [Work(side, max(0, each + (i < more) - 1)) for i in range(count)]


class Probe:
    """Times plans on `executor`. `num_blocks` per side; `block_size` in tokens.

    `patience_s`: no measurement goes on for much longer than this, however its times spread.
    """

    def __init__(
        self,
        executor: Executor,
        num_blocks: dict[Placement, int],
        block_size: int,
        patience_s: float = 1.0,
        most: int = 8,
        sampling: SamplingParams | None = None,
    ) -> None:
        self._executor = executor
        self._num_blocks = num_blocks
        self.block_size = block_size
        self.runs_ahead = executor.runs_ahead
        self._patience_s = patience_s
        self._most = most
        self._sampling = sampling or SamplingParams()
        self._next_id = -1

    def time(
        self, pipeline: str, *sub_batches: Sequence[Work], sampled: int | None = None
    ) -> float:
        """µs of an iteration among others of its kind. `sampled`: rows that complete a token (None:
        all of them); at least one does, so that the iteration's end is seen."""
        with self._plan(pipeline, sub_batches, sampled) as plan:
            return self._timed(plan)

    def run(self, pipeline: str, *sub_batches: Sequence[Work], times: int = 1) -> None:
        """Such iterations one after another, until they are done."""
        with self._plan(pipeline, sub_batches, None) as plan:  # which runs one
            for _ in range(times - 1):
                self._executor.execute(plan).fetch()

    def host_time(self, pipeline: str, *sub_batches: Sequence[Work]) -> float:
        """µs that the host needs to launch such an iteration while the device has nothing to do."""
        with self._plan(pipeline, sub_batches, None) as plan:
            times = []
            for _ in range(_WARM + 3):
                start = time.perf_counter()
                result = self._executor.execute(plan)
                times.append(time.perf_counter() - start)
                result.fetch()
            return 1e6 * _undisturbed(times[_WARM:])

    def move_time(self, num_blocks: int, times: int = 6) -> float:
        """µs of moving a request of so many blocks to the other side, of `times` moves in turn. A
        decode behind them shows when they are done."""
        gpu, cpu = (self._blocks(side, num_blocks, 0) for side in (Placement.GPU, Placement.CPU))
        (request_id,) = self._new_ids(1)
        out = Move(request_id, Placement.GPU, Placement.CPU, gpu, cpu)
        back = Move(request_id, Placement.CPU, Placement.GPU, cpu, gpu)
        nothing = (SubBatch(),)
        with self._plan("sequential", [decodes(Placement.GPU, 1, 1)], None) as decode:
            alone = self._timed(decode)
            self._executor.execute(
                StepPlan("sequential", nothing, admitted=(self._admission(request_id),))
            )
            start = time.perf_counter()
            for index in range(times):
                move = back if index % 2 else out
                self._executor.execute(StepPlan("sequential", nothing, moves=(move,)))
            self._executor.execute(decode).fetch()
            whole = 1e6 * (time.perf_counter() - start)
            self._executor.execute(StepPlan("sequential", nothing, released=(request_id,)))
        return max(0.0, whole - alone) / times

    @contextmanager
    def _plan(
        self, pipeline: str, sub_batches: Sequence[Sequence[Work]], sampled: int | None
    ) -> Iterator[StepPlan]:
        """The plan, with its requests known to the workers; they are forgotten afterwards."""
        works = [work for batch in sub_batches for work in batch]
        ids = self._new_ids(len(works))
        sampled = len(works) if sampled is None else max(1, sampled)
        blocks, used = {}, dict.fromkeys(self._num_blocks, 0)
        for request_id, work in zip(ids, works, strict=True):
            side, count = work.placement.side, -(-work.context // self.block_size)
            blocks[request_id] = self._blocks(side, count, used[side])
            used[side] += count
        rows = iter(
            [_row(i, w, n < sampled) for n, (i, w) in enumerate(zip(ids, works, strict=True))]
        )
        batches = tuple(
            SubBatch(tuple(sorted((next(rows) for _ in batch), key=row_order)))
            for batch in sub_batches
        )
        plan = StepPlan(pipeline, batches)
        first = replace(plan, admitted=tuple(map(self._admission, ids)), new_blocks=blocks)
        self._executor.execute(first).fetch()
        try:
            yield plan
        finally:
            self._executor.execute(StepPlan("sequential", (SubBatch(),), released=ids))

    def _timed(self, plan: StepPlan) -> float:
        """Launches as the engine does: the next iteration before the last one's tokens are there,
        where the device works beside the host."""
        ahead = self.runs_ahead
        times: list[float] = []
        begin = last = time.perf_counter()
        warm, pending = _WARM if ahead else 1, None
        while True:
            launched = self._executor.execute(plan)
            if ahead and pending is None:
                pending = launched
                continue
            (pending if pending is not None else launched).fetch()
            pending = launched if ahead else None
            now = time.perf_counter()
            times.append(now - last)
            last = now
            late = now - begin > self._patience_s and len(times) > 1
            timed = times[warm:] or times[-1:]
            if (
                late
                or len(timed) >= self._most
                or (len(times) >= warm + 3 and _spread(timed) < _CLOSE)
            ):
                break
        if pending is not None:
            pending.fetch()
        return 1e6 * _undisturbed(timed)

    def _blocks(self, side: Placement, count: int, used: int) -> tuple[int, ...]:
        total = self._num_blocks[side]
        return tuple((used + i) % total for i in range(count))

    def _admission(self, request_id: int) -> Admission:
        return Admission(request_id, 1, self._sampling, _TOKEN)

    def _new_ids(self, count: int) -> tuple[int, ...]:
        first, self._next_id = self._next_id, self._next_id - count
        return tuple(range(first, first - count, -1))


def _row(request_id: int, work: Work, completes: bool) -> Row:
    ids = (_TOKEN,) * work.tokens if work.tokens else None
    return Row(request_id, work.placement, work.prefix, ids, completes)


def _undisturbed(times: Sequence[float]) -> float:
    """Mean of the fastest third: what else the machine does only ever adds."""
    return statistics.mean(sorted(times)[: -(-len(times) // 3)])


def _spread(times: Sequence[float]) -> float:
    """Of the middle half, relative to the median."""
    quarters = statistics.quantiles(times, n=4)
    return (quarters[2] - quarters[0]) / statistics.median(times)
