"""StepPlan and StepResult: all that passes between the control plane and the workers.

Plain data without torch, small and picklable, so that the same plan can go to a worker in this
process or to one behind Ray. The workers keep what lasts longer than an iteration (block tables,
sampling parameters, the last sampled token); a plan only carries what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swiftapex.core.request import GPU, Placement, SamplingParams


class Row(NamedTuple):
    """One request's share of a sub-batch: a decode (one token) or a prefill chunk. A named tuple,
    since a plan has hundreds and they take a third of a dataclass's time to make."""

    request_id: int
    placement: Placement
    start: int  # position of the first token; as many tokens already lie in the KV cache
    token_ids: tuple[int, ...] | None  # prefill chunk; None: decode of the last sampled token
    completes: bool  # a token is sampled from the row's last position

    @property
    def num_tokens(self) -> int:
        return 1 if self.token_ids is None else len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        return self.token_ids is None


def decode_rows(ids: Iterable[int], placement: Placement, starts: Iterable[int]) -> list[Row]:
    """Decodes of these requests on one side, from these positions: in half of the time that `Row`
    takes for each."""
    new = tuple.__new__
    pairs = zip(ids, starts, strict=False)
    return [new(Row, (request_id, placement, start, None, True)) for request_id, start in pairs]


@dataclass(slots=True)
class SubBatch:
    """Rows that go through the linear layers together, in the order of `row_order`. Nobody changes
    one, nor a plan: frozen ones take three times as long to make."""

    rows: tuple[Row, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled column by column: half the bytes, a quarter of the time of row by row."""
        columns = [[getattr(row, name) for row in self.rows] for name in Row._fields]
        return _sub_batch, (columns,)


def _sub_batch(columns: list[list[Any]]) -> SubBatch:
    return SubBatch(tuple(map(Row, *columns)))


def row_order(row: Row) -> int:
    """Rows whose attention is computed by one call lie side by side: GPU decodes, GPU prefill
    chunks, STAGING prefill chunks, CPU decodes."""
    if row.placement is GPU:
        return 0 if row.token_ids is None else 1
    return 3 if row.token_ids is None else 2


class Admission(NamedTuple):
    """What a worker keeps about a request from its first row until it is released."""

    request_id: int
    prompt_len: int
    sampling: SamplingParams
    last_token: int  # newest output token of a request that comes back after preemption, else 0


class Move(NamedTuple):
    """All KV blocks of a request, over all layers, from one side to the other: source_blocks[i] to
    target_blocks[i]. Retires within the iteration; the request has no row in it."""

    request_id: int
    source: Placement
    target: Placement
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inequality:
    """What decided between two strategies: the first wins iff `left` > `right`."""

    words: str  # what the two sides are
    left: float
    right: float


@dataclass(slots=True)
class StepPlan:
    """One iteration. Applied in the order: released, admitted, new_blocks, then moves beside the
    pipeline.

    `new_cohorts` are CPU decodes whose attention may outlive the iteration (asynchronous overlap);
    each stays together until its token is complete.
    """

    pipeline: str
    sub_batches: tuple[SubBatch, ...]
    new_cohorts: tuple[SubBatch, ...] = ()
    moves: tuple[Move, ...] = ()
    admitted: tuple[Admission, ...] = ()
    new_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # appended per request
    released: tuple[int, ...] = ()  # finished, aborted or preempted since the last plan
    dropped: tuple[int, ...] = ()  # aborted in flight: leave their cohort when it rejoins
    predicted_us: float | None = None  # what the policy expects the iteration to take
    candidates_us: Mapping[str, float] = field(default_factory=dict)  # and of others it weighed
    inequality: Inequality | None = None  # what it weighed them by

    @property
    def is_empty(self) -> bool:
        """Nothing new to compute (parked cohorts may still be on their way)."""
        return not (self.moves or self.new_cohorts or any(b.rows for b in self.sub_batches))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the fields' names: half the bytes. Those of a subclass too."""
        return type(self), tuple([getattr(self, name) for name in self.__dataclass_fields__])


class CpuWork(NamedTuple):
    """Attention tasks that the CPU side has done: one is a layer of a sub-batch or cohort."""

    busy_s: float  # that its threads attended
    tasks: float
    rows: float  # of all tasks
    tokens: float  # of KV, that those rows read

    def since(self, earlier: CpuWork) -> CpuWork:
        return CpuWork(*(now - then for now, then in zip(self, earlier, strict=True)))


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token for each request that completed one."""

    by_request: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # request id -> why it has no token
    done_s: float | None = None  # when they were seen to be there (perf_counter), if before `fetch`
    cpu_work: CpuWork | None = None  # on rank 0 since its start; None without native CPU attention


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an iteration that has been launched will bring. `completing`: the requests that complete
    a token in it. `in_flight`: those whose work outlives the step; their blocks must stay as they
    are. `fetch` waits for the tokens of all that complete."""

    completing: tuple[int, ...] = ()
    in_flight: frozenset[int] = frozenset()
    fetch: Callable[[], Tokens] = Tokens
