"""The strategies that an iteration could take from here, with the time and the rate predicted for
each. A strategy is named after its pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swiftapex.core.plan import Inequality
from swiftapex.core.request import CPU
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
from swiftapex.scheduler.prefill import FirstChunks, overlap_chunk_tokens
from swiftapex.scheduler.split import Split, gpu_progress
from swiftapex.scheduler.state import SchedulerState

GPU_ONLY, ASYMMETRIC, OVERLAP = "sequential", "asymmetric", "async_overlap"
EQUATION_5 = "requests per ms: asymmetric > GPU-only (Eq. 5)"


@dataclass(frozen=True, slots=True)
class Candidate:
    us: float  # predicted time of the iteration
    served: float  # requests that it serves: a decode 1, a chunk its share of the prompt, a visit
    # of a parked decode 1 / (L + 1)
    chunk: int | None = None  # tokens of prefill in it, where not all that the draft holds

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
    visit = visit_us(cost, state.cpu_tokens, cohorts, state.running_on(CPU))
    chunk_tokens, keep, attention_us = sum(tokens for tokens, _ in load.chunks), None, None
    if chunk_tokens:
        keep = overlap_chunk_tokens(cost, load, in_flight, visit, state.cpu_free)
        own -= (own - load.gpu_requests) * (1 - keep / chunk_tokens)
        load, attention_us = FirstChunks(cost, load).of(keep)
    us = overlap_us(cost, load, in_flight, cohorts, attention_us)
    advance = min(1.0, us / visit) if visit > 0 else 1.0
    return Candidate(us, own + overlap_tokens(cost, in_flight) * advance, keep)


def times(found: Mapping[str, Candidate]) -> dict[str, float]:
    """µs of each, for the record."""
    return {name: candidate.us for name, candidate in found.items()}


def against_gpu_only(found: Mapping[str, Candidate], words: str, *others: str) -> Inequality | None:
    """The best of `others` against GPU-only, for the record; None where there is no choice."""
    rates = [found[name].rate for name in others if name in found]
    if GPU_ONLY not in found or not rates:
        return None
    return Inequality(words, 1e3 * max(rates), 1e3 * found[GPU_ONLY].rate)
