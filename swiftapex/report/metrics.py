"""The numbers of `summary.json`, computed from what a run recorded. Definitions are printed too.

What cannot be measured is None (null in the file), never 0.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swiftapex.config.schema import GpuConfig, SloConfig, WindowConfig
from swiftapex.core.records import IterationRecord
from swiftapex.report import usage
from swiftapex.workloads.replay import RequestOutcome, RunLog

PIPELINE_NAMES = ("sequential", "asymmetric", "async_overlap", "symmetric")

DEFINITIONS: Mapping[str, str] = {
    "num_requests": "requests of the workload",
    "num_failed": "requests that ended with an error or were refused; excluded from all below",
    "num_truncated": "requests of which prompt or output was cut to max_model_len; null where that "
    "is not known",
    "num_unfinished": "requests still open when the window or the run was ended",
    "output_tokens": "output tokens of completed requests; with a window, all tokens in it",
    "duration_s": "from the first arrival to the last completion; with a window, its length. A "
    "window of the middle share m lasts from when N (1 - m) / 2 of the N requests that complete "
    "have done so until N (1 + m) / 2 have",
    "output_tokens_per_s": "output_tokens / duration_s",
    "requests_per_s": "completed requests / duration_s",
    "ttft_ms": "time from a request's arrival to its first token",
    "tpot_ms": "(e2e - ttft) / (output tokens - 1), for requests with at least 2 output tokens",
    "itl_ms": "inter-token latency: time from one token of a request to its next; over tokens of "
    "completed requests, with a window over all in it",
    "e2e_ms": "time from a request's arrival to its last token",
    "per_token_latency_ms": "e2e / output tokens, as the APEX paper divides it",
    "per_token_latency_neo_ms": "e2e / (input + output tokens), as the NEO paper defines it",
    "strategy_share": "share of iterations that each pipeline ran",
    "gpu_busy": "time in which the GPU side computed (layer math, attention) / wall time",
    "cpu_busy": "time in which the CPU side's threads computed attention / wall time; null without "
    "a CPU side",
    "cpu_token_share": "offload share: decodes with their KV on the CPU side / all decodes",
    "kv_use": "KV blocks that requests own / all blocks of that side: mean over time, and most",
    "kv_offload_share": "owned KV blocks of the CPU side / owned KV blocks, means over time",
    "pcie_gb_per_s": "bytes between GPU and host memory, both ways (queries, keys, values and "
    "results of CPU decodes; copies of KV), in 1e9 bytes per s of wall time; null without a GPU",
    "energy_j": "energy of the whole GPU (NVML) and of processors with their memory (RAPL) in the "
    "measured time, idle power included; null where this machine does not tell",
    "tokens_per_j": "output tokens / energy_j; both: over the sum, where both are known",
    "energy_comparable": "false where a part of a larger GPU stands for a small one: its energy is "
    "that of the larger one",
    "steady_balance": "of a window of seconds: prompts taken in against outputs given, (prefill "
    "tokens / all prompt tokens) / (output tokens / all output tokens asked for). 1 in a steady "
    "state; less where requests in progress were decoded at the cost of those that wait",
    "prediction_error_p50": "median of |predicted - measured| / measured time of an iteration",
    "slo_attainment": "share of completed requests within all limits of the workload's slo. Those "
    "that were in progress when the run began are not judged; null where that leaves none",
    "goodput_requests_per_s": "completed requests per s that are within all limits of the slo. "
    "Those that were in progress when the run began do not count; null where all of them were",
    "outputs_sha256": "SHA-256 over the output ids of all requests in order, each id as 4 bytes "
    "(little-endian), -1 after each request: equal hashes mean equal tokens",
    "mean, p50, p90, p99": "over completed requests (with a window: completed in it) that were not "
    "in progress when the run began; percentiles interpolate linearly between neighbours",
}


def summarize(
    log: RunLog,
    window: WindowConfig | None = None,
    slo: SloConfig | None = None,
    blocks: tuple[int, int] | None = None,
    gpu: GpuConfig | None = None,
) -> dict[str, Any]:
    """The measured fields of one run, in the order of `DEFINITIONS`. `blocks`: KV blocks of the GPU
    and of the CPU side; `gpu`: the caps that it ran under."""
    completed = [outcome for outcome in log.outcomes if outcome.completed]
    iterations: Sequence[IterationRecord] = log.iterations
    span = None if window is None else window_span(log, window)
    if span is not None:
        completed = [o for o in completed if span[0] <= o.token_times_s[-1] < span[1]]
        iterations = [i for i in iterations if span[0] <= i.start_s - log.start_s < span[1]]
    tokens, duration = _tokens_and_duration(log, completed, span)
    unfinished = any(not o.completed and not o.failed for o in log.outcomes)
    unknown = any(o.completed and not o.output_ids for o in log.outcomes)
    rate = _ratio(tokens, duration)
    requests_per_s = _ratio(len(completed), duration)
    return {
        "num_requests": len(log.outcomes),
        "num_failed": sum(outcome.failed for outcome in log.outcomes),
        "num_truncated": _num_truncated(log.outcomes),
        "num_unfinished": sum(not o.completed and not o.failed for o in log.outcomes),
        "output_tokens": tokens,
        "duration_s": duration,
        "output_tokens_per_s": rate,
        "requests_per_s": requests_per_s,
        **_latencies(completed),
        "itl_ms": statistics(_gaps_ms(log, completed, span)),
        "strategy_share": strategy_share(iterations),
        **usage.busy_shares(log.busy),
        "cpu_token_share": cpu_token_share(iterations),
        "kv_use": usage.kv_use(iterations, blocks),
        "kv_offload_share": usage.kv_offload_share(iterations, blocks),
        "pcie_gb_per_s": usage.pcie_gb_per_s(log.busy),
        **usage.energy(log.busy, gpu, rate),
        "steady_balance": usage.steady_balance(log.outcomes, iterations, tokens)
        if window is not None and window.measure_s is not None
        else None,
        "prediction_error_p50": prediction_error(iterations),
        "slo_attainment": None if slo is None else _slo_attainment(completed, slo),
        "goodput_requests_per_s": None if slo is None else _goodput(completed, slo, duration),
        "outputs_sha256": None if unfinished or unknown else outputs_sha256(log.outcomes),
    }


def window_span(log: RunLog, window: WindowConfig) -> tuple[float, float]:
    """When the window begins and ends, in seconds since the first arrival: begin <= t < end."""
    if window.measure_s is not None:
        return window.warmup_s, window.warmup_s + window.measure_s
    ends = sorted(o.token_times_s[-1] for o in log.outcomes if o.completed)
    first, last = window.middle_requests(len(ends))
    # What ended with the last request before the window is not in it, its own last token is.
    begin, end = (math.nextafter(ends[n - 1], math.inf) if n else 0.0 for n in (first, last))
    return begin, end


def ttft_ms(outcome: RequestOutcome) -> float | None:
    """None without a first token in the run: there is none yet, or it came before the run."""
    if outcome.progress or not outcome.token_times_s:
        return None
    return (outcome.token_times_s[0] - outcome.arrival_s) * 1e3


def e2e_ms(outcome: RequestOutcome) -> float | None:
    """None for what has not completed, or was in progress when the run began."""
    if outcome.progress or not outcome.completed:
        return None
    return (outcome.token_times_s[-1] - outcome.arrival_s) * 1e3


def tpot_ms(outcome: RequestOutcome) -> float | None:
    """Over the tokens of the run; None for fewer than two of them."""
    times = outcome.token_times_s
    return (times[-1] - times[0]) * 1e3 / (len(times) - 1) if len(times) >= 2 else None


def field(summary: Mapping[str, Any], name: str) -> float | None:
    """The field `name` (`ttft_ms.p50`) of a run's summary; None where it was not measured."""
    found: Any = summary
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


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
    log: RunLog, completed: Sequence[RequestOutcome], span: tuple[float, float] | None
) -> tuple[int, float | None]:
    if span is None:
        tokens = sum(len(outcome.token_times_s) for outcome in completed)
        first = min((outcome.arrival_s for outcome in log.outcomes), default=0.0)
        last = max((outcome.token_times_s[-1] for outcome in completed), default=None)
        return tokens, None if last is None else last - first
    begin, end = span
    times = [t for o in log.outcomes if not o.failed for t in o.token_times_s if begin <= t < end]
    # A run that ended inside its window is measured up to its last token.
    still_open = any(not o.completed and not o.failed for o in log.outcomes)
    finish = end if still_open and not log.interrupted else max(times, default=begin)
    return len(times), finish - begin if finish > begin else None


