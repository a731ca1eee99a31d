"""The numbers of `summary.json`, computed from what a run recorded. Definitions are printed too.

What cannot be measured is None (null in the file), never 0.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swiftapex.config.schema import SloConfig, WindowConfig
from swiftapex.core.records import IterationRecord
from swiftapex.workloads.replay import BusySpan, RequestOutcome, RunLog

PIPELINE_NAMES = ("sequential", "asymmetric", "async_overlap", "symmetric")

DEFINITIONS: Mapping[str, str] = {
    "num_requests": "requests of the workload",
    "num_failed": "requests that ended with an error or were refused; excluded from all below",
    "num_unfinished": "requests still open when the window or the run was ended",
    "output_tokens": "output tokens of completed requests; with a window, all tokens in it",
    "duration_s": "from the first arrival to the last completion; with a window, its length",
    "output_tokens_per_s": "output_tokens / duration_s",
    "requests_per_s": "completed requests / duration_s",
    "ttft_ms": "time from a request's arrival to its first token",
    "tpot_ms": "(e2e - ttft) / (output tokens - 1), for requests with at least 2 output tokens",
    "e2e_ms": "time from a request's arrival to its last token",
    "per_token_latency_ms": "e2e / output tokens",
    "per_token_latency_neo_ms": "e2e / (input + output tokens), as the NEO paper defines it",
    "strategy_share": "share of iterations that each pipeline ran",
    "gpu_busy": "time in which the GPU side computed (layer math, attention) / wall time",
    "cpu_busy": "time in which the CPU side's threads computed attention / wall time; null without "
    "a CPU side",
    "cpu_token_share": "decodes with their KV on the CPU side / all decodes",
    "prediction_error_p50": "median of |predicted - measured| / measured time of an iteration",
    "slo_attainment": "share of completed requests within all limits of the workload's slo",
    "outputs_sha256": "SHA-256 over the output ids of all requests in order, each id as 4 bytes "
    "(little-endian), -1 after each request: equal hashes mean equal tokens",
    "mean, p50, p90, p99": "over completed requests (with a window: completed in it) that were not "
    "in progress when the run began; percentiles interpolate linearly between neighbours",
}


def summarize(
    log: RunLog, window: WindowConfig | None = None, slo: SloConfig | None = None
) -> dict[str, Any]:
    """The measured fields of one run, in the order of `DEFINITIONS`."""
    completed = [outcome for outcome in log.outcomes if outcome.completed]
    iterations: Sequence[IterationRecord] = log.iterations
    if window is not None:
        begin, end = window.warmup_s, window.warmup_s + window.measure_s
        completed = [o for o in completed if begin <= o.token_times_s[-1] < end]
        iterations = [i for i in iterations if begin <= i.start_s - log.start_s < end]
    tokens, duration = _tokens_and_duration(log, completed, window)
    unfinished = any(not o.completed and not o.failed for o in log.outcomes)
    return {
        "num_requests": len(log.outcomes),
        "num_failed": sum(outcome.failed for outcome in log.outcomes),
        "num_unfinished": sum(not o.completed and not o.failed for o in log.outcomes),
        "output_tokens": tokens,
        "duration_s": duration,
        "output_tokens_per_s": _ratio(tokens, duration),
        "requests_per_s": _ratio(len(completed), duration),
        **_latencies(completed),
        "strategy_share": strategy_share(iterations),
        **busy_shares(log.busy),
        "cpu_token_share": cpu_token_share(iterations),
        "prediction_error_p50": prediction_error(iterations),
        "slo_attainment": None if slo is None else _slo_attainment(completed, slo),
        "outputs_sha256": None if unfinished else outputs_sha256(log.outcomes),
    }


def ttft_ms(outcome: RequestOutcome) -> float:
    """Of an outcome with at least one token."""
    return (outcome.token_times_s[0] - outcome.arrival_s) * 1e3


def e2e_ms(outcome: RequestOutcome) -> float:
    """Of an outcome with at least one token."""
    return (outcome.token_times_s[-1] - outcome.arrival_s) * 1e3


def tpot_ms(outcome: RequestOutcome) -> float | None:
    """None for fewer than two tokens."""
    count = len(outcome.output_ids)
    return (e2e_ms(outcome) - ttft_ms(outcome)) / (count - 1) if count >= 2 else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the nearest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def statistics(values: Iterable[float | None]) -> dict[str, float | None]:
    """Mean and percentiles of the values that are there."""
    present = [value for value in values if value is not None]
    mean = sum(present) / len(present) if present else None
    return {"mean": mean} | {f"p{p}": percentile(present, p) for p in (50, 90, 99)}


def busy_shares(span: BusySpan | None) -> dict[str, float | None]:
    """Shares of a run's time in which its sides computed; None for a side not measured."""
    if span is None:
        return {"gpu_busy": None, "cpu_busy": None}

    def share(begin_s: float | None, end_s: float | None) -> float | None:
        if begin_s is None or end_s is None:
            return None
        return _ratio(end_s - begin_s, span.end_s - span.begin_s)

    return {
        "gpu_busy": share(span.begin.gpu_s, span.end.gpu_s),
        "cpu_busy": share(span.begin.cpu_s, span.end.cpu_s),
    }


