"""For which numbers of rows passes are recorded. No torch."""

from __future__ import annotations


def padded_rows(rows: int) -> int:
    """Rows of the graph that serves `rows`: 1, 2, 4, 8, 12 .. 32, 40, 48 .. 64, 80, 96 .."""
    if rows <= 2:
        return rows
    step = 4 if rows <= 32 else 8 if rows <= 64 else 16
    return -(-rows // step) * step


def recorded_rows(most: int) -> list[int]:
    """Numbers of decodes that have every graph recorded which up to `most` decodes need."""
    return sorted({min(padded_rows(rows), most) for rows in range(1, most + 1)})
