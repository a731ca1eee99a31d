"""What someone must know of a run before reading its numbers, beside what its engine notes."""

from __future__ import annotations

from swiftapex.config.schema import WindowConfig
from swiftapex.report.files import RunResult
from swiftapex.report.words import counted

_MUCH = 0.2  # of the CPUs' time


def warnings(result: RunResult) -> list[str]:
    """Sentences about a run whose window holds nothing, whose requests were cut, or beside which
    other processes worked."""
    summary, window = result.summary(), result.plan.workload.window
    found = []
    if window is not None and not summary["output_tokens"]:
        found.append(f"Nothing was measured: {_why_empty(result, window)}.")
    if summary["num_truncated"]:
        found.append(_truncated(summary["num_truncated"], summary["num_requests"]))
    others = _others(result)
    if others > _MUCH:
        found.append(
            f"Other processes took {others:.0%} of the CPUs' time meanwhile: a run on an idle "
            "machine takes less, and runs that were disturbed differently cannot be compared."
        )
    return found


def _why_empty(result: RunResult, window: WindowConfig) -> str:
    outcomes = result.log.outcomes
    if window.middle is not None:
        completed = sum(outcome.completed for outcome in outcomes)
        return (
            f"the middle {window.middle:g} of {counted(completed, 'completed request')} holds "
            "none; it needs a larger workload.num_requests or workload.window.middle"
        )
    last_s = max((o.token_times_s[-1] for o in outcomes if o.token_times_s), default=None)
    began = f"the window began at {window.warmup_s:g} s (workload.window.warmup_s)"
    if last_s is None:
        return f"{began}, and no token came before it ended; it needs a larger measure_s"
    if last_s < window.warmup_s:
        return (
            f"{began}, and the last token came at {last_s:.3g} s; it needs a smaller warmup_s, or "
            "a larger workload.num_requests"
        )
    return f"{began} and no token came in its {window.measure_s:g} s; it needs a larger measure_s"


def _others(result: RunResult) -> float:
    """What is not known, as whose work that of ranks and of other engines is, counts as nothing."""
    plan, span = result.plan, result.log.busy
    if span is None or plan.peer is not None or plan.engine.tensor_parallel_size > 1:
        return 0.0
    return span.others or 0.0


def _truncated(count: int, num_requests: int) -> str:
    were = "was" if count == 1 else "were"
    return (
        f"{count:,} of {counted(num_requests, 'request')} {were} cut to max_model_len "
        "(over_length: truncate)."
    )