def _num_truncated(outcomes: Sequence[RequestOutcome]) -> int | None:
    known = [outcome.truncated for outcome in outcomes]
    return None if None in known else known.count(True)


def _gaps_ms(
    log: RunLog, completed: Sequence[RequestOutcome], span: tuple[float, float] | None
) -> list[float]:
    """Between consecutive tokens; those whose later token is in the span, if there is one."""
    counted = completed if span is None else [o for o in log.outcomes if not o.failed]
    begin, end = (-math.inf, math.inf) if span is None else span
    return [
        (later - sooner) * 1e3
        for outcome in counted
        for sooner, later in itertools.pairwise(outcome.token_times_s)
        if begin <= later < end
    ]


def _latencies(outcomes: Sequence[RequestOutcome]) -> dict[str, dict[str, float | None]]:
    completed = _whole(outcomes)
    per_token = [_over(e2e_ms(o), o.num_output) for o in completed]
    per_token_neo = [_over(e2e_ms(o), o.prompt_len + o.num_output) for o in completed]
    return {
        "ttft_ms": statistics(map(ttft_ms, completed)),
        "tpot_ms": statistics(map(tpot_ms, completed)),
        "e2e_ms": statistics(map(e2e_ms, completed)),
        "per_token_latency_ms": statistics(per_token),
        "per_token_latency_neo_ms": statistics(per_token_neo),
    }


def _whole(outcomes: Sequence[RequestOutcome]) -> list[RequestOutcome]:
    """Those that were not in progress when the run began."""
    return [outcome for outcome in outcomes if outcome.progress == 0]


def _keeps(outcome: RequestOutcome, slo: SloConfig) -> bool:
    """A latency that the outcome does not have breaks no limit."""
    pairs = (ttft_ms(outcome), slo.ttft_ms), (tpot_ms(outcome), slo.tpot_ms)
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


def _slo_attainment(completed: Sequence[RequestOutcome], slo: SloConfig) -> float | None:
    whole = _whole(completed)
    return _ratio(sum(_keeps(outcome, slo) for outcome in whole), len(whole))


def _goodput(
    completed: Sequence[RequestOutcome], slo: SloConfig, duration: float | None
) -> float | None:
    whole = _whole(completed)
    if completed and not whole:
        return None
    return _ratio(sum(_keeps(outcome, slo) for outcome in whole), duration)


def _over(part: float | None, count: int) -> float | None:
    return None if part is None else part / count


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None
