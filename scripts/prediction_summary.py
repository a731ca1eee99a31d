"""What scripts/bench_prediction.py makes of its runs: errors of predictions, cells, the summary."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftapex.core.records import IterationRecord
from swiftapex.core.request import Request

GPU_ONLY = "gpu_only"
FORCED = {  # strategy -> its pipeline
    GPU_ONLY: "sequential",
    "fixed:asymmetric": "asymmetric",
    "fixed:async_overlap": "async_overlap",
}
GOOD = 0.98  # of the fastest


def tokens_between(request: Request, begin: float, end: float, start: float | None) -> float:
    """Tokens that a request gained from `begin` to `end`, in part where they took longer. `start`:
    when the first one was begun; None: it counts where it came, behind a prompt. The one under way
    at the end takes as long as the last one."""
    total, previous, gap = 0.0, start, 0.0
    for now in request.token_times_s:
        if previous is None:
            total += begin <= now < end
        elif now > previous:
            gap = now - previous
            total += max(0.0, min(now, end) - max(previous, begin)) / gap
        previous = now
    if request.finish_reason is None and gap and previous is not None:
        done = [min(1.0, max(0.0, now - previous) / gap) for now in (begin, end)]
        total += done[1] - done[0]
    return total


def errors(records: Iterable[IterationRecord]) -> list[float]:
    """|predicted - measured| / measured, in order of size."""
    return sorted(
        abs(r.predicted_us - r.duration_us) / r.duration_us for r in records if r.predicted_us
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)


def by_pipeline(records: list[IterationRecord]) -> dict[str, Any]:
    """With and without chunks."""
    kinds: dict[str, list[IterationRecord]] = {}
    for record in records:
        if record.predicted_us:
            kind = record.pipeline + (" + prefill" if record.prefill_tokens else "")
            kinds.setdefault(kind, []).append(record)
    return {
        kind: {
            "iterations": len(mine),
            "ms": round(1e-3 * statistics.median(r.duration_us for r in mine), 3),
            "predicted_ms": round(1e-3 * statistics.median(r.predicted_us or 0 for r in mine), 3),
            "error_p50": quantile(errors(mine), 0.5),
            "error_p90": quantile(errors(mine), 0.9),
            "schedule_share": round(
                statistics.median(r.schedule_us / r.duration_us for r in mine), 5
            ),
        }
        for kind, mine in kinds.items()
    }


@dataclass
class Found:
    """What there is so far: errors by strategy and kind of cell, and a line per cell."""

    errors: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)

    def summary(self, planned: int) -> dict[str, Any]:
        """`good_picks`: the share of cells whose picked strategy is within 2 % of the fastest
        forced one. `misses`: the others, but for those where the policy itself is, since it may mix
        strategies from one iteration to the next. `good_cells`: the share without them.
        """
        pooled: dict[str, list[float]] = {}
        for (strategy, kind), some in self.errors.items():
            for name in ("all", strategy, f"{strategy}, {kind}"):
                pooled.setdefault(name, []).extend(some)
        judged = [cell for cell in self.cells if "picked_over_fastest" in cell]
        others = [cell for cell in judged if cell["picked_over_fastest"] < GOOD]
        misses = [cell for cell in others if cell["policy_over_fastest"] < GOOD]
        return {
            "prediction_error": {
                name: {
                    "iterations": len(found),
                    "p50": quantile(sorted(found), 0.5),
                    "p90": quantile(sorted(found), 0.9),
                }
                for name, found in sorted(pooled.items())
                if found
            },
            "cells": len(judged),
            "cells_left_out": planned - len(judged),
            "good_picks": round(1 - len(others) / len(judged), 4) if judged else None,
            "good_cells": round(1 - len(misses) / len(judged), 4) if judged else None,
            "misses": misses,
        }


def judge(
    rates: dict[str, float], policy: str, records: Sequence[IterationRecord]
) -> dict[str, Any]:
    """`rates`: strategy -> tokens per second, the policy's own included; `records`: its."""
    forced = {name: rate for name, rate in rates.items() if name != policy}
    fastest = max(forced, key=lambda name: forced[name])
    share = {
        name: sum(r.duration_us for r in records if r.pipeline == pipeline)
        for name, pipeline in FORCED.items()
    }
    picked = max(share, key=lambda name: share[name])
    return {
        "fastest": fastest,
        "picked": picked,
        "picked_over_fastest": round(forced.get(picked, rates[policy]) / forced[fastest], 4),
        "policy_over_fastest": round(rates[policy] / forced[fastest], 4),
    }
