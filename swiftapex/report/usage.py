"""What a run used: both sides' time and KV, the link between them, energy. None: not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftapex.config.schema import GpuConfig
from swiftapex.core.records import IterationRecord
from swiftapex.workloads.energy import EnergyUse
from swiftapex.workloads.meter import BusySpan
from swiftapex.workloads.replay import RequestOutcome

_GB = 1e9


def busy_shares(span: BusySpan | None) -> dict[str, float | None]:
    """Shares of a run's time in which its sides computed."""
    if span is None:
        return {"gpu_busy": None, "cpu_busy": None}
    return {
        "gpu_busy": _rate(span, span.begin.gpu_s, span.end.gpu_s),
        "cpu_busy": _rate(span, span.begin.cpu_s, span.end.cpu_s),
    }


def pcie_gb_per_s(span: BusySpan | None) -> float | None:
    """Bytes between a GPU's memory and the host's, both ways, in 1e9 bytes per second."""
    if span is None:
        return None
    rate = _rate(span, span.begin.link_bytes, span.end.link_bytes)
    return None if rate is None else rate / _GB


def kv_use(
    iterations: Sequence[IterationRecord], blocks: tuple[int, int] | None
) -> dict[str, dict[str, float | None]]:
    """Share of each side's KV blocks that are owned. `blocks`: how many the sides have."""
    use: dict[str, dict[str, float | None]] = {}
    for index, side in enumerate(("gpu", "cpu")):
        total = 0 if blocks is None else blocks[index]
        used = _owned(iterations, side, total) if total else []
        mean, most = _weighted(used), max((count for _, count in used), default=None)
        use[side] = {
            "mean": None if mean is None else mean / total,
            "max": None if most is None else most / total,
        }
    return use


def kv_offload_share(
    iterations: Sequence[IterationRecord], blocks: tuple[int, int] | None
) -> float | None:
    """Part of the owned KV blocks that lies on the CPU side, over time."""
    if blocks is None:
        return None
    gpu, cpu = (
        _weighted(_owned(iterations, side, total))
        for side, total in zip(("gpu", "cpu"), blocks, strict=True)
    )
    return None if gpu is None or cpu is None or gpu + cpu == 0 else cpu / (gpu + cpu)


def energy(span: BusySpan | None, gpu: GpuConfig | None, tokens_per_s: float | None) -> Any:
    """Joules, and output tokens per joule at the rate of the run, by side and for both together.
    `comparable`: False where a part of a larger GPU stands for a small one: the rest of it idles,
    at the cost of the whole."""
    used = EnergyUse(None, None) if span is None else span.energy
    both = None if used.gpu_j is None or used.cpu_j is None else used.gpu_j + used.cpu_j
    joules = {"gpu": used.gpu_j, "cpu": used.cpu_j}
    tokens = None
    if span is not None and tokens_per_s is not None:
        tokens = tokens_per_s * (span.end_s - span.begin_s)
    is_known = any(joule is not None for joule in joules.values())
    emulated = gpu is not None and (gpu.sm_count is not None or gpu.memory is not None)
    return {
        "energy_j": joules,
        "tokens_per_j": {
            side: tokens / joule if tokens is not None and joule else None
            for side, joule in (joules | {"both": both}).items()
        },
        "energy_comparable": not emulated if is_known else None,
    }


def steady_balance(
    outcomes: Sequence[RequestOutcome], iterations: Sequence[IterationRecord], tokens: int
) -> float | None:
    """Prompts that were prefilled for each output that was generated, both in whole requests."""
    asked = [outcome.max_tokens for outcome in outcomes]
    prompts = sum(outcome.prompt_len for outcome in outcomes)
    prefilled = sum(record.prefill_tokens for record in iterations)
    if not iterations or not tokens or not prompts or None in asked:
        return None
    return (prefilled / prompts) / (tokens / sum(count or 0 for count in asked))


def _owned(
    iterations: Sequence[IterationRecord], side: str, total: int
) -> list[tuple[float, float]]:
    """Iterations' times, and the blocks of a side that were owned in them."""
    return [(r.duration_us, total - getattr(r, f"{side}_blocks_free")) for r in iterations]


def _weighted(values: Sequence[tuple[float, float]]) -> float | None:
    """Mean of (weight, value) pairs."""
    weights = sum(weight for weight, _ in values)
    return sum(weight * value for weight, value in values) / weights if weights else None


def _rate(span: BusySpan, begin: float | None, end: float | None) -> float | None:
    seconds = span.end_s - span.begin_s
    return None if begin is None or end is None or seconds <= 0 else (end - begin) / seconds
