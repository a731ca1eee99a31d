"""What happened in the runs, in sentences for someone who sees a report for the first time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swiftapex.core.records import IterationRecord

_PIPELINES = {
    "sequential": "sequentially",
    "asymmetric": "with asymmetric pipelining",
    "async_overlap": "with asynchronous overlap",
    "symmetric": "with symmetric pipelining",
}


def label(run: Mapping[str, Any]) -> str:
    """A run's name with its swept values."""
    values = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in run["sweep"].items())
    return f"{run['name']} ({values})" if values else str(run["name"])


def what_happened(iterations: Sequence[IterationRecord]) -> str:
    """Which pipelines ran, which decodes the CPU took, and who had to move."""
    if not iterations:
        return "No iteration ran."
    ran = Counter(record.pipeline for record in iterations)
    if len(ran) == 1:
        which = f"{counted(len(iterations), 'iteration')} ran {_pipeline(*ran)}"
    else:
        counts = [f"{count:,} ran {_pipeline(name)}" for name, count in ran.most_common()]
        which = f"Of {counted(len(iterations), 'iteration')}, {_and(counts)}"
    on_cpu = sum(record.cpu_decodes for record in iterations)
    decodes = on_cpu + sum(record.gpu_decodes for record in iterations)
    moves = sum(record.moves for record in iterations)
    preemptions = sum(record.preemptions for record in iterations)
    return (
        f"{which}; {on_cpu:,} of {counted(decodes, 'decoded token')} "
        f"had their attention on the CPU; {_events(moves, 'moved between the sides')}, "
        f"{_events(preemptions, 'preempted')}."
    )


def fastest(runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Which run generated the most tokens per second; None where there is nothing to compare."""
    rated = [run for run in runs if run["output_tokens_per_s"]]
    if len(rated) < 2:
        return None
    first, *others = sorted(rated, key=lambda run: run["output_tokens_per_s"], reverse=True)
    ratios = ", ".join(
        f"{first['output_tokens_per_s'] / run['output_tokens_per_s']:.2f} times {label(run)}"
        for run in others
    )
    rate = f"{first['output_tokens_per_s']:.1f} output tokens/s"
    few = f": {ratios}" if len(others) <= 4 else ""
    return f"Fastest: {label(first)} with {rate}{few}."


def same_outputs(runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Whether runs of the same requests generated the same tokens; None where it says nothing."""
    hashes = {run["outputs_sha256"] for run in runs}
    if len(runs) < 2 or None in hashes or any(run["sweep"] for run in runs):
        return None
    if len(hashes) == 1:
        return f"All {len(runs)} runs generated the same tokens."
    return "The runs did not all generate the same tokens (outputs_sha256 in summary.json)."


def counted(count: int, noun: str) -> str:
    """A number and its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _pipeline(name: str) -> str:
    return _PIPELINES.get(name, f"with {name}")


def _events(count: int, what: str) -> str:
    if count == 0:
        return f"no request was {what}"
    return f"requests were {what} {'once' if count == 1 else f'{count:,} times'}"


def _and(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