def strategy_share(iterations: Sequence[IterationRecord]) -> dict[str, float] | None:
    """Share of iterations per pipeline; None without iterations."""
    if not iterations:
        return None
    names = dict.fromkeys((*PIPELINE_NAMES, *(i.pipeline for i in iterations)))
    ran = [iteration.pipeline for iteration in iterations]
    return {name: ran.count(name) / len(ran) for name in names}


def cpu_token_share(iterations: Sequence[IterationRecord]) -> float | None:
    """Share of decodes whose KV lies on the CPU side; None without decodes."""
    cpu = sum(iteration.cpu_decodes for iteration in iterations)
    gpu = sum(iteration.gpu_decodes for iteration in iterations)
    return _ratio(cpu, cpu + gpu)


def prediction_error(iterations: Sequence[IterationRecord]) -> float | None:
    """Median relative error of predicted iteration times; None where none was predicted."""
    errors = [
        abs(iteration.predicted_us - iteration.duration_us) / iteration.duration_us
        for iteration in iterations
        if iteration.predicted_us is not None and iteration.duration_us > 0
    ]
    return percentile(errors, 50)


def outputs_sha256(outcomes: Iterable[RequestOutcome]) -> str:
    """Hash of all output ids, in order of requests, as `DEFINITIONS` says."""
    digest = hashlib.sha256()
    for outcome in outcomes:
        ids = (*outcome.output_ids, -1)
        digest.update(struct.pack(f"<{len(ids)}i", *ids))
    return digest.hexdigest()


def _tokens_and_duration(
    log: RunLog, completed: Sequence[RequestOutcome], window: WindowConfig | None
) -> tuple[int, float | None]:
    if window is None:
        tokens = sum(len(outcome.token_times_s) for outcome in completed)
        first = min((outcome.arrival_s for outcome in log.outcomes), default=0.0)
        last = max((outcome.token_times_s[-1] for outcome in completed), default=None)
        return tokens, None if last is None else last - first
    begin, end = window.warmup_s, window.warmup_s + window.measure_s
    times = [t for o in log.outcomes if not o.failed for t in o.token_times_s if begin <= t < end]
    # A run that ended inside its window is measured up to its last token.
    still_open = any(not o.completed and not o.failed for o in log.outcomes)
    finish = end if still_open and not log.interrupted else max(times, default=begin)
    return len(times), finish - begin if finish > begin else None


def _latencies(outcomes: Sequence[RequestOutcome]) -> dict[str, dict[str, float | None]]:
    completed = [outcome for outcome in outcomes if outcome.progress == 0]
    per_token = [e2e_ms(o) / len(o.output_ids) for o in completed]
    per_token_neo = [e2e_ms(o) / (o.prompt_len + len(o.output_ids)) for o in completed]
    return {
        "ttft_ms": statistics(map(ttft_ms, completed)),
        "tpot_ms": statistics(map(tpot_ms, completed)),
        "e2e_ms": statistics(map(e2e_ms, completed)),
        "per_token_latency_ms": statistics(per_token),
        "per_token_latency_neo_ms": statistics(per_token_neo),
    }


def _slo_attainment(completed: Sequence[RequestOutcome], slo: SloConfig) -> float | None:
    def keeps(outcome: RequestOutcome) -> bool:
        tpot = tpot_ms(outcome)
        in_ttft = slo.ttft_ms is None or ttft_ms(outcome) <= slo.ttft_ms
        return in_ttft and (slo.tpot_ms is None or tpot is None or tpot <= slo.tpot_ms)

    whole = [outcome for outcome in completed if outcome.progress == 0]
    return _ratio(sum(map(keeps, whole)), len(whole))


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None
