"""For which numbers of rows passes are recorded. No torch."""

from __future__ import annotations

_FINE_ROWS = 32  # up to here graphs are 4 rows apart, beyond it 16


def padded_rows(rows: int) -> int:
    """Rows of the graph that serves `rows` decodes: 1, 2, 4, 8, 12 .. 32, 48, 64 .."""
    if rows <= 2:
        return rows
    step = 4 if rows <= _FINE_ROWS else 16
    return -(-rows // step) * step


def recorded_rows(most: int) -> list[int]:
    """Numbers of decodes that have every graph recorded which up to `most` decodes need."""
    return sorted({min(padded_rows(rows), most) for rows in range(1, most + 1)})
