"""What the work of an iteration costs, in µs per layer. No torch here.

A policy asks a `CostModel` about one layer at a time and puts the answers together with the
functions below: the time models of NEO (MLSys'25) and APEX (arXiv 2506.03296). The symbols are
theirs: T_l linear layers of a sub-batch (post- and pre-projection), T_ga attention on the GPU
(prefill attention included), T_ca decode attention on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from swiftapex.core.plan import Row
from swiftapex.core.request import CPU

HOST_KINDS = ("decodes", "chunks", "two_decodes", "two", "cohorts")
DECODES, CHUNKS, TWO_DECODES, TWO_BATCHES, COHORTS = HOST_KINDS
"""What the host launches in a pass: GPU decodes alone, one batch with chunks, two sub-batches of
decodes, two with chunks, one batch that cohorts may join."""


class CostModel(Protocol):
    """µs of each kind of work, in one layer where nothing else is said. No work costs nothing;
    more never costs less. `requests`: how many share the tokens of KV that are read."""

    @property
    def num_layers(self) -> int: ...

    def linear_us(self, rows: int) -> float:
        """All linear layers and norms of a layer over `rows` tokens: T_l."""

    def gpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        """GPU decodes that read `tokens` tokens of KV together."""

    def prefill_attention_us(self, chunk: int, prefix: int) -> float:
        """A prefill chunk of `chunk` tokens behind `prefix` tokens."""

    def cpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        """One task of CPU decodes that read `tokens` tokens of KV together: T_ca."""

    def iteration_us(self, completing: int) -> float:
        """Of a whole iteration: what no layer accounts for, such as embedding, logits and sampling
        of `completing` tokens."""

    def hand_off_us(self, rows: int) -> float:
        """What the GPU side spends besides when it hands `rows` rows to the CPU and takes their
        attention back."""

    def layerwise_us(self, rows: int) -> float:
        """What a layer over `rows` rows takes besides where cohorts may join it, so that no whole
        pass is recorded and replayed."""

    def host_us(self, kind: str) -> float:
        """Of a whole iteration: the host's time to launch one of HOST_KINDS, which no iteration
        is shorter than."""

    def copy_us(self, tokens: int) -> float:
        """Of all layers: a copy of `tokens` tokens of KV from one side to the other."""


class Load(NamedTuple):
    """What a sub-batch asks of both sides in each layer. A named tuple, since a plan makes dozens
    and a frozen dataclass takes three times as long to make."""

    rows: int = 0  # tokens that go through its linear layers
    gpu_tokens: int = 0  # tokens of KV that its GPU decodes read
    cpu_tokens: int = 0  # tokens of KV that its CPU decodes read
    chunks: tuple[tuple[int, int], ...] = ()  # prefill chunks: (tokens, tokens before them)
    gpu_requests: int = 0  # its GPU decodes
    cpu_requests: int = 0  # its CPU decodes

    @staticmethod
    def of(rows: Iterable[Row]) -> Load:
        chunks: list[tuple[int, int]] = []
        gpu: list[int] = []
        cpu: list[int] = []
        for row in rows:
            if row.token_ids is not None:
                chunks.append((len(row.token_ids), row.start))
            elif row.placement is CPU:
                cpu.append(row.start)
            else:
                gpu.append(row.start)
        total = sum(tokens for tokens, _ in chunks) + len(gpu) + len(cpu)
        read_gpu, read_cpu = sum(gpu) + len(gpu), sum(cpu) + len(cpu)
        return Load(total, read_gpu, read_cpu, tuple(chunks), len(gpu), len(cpu))

    @property
    def completing(self) -> int:
        """Tokens that it samples, where all of its chunks end a prompt."""
        return self.gpu_requests + self.cpu_requests + len(self.chunks)

    def with_cpu_decodes(self, tokens: int, count: int = 1) -> Load:
        """`count` more CPU decodes, which read `tokens` tokens of KV together."""
        rows, gpu_tokens, cpu_tokens, chunks, gpu_requests, cpu_requests = self
        cpu_tokens, cpu_requests = cpu_tokens + tokens, cpu_requests + count
        return Load(rows + count, gpu_tokens, cpu_tokens, chunks, gpu_requests, cpu_requests)

    def without_chunks(self) -> Load:
        rows = self.rows - sum(tokens for tokens, _ in self.chunks)
        return self.with_chunks(rows, ())

    def with_rows(self, more: int) -> Load:
        return self.with_chunks(self.rows + more, self.chunks)

    def with_chunks(self, rows: int, chunks: tuple[tuple[int, int], ...]) -> Load:
        """With these chunks instead of its own, and so many rows in all."""
        _, gpu_tokens, cpu_tokens, _, gpu_requests, cpu_requests = self
        return Load(rows, gpu_tokens, cpu_tokens, chunks, gpu_requests, cpu_requests)


def gpu_side_attention_us(cost: CostModel, load: Load) -> float:
    """T_ga of one layer: GPU decodes and prefill chunks."""
    attention = cost.gpu_attention_us(load.gpu_tokens, load.gpu_requests)
    for tokens, prefix in load.chunks:
        attention += cost.prefill_attention_us(tokens, prefix)
    return attention


def cpu_side_attention_us(cost: CostModel, load: Load) -> float:
    """T_ca of one layer."""
    return cost.cpu_attention_us(load.cpu_tokens, load.cpu_requests)


def gpu_only_us(cost: CostModel, load: Load) -> float:
    """An iteration of the load's GPU rows and chunks in one batch: L (T_l + T_ga), APEX Eq. 1, and
    what the iteration costs besides."""
    if load.rows == 0:
        return 0.0
    layers = cost.num_layers * (cost.linear_us(load.rows) + gpu_side_attention_us(cost, load))
    host = cost.host_us(CHUNKS if load.chunks else DECODES)
    return max(layers + cost.iteration_us(load.completing), host)


def asymmetric_us(cost: CostModel, first: Load, second: Load) -> float:
    """An iteration of two sub-batches half a layer out of phase, NEO section 3:
    L (max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0)), hand-offs in T_l, and what the iteration costs
    besides."""
    if first.rows == second.rows == 0:
        return 0.0
    beside_first, beside_second = gpu_halves_us(cost, first, second)
    cycle = max(beside_first, cpu_side_attention_us(cost, second))
    cycle += max(beside_second, cpu_side_attention_us(cost, first))
    rest = cost.iteration_us(first.completing + second.completing)
    kind = TWO_BATCHES if first.chunks or second.chunks else TWO_DECODES
    return max(cost.num_layers * cycle + rest, cost.host_us(kind))


def gpu_halves_us(cost: CostModel, first: Load, second: Load) -> tuple[float, float]:
    """The GPU's work in a layer of two sub-batches: T_l0, beside which the CPU attends for the
    second one, and T_l1 + T_ga0."""
    beside_first = cost.linear_us(first.rows) + cost.hand_off_us(first.cpu_requests)
    beside_second = cost.linear_us(second.rows) + cost.hand_off_us(second.cpu_requests)
    return beside_first, beside_second + gpu_side_attention_us(cost, first)


def spare_us(cost: CostModel, first: Load, second: Load) -> tuple[float, float]:
    """µs of a layer in which the CPU could still attend, for rows of the first and of the second
    sub-batch: T_l1 + T_ga0 - T_ca0 and T_l0 - T_ca1. Negative: the GPU waits (NEO's constraints).
    """
    beside_first, beside_second = gpu_halves_us(cost, first, second)
    return (
        beside_second - cpu_side_attention_us(cost, first),
        beside_first - cpu_side_attention_us(cost, second),
    )


def overlap_us(
    cost: CostModel, load: Load, in_flight: int, cohorts: int = 1, attention: float | None = None
) -> float:
    """A pass in which `in_flight` CPU decodes are parked, in `cohorts` cohorts. Each rejoins L
    times in its L + 1 passes, so that a layer merges in_flight / (L + 1) of them on average; the
    pass never waits for the CPU. `attention`: T_ga of the load, where it is known."""
    riders = -(-in_flight // (cost.num_layers + 1))
    rows = load.rows + riders
    if rows == 0:
        return 0.0
    if attention is None:
        attention = gpu_side_attention_us(cost, load)
    layers = cost.num_layers * (cost.linear_us(rows) + attention)
    if in_flight:
        layers += cost.num_layers * cost.layerwise_us(rows)
        layers += cohorts * cost.hand_off_us(-(-in_flight // max(1, cohorts)))
    kind = COHORTS if in_flight else CHUNKS if load.chunks else DECODES
    return max(layers + cost.iteration_us(load.completing + riders), cost.host_us(kind))


def visit_us(cost: CostModel, cpu_tokens: int, cohorts: int, requests: int = 1) -> float:
    """CPU time in which every cohort in flight advances one layer: what a pass should take."""
    if cpu_tokens <= 0:
        return 0.0
    one = cost.cpu_attention_us(cpu_tokens, requests)
    return one + max(0, cohorts - 1) * cost.cpu_attention_us(1)


def overlap_tokens(cost: CostModel, in_flight: int) -> float:
    """Tokens of parked CPU decodes that a pass is worth. A visit is 1 / (L + 1) of a token: by
    the tokens that a single pass completes, starting to overlap would never look worth it."""
    return in_flight / (cost.num_layers + 1)
