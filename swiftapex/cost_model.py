"""What the work of an iteration costs, in µs per layer. No torch here.

A policy asks a `CostModel` about one layer at a time and puts the answers together with the
functions below: the time models of NEO (MLSys'25) and APEX (arXiv 2506.03296). The symbols are
theirs: T_l linear layers of a sub-batch (post- and pre-projection), T_ga attention on the GPU
(prefill attention included), T_ca decode attention on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from swiftapex.core.plan import Row
from swiftapex.core.request import Placement
from swiftapex.model.config import DTYPE_BYTES, ModelConfig

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


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a machine is. Bytes and flops per second; fixed costs in µs."""

    weight_bytes_per_s: float  # reading weights for few rows
    flops_per_s: float  # matrix products of many rows
    gpu_kv_bytes_per_s: float  # decode attention on the GPU side
    cpu_kv_bytes_per_s: float  # decode attention on the CPU side
    stage_us: float  # fixed cost of a stage or an attention call on the GPU side
    task_us: float  # fixed cost of a task on the CPU side, its signals included


_THREAD_BYTES_PER_S = 12e9  # one thread reading memory
_THREAD_FLOPS_PER_S = 40e9  # one thread multiplying float32 matrices
# H200 limited to 8 multiprocessors, llama2-7b, bfloat16, measured:
_SM_BYTES_PER_S = 875e9 / 8  # weights, one row
_SM_FLOPS_PER_S = 47e12 / 8  # linear layers of 2048 rows
_SM_KV_BYTES_PER_S = 1050e9 / 8  # paged decode attention
_GPU_BYTES_PER_S = 4.0e12  # a whole H200 reads weights at 3.8e12 to 4.1e12
_GPU_KV_BYTES_PER_S = 3.5e12
_GPU_SMS = 132
_HOST_BYTES_PER_S = 92e9  # decode attention on 15 threads of its host, beside the GPU: 86 to 95
_HOST_THREAD_BYTES_PER_S = 7e9
_BLEND = 1.6  # see AnalyticCostModel.linear_us


def default_rates(
    device: str, cpu_threads: int, gpu_threads: int = 1, sm_count: int | None = None
) -> Rates:
    """Rates for a machine that nobody has measured yet.

    `cpu_threads` attend for the CPU side; on the `cpu` device the GPU side runs on `gpu_threads`
    of the same machine. There both sides share one memory: what they read at the same time takes
    longer than this says, so that overlap looks better than it is.
    """
    if device != "cuda":
        gpu_read, cpu_read = gpu_threads * _THREAD_BYTES_PER_S, cpu_threads * _THREAD_BYTES_PER_S
        flops = gpu_threads * _THREAD_FLOPS_PER_S
        return Rates(gpu_read, flops, gpu_read, cpu_read, stage_us=20.0, task_us=30.0)
    sms = sm_count or _GPU_SMS
    read = min(sms * _SM_BYTES_PER_S, _GPU_BYTES_PER_S)
    kv = min(sms * _SM_KV_BYTES_PER_S, _GPU_KV_BYTES_PER_S)
    host = min(cpu_threads * _HOST_THREAD_BYTES_PER_S, _HOST_BYTES_PER_S)
    return Rates(read, sms * _SM_FLOPS_PER_S, kv, host, stage_us=5.0, task_us=30.0)


class AnalyticCostModel:
    """Closed forms over a model's shape: a smooth roofline for linear layers, bandwidth for decode
    attention, flops for prefill attention. For planning before anything has been measured."""

    def __init__(
        self, config: ModelConfig, rates: Rates, dtype: str, cpu_kv_dtype: str | None = None
    ) -> None:
        self.num_layers = config.num_layers
        self._rates = rates
        self._parameters = config.num_layer_parameters
        self._weight_bytes = config.num_layer_parameters * DTYPE_BYTES[dtype]
        layers = config.num_layers
        self._gpu_kv_bytes = config.kv_bytes_per_token(dtype) / layers
        self._cpu_kv_bytes = config.kv_bytes_per_token(cpu_kv_dtype or dtype) / layers
        self._attention_width = config.num_q_heads * config.head_dim

    def linear_us(self, rows: int) -> float:
        """Weight bytes / bandwidth and 2 parameters rows / flops, and two stages' fixed cost. The
        two times blend into one another, (a^1.6 + b^1.6)^(1/1.6): within 4 % of what was measured
        from 1 to 2048 rows (H200 with 8 multiprocessors, llama2-7b), where their maximum is short
        of it by a third at 64."""
        if rows <= 0:
            return 0.0
        read = self._weight_bytes / self._rates.weight_bytes_per_s
        multiply = 2 * self._parameters * rows / self._rates.flops_per_s
        blend: float = (read**_BLEND + multiply**_BLEND) ** (1 / _BLEND)
        return blend * 1e6 + 2 * self._rates.stage_us

    def gpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        """KV bytes / bandwidth, and a stage's fixed cost."""
        if tokens <= 0:
            return 0.0
        read = tokens * self._gpu_kv_bytes / self._rates.gpu_kv_bytes_per_s
        return read * 1e6 + self._rates.stage_us

    def prefill_attention_us(self, chunk: int, prefix: int) -> float:
        """Four flops (QK and PV) per head dimension, query and visible key; on average half of
        the chunk's own keys are visible."""
        if chunk <= 0:
            return 0.0
        flops = 4 * self._attention_width * chunk * (prefix + (chunk + 1) / 2)
        return flops / self._rates.flops_per_s * 1e6 + self._rates.stage_us

    def cpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        """KV bytes / bandwidth, and a task's fixed cost."""
        if tokens <= 0:
            return 0.0
        read = tokens * self._cpu_kv_bytes / self._rates.cpu_kv_bytes_per_s
        return read * 1e6 + self._rates.task_us

    def iteration_us(self, completing: int) -> float:
        """Nothing: next to the layers it is little."""
        return 0.0

    def hand_off_us(self, rows: int) -> float:
        """Nothing: `task_us` holds the signals."""
        return 0.0

    def layerwise_us(self, rows: int) -> float:
        """Nothing."""
        return 0.0

    def host_us(self, kind: str) -> float:
        """Nothing: the host is taken to keep up."""
        return 0.0

    def copy_us(self, tokens: int) -> float:
        """At the CPU side's memory bandwidth."""
        read = tokens * self._cpu_kv_bytes * self.num_layers
        return read / self._rates.cpu_kv_bytes_per_s * 1e6


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
        total = gpu = cpu = num_gpu = num_cpu = 0
        chunks = []
        for row in rows:
            total += row.num_tokens
            if not row.is_decode:
                chunks.append((row.num_tokens, row.start))
            elif row.placement is Placement.CPU:
                cpu += row.start + 1
                num_cpu += 1
            else:
                gpu += row.start + 1
                num_gpu += 1
        return Load(total, gpu, cpu, tuple(chunks), num_gpu, num_cpu)

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
