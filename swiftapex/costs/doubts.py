"""Which times of a profile noise has spoilt. They are differences of measured iterations, and what
the machine did meanwhile can eat a difference up: it was kept as 0. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from swiftapex.core.errors import some_of
from swiftapex.costs.tables import Grid, Line, Tables

REMEDY = "measure it anew while the machine is idle: python -m swiftapex.profile EXP.yaml --redo"
_MOST_POINTS = 3  # that a sentence names


def doubts(tables: Tables) -> list[str]:
    """A sentence per stage with times that fell to 0 or below where they cannot have: at any point
    of what always takes time; elsewhere where less work took some, or at the most work of its kind
    (attention over a few tokens may well cost nothing beside the call itself)."""
    stages = [
        ("linear stages", len(tables.linear.xs), _spoilt(tables.linear, "rows", always=True)),
        ("an iteration besides its layers", len(tables.iteration.xs),
         _spoilt(tables.iteration, "completing rows", always=True)),
        ("GPU decode attention", _count(tables.gpu_attention),
         _spoilt_grid(tables.gpu_attention, "requests", "tokens")),
        ("prefill attention", _count(tables.prefill_attention),
         _spoilt_grid(tables.prefill_attention, "tokens", "before them")),
        ("CPU decode attention", _count(tables.cpu_attention),
         _spoilt_grid(tables.cpu_attention, "requests", "tokens")),
        ("hand-offs", len(tables.hand_off.xs), _spoilt(tables.hand_off, "rows")),
        ("layers launched by themselves", len(tables.layerwise.xs),
         _spoilt(tables.layerwise, "rows")),
        ("copies between the sides", len(tables.copy.xs),
         _spoilt(tables.copy, "tokens", always=True)),
    ]  # fmt: skip
    return [_sentence(name, count, points) for name, count, points in stages if points]


def _sentence(name: str, count: int, points: Sequence[str]) -> str:
    if len(points) == count:
        return f"{name}: no time was left at any of {count} points: this counts as nothing"
    shown = some_of(points, _MOST_POINTS, "; ")
    return (
        f"{name}: no time was left at {len(points)} of {count} points ({shown}): what is "
        "read there comes from the points beside them"
    )


def _spoilt(line: Line, unit: str, always: bool = False) -> list[str]:
    found, seen = [], always
    for x, us in zip(line.xs, line.us, strict=True):
        if us <= 0 and seen:
            found.append(f"{x:g} {unit}")
        seen = seen or us > 0
    return found


def _spoilt_grid(grid: Grid, across: str, along: str) -> list[str]:
    found = []
    lit = [False] * len(grid.ys)  # whether so much along, or less, took time in a row so far
    for x, row in zip(grid.xs, grid.us, strict=True):
        last = max(j for j, us in enumerate(row) if us is not None)
        seen = False
        for j, (y, us) in enumerate(zip(grid.ys, row, strict=True)):
            seen = seen or lit[j] or (us is not None and us > 0)
            lit[j] = seen
            if us is not None and us <= 0 and (seen or j == last):
                found.append(f"{x:g} {across}, {y:g} {along}")
    return found


def _count(grid: Grid) -> int:
    return sum(us is not None for row in grid.us for us in row)
