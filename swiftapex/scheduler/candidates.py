"""The strategies that an iteration could take from here, with the time and the rate predicted for
each. A strategy is named after its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swiftapex.core.plan import Inequality
from swiftapex.core.request import Placement
from swiftapex.cost_model import (
    CostModel,
    Load,
    asymmetric_us,
    gpu_only_us,
    overlap_tokens,
    overlap_us,
    visit_us,
)
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.prefill import first_chunks, most_that, overlap_chunk_tokens
from swiftapex.scheduler.split import Split, gpu_progress
from swiftapex.scheduler.state import SchedulerState

GPU_ONLY, ASYMMETRIC, OVERLAP = "sequential", "asymmetric", "async_overlap"
EQUATION_5 = "requests per ms: asymmetric > GPU-only (Eq. 5)"
BEST_RATE = "requests per ms: best with the CPU > GPU-only"


@dataclass(frozen=True, slots=True)
class Candidate:
    us: float  # predicted time of the iteration
    served: float  # requests that it serves: a decode 1, a chunk its share of the prompt, a visit
    # of a parked decode 1 / (L + 1)

    @property
    def rate(self) -> float:
        """Requests served per µs."""
        return self.served / self.us if self.us > 0 else 0.0


def candidates(
    state: SchedulerState, cost: CostModel, first: BatchDraft, split: Split, rows: int
) -> dict[str, Candidate]:
    """What could run: GPU-only where the GPU has rows, asymmetric pipelining where the split takes
    CPU decodes in, asynchronous overlap where `rows` more could start or some are parked.

    Parked cohorts ride along with any of them. They count for the strategies that use the CPU, not
    for GPU-only: what is asked is whether it pays to have the CPU decode, not whether it pays to
    take in once more what is under way anyhow."""
    load, in_flight = first.load, state.num_in_flight
    own, parked = gpu_progress(state, first), overlap_tokens(cost, in_flight)
    found = {}
    if load.rows:
        found[GPU_ONLY] = Candidate(gpu_only_us(cost, load), own)
    if split.count:
        two = two_batches_us(state, cost, *split.loads)
        found[ASYMMETRIC] = Candidate(two, own + split.count + parked)
    if rows or in_flight:
        found[OVERLAP] = _overlap(state, cost, first, rows, own)
    return found


def one_batch_us(state: SchedulerState, cost: CostModel, load: Load) -> float:
    """A sequential iteration; parked cohorts ride along with it. It ends when its moves have."""
    copies = cost.copy_us(state.moving_tokens)
    if state.num_in_flight:
        return max(copies, overlap_us(cost, load, state.num_in_flight, len(state.cohorts)))
    return max(copies, gpu_only_us(cost, load))


def two_batches_us(state: SchedulerState, cost: CostModel, large: Load, small: Load) -> float:
    """An asymmetric iteration; parked cohorts ride along with its first sub-batch. It ends when
    its moves have."""
    riders = -(-state.num_in_flight // (cost.num_layers + 1))
    us = asymmetric_us(cost, large.with_rows(riders) if riders else large, small)
    return max(us, cost.copy_us(state.moving_tokens))


def _overlap(
    state: SchedulerState, cost: CostModel, first: BatchDraft, rows: int, own: float
) -> Candidate:
    """With its chunks cut as `overlap_plan` would. Where a visit of all cohorts takes the CPU
    longer than the pass, they advance by less than a layer."""
    load, in_flight = first.load, state.num_in_flight + rows
    cohorts = len(state.cohorts) + bool(rows)
    visit = visit_us(cost, state.cpu_tokens, cohorts, state.running_on(Placement.CPU))
    chunk_tokens = sum(tokens for tokens, _ in load.chunks)
    if chunk_tokens:
        keep = overlap_chunk_tokens(cost, load, in_flight, visit, state.cpu_free)
        own -= (own - load.gpu_requests) * (1 - keep / chunk_tokens)
        load = first_chunks(load, keep)
    us = overlap_us(cost, load, in_flight, cohorts)
    advance = min(1.0, us / visit) if visit > 0 else 1.0
    return Candidate(us, own + overlap_tokens(cost, in_flight) * advance)


def times(found: Mapping[str, Candidate]) -> dict[str, float]:
    """µs of each, for the record."""
    return {name: candidate.us for name, candidate in found.items()}


def against_gpu_only(found: Mapping[str, Candidate], words: str, *others: str) -> Inequality | None:
    """The best of `others` against GPU-only, for the record; None where there is no choice."""
    rates = [found[name].rate for name in others if name in found]
    if GPU_ONLY not in found or not rates:
        return None
    return Inequality(words, 1e3 * max(rates), 1e3 * found[GPU_ONLY].rate)


def cpu_pays(
    state: SchedulerState, cost: CostModel, load: Load, tokens: int, margin: float
) -> bool:
    """Whether decodes of `tokens` tokens of KV each on the CPU would raise the rate of the GPU's
    decodes by more than a share of `margin`, with as many of them as the CPU can take: in
    asymmetric pipelining as many as T_l0 hides, in asynchronous overlap as many as make a visit as
    long as the pass. `load`: of the GPU's decodes so far; requests that still prefill there will
    decode as these do."""
    count = min(state.running_on(Placement.GPU), state.limits.max_batch_size)
    if count == 0:
        return True
    each = load.gpu_tokens / load.gpu_requests if load.gpu_requests else tokens
    gpu = Load(count, int(count * each), gpu_requests=count)
    room = state.blocks.num_total(Placement.CPU) // max(1, state.blocks.blocks_for(tokens))
    if room == 0:
        return False
    alone = gpu_only_us(cost, gpu)
    rate = (1 + margin) * gpu.rows / alone
    rows = min(room, state.limits.max_batch_size)
    hides = cost.linear_us(gpu.rows)
    second = most_that(lambda n: cost.cpu_attention_us(n * tokens, n) <= hides, rows)
    small = Load().with_cpu_decodes(second * tokens, second)
    if (gpu.rows + second) / asymmetric_us(cost, gpu, small) > rate:
        return True

    def keeps_up(n: int) -> bool:
        cohorts = min(n, 2 + n // 64)
        return visit_us(cost, n * tokens, cohorts, n) <= overlap_us(cost, gpu, n, cohorts)

    parked = most_that(keeps_up, room)
    cohorts = min(parked, 2 + parked // 64)
    us = overlap_us(cost, gpu, parked, cohorts)
    advance = min(1.0, us / visit_us(cost, parked * tokens, cohorts, parked))
    return (gpu.rows + overlap_tokens(cost, parked) * advance) / us > rate
