"""The cost model for a machine that nobody has measured: closed forms, default rates. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from swiftapex.model.config import DTYPE_BYTES, ModelConfig


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
