"""The short table at the end of an experiment, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swiftapex.report.words import fastest, label, same_outputs

_HEADER = (
    "run",
    "requests done",
    "output tokens/s",
    "first token after",
    "then a token every",
    "CPU share",
)


def results_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """One line per run of `summary.json`, and what the columns mean."""
    lines = [text_table([_HEADER, *(_row(run) for run in runs)])]
    lines += [
        "",
        "Times are medians over the completed requests of a run. CPU share: decoded tokens whose",
        "attention ran on the CPU, over a KV cache in host memory.",
    ]
    verdicts = [sentence for sentence in (fastest(runs), same_outputs(runs)) if sentence]
    return "\n".join([*lines, *([""] if verdicts else []), *verdicts])


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first row a header with a line under it."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def duration(milliseconds: float | None) -> str:
    """A time as a person writes it."""
    if milliseconds is None:
        return "-"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    return f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    done = run["num_requests"] - run["num_failed"] - run["num_unfinished"]
    note = f", {run['num_failed']} failed" if run["num_failed"] else ""
    rate, share = run["output_tokens_per_s"], run["cpu_token_share"]
    return (
        label(run),
        f"{done} of {run['num_requests']}{note}",
        "-" if rate is None else f"{rate:.1f}",
        duration(run["ttft_ms"]["p50"]),
        duration(run["tpot_ms"]["p50"]),
        "-" if share is None else f"{share:.0%}",
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The first column to the left, numbers to the right."""
    first, *rest = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
