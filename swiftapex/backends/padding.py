"""Numbers of rows for which graphs are recorded."""


def padded_rows(rows: int) -> int:
    """Rows of the graph that serves `rows`: 1, 2, 4, 8, 12 .. 32, 40, 48 .. 64, 80, 96 .."""
    if rows <= 2:
        return rows
    step = 4 if rows <= 32 else 8 if rows <= 64 else 16
    return -(-rows // step) * step
