"""The cost model of an engine that nobody has measured yet."""

from __future__ import annotations

from dataclasses import replace

from swiftapex.backends.threads import cpu_threads, split_threads
from swiftapex.config.schema import EngineConfig
from swiftapex.cost_model import AnalyticCostModel, CostModel, default_rates
from swiftapex.model.config import ModelConfig
from swiftapex.model.shard import Shard


def default_cost_model(
    config: ModelConfig, dtype: str, cpu_kv_dtype: str, engine: EngineConfig, uses_cpu: bool
) -> CostModel:
    """Closed forms at the default rates of the engine's device and threads: what a rank computes,
    at its part of the host's rates. What ranks tell each other costs nothing here."""
    ranks = engine.tensor_parallel_size
    threads = cpu_threads(engine.cpu.threads).count
    gpu_side = cpu_side = threads
    if uses_cpu and engine.device != "cuda":
        gpu_plan, cpu_plan = split_threads(engine.cpu.threads)
        gpu_side, cpu_side = gpu_plan.count, cpu_plan.count
    gpu_threads = max(1, gpu_side // ranks)
    rates = default_rates(engine.device, cpu_side, gpu_threads, engine.gpu.sm_count)
    rates = replace(rates, cpu_kv_bytes_per_s=rates.cpu_kv_bytes_per_s / ranks)
    return AnalyticCostModel(Shard(0, ranks).config(config), rates, dtype, cpu_kv_dtype)
