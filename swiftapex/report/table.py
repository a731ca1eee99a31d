"""The short table at the end of an experiment, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swiftapex.report.words import label, verdicts

_HEADER = (
    "run",
    "requests done",
    "output tokens/s",
    "first token after",
    "then a token every",
    "CPU share",
)
_NUMERIC = "0123456789+-."


def results_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """One line per run of `summary.json`, and what the columns mean."""
    lines = [text_table([_HEADER, *(_row(run) for run in runs)])]
    lines += [
        "",
        "Times are medians over the completed requests of a run. CPU share: decoded tokens whose",
        "attention ran on the CPU, over a KV cache in host memory.",
    ]
    sentences = verdicts(runs)
    return "\n".join([*lines, *([""] if sentences else []), *sentences])


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, numbers to the right; the first row a header with a line under it."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [all(cell[:1] in _NUMERIC for cell in column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = zip(row, widths, is_number, strict=True)
        padded = (cell.rjust(w) if right else cell.ljust(w) for cell, w, right in cells)
        lines.append("  ".join(padded).rstrip())
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
