"""The cost model that reads measured tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from swiftapex.costs.tables import Curve, Grid, Line, Surface, Tables

_DENSE_ROWS = 4096  # up to so many rows are looked up, not interpolated
_CHUNKS = 4096  # of which a time is kept: a plan asks for each of its chunks dozens of times


class MeasuredCostModel:
    """A `CostModel` over what the profiler measured; `costs/tables.py` says how it reads between
    and beyond the points. What was not measured, for want of a CPU side, costs nothing."""

    def __init__(self, tables: Tables) -> None:
        self.num_layers = tables.num_layers
        self._linear = Curve(tables.linear.xs, tables.linear.us)
        self._dense = self._linear.dense(_DENSE_ROWS)
        self._iteration = _curve(tables.iteration)
        self._dense_iteration = self._iteration.dense(_DENSE_ROWS) if self._iteration else []
        self._gpu = _surface(tables.gpu_attention)
        prefill = _surface(tables.prefill_attention)
        self._prefill = lru_cache(_CHUNKS)(prefill) if prefill else None
        self._cpu = _surface(tables.cpu_attention)
        self._hand_off = _dense(tables.hand_off)
        self._layerwise = _dense(tables.layerwise)
        self._copy = _curve(tables.copy)
        self._host_us = dict(tables.host_us)

    def linear_us(self, rows: int) -> float:
        return self._dense[rows] if 0 <= rows <= _DENSE_ROWS else self._linear(rows)

    def gpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        return self._gpu(requests or 1, tokens) if tokens > 0 and self._gpu else 0.0

    def prefill_attention_us(self, chunk: int, prefix: int) -> float:
        return self._prefill(chunk, prefix) if self._prefill else 0.0

    def cpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        return self._cpu(requests or 1, tokens) if tokens > 0 and self._cpu else 0.0

    def iteration_us(self, completing: int) -> float:
        completing = max(1, completing)
        if completing < len(self._dense_iteration):
            return self._dense_iteration[completing]
        return self._iteration(completing) if self._iteration else 0.0

    def hand_off_us(self, rows: int) -> float:
        return self._hand_off[rows if rows <= _DENSE_ROWS else _DENSE_ROWS]

    def layerwise_us(self, rows: int) -> float:
        return self._layerwise[rows if rows <= _DENSE_ROWS else _DENSE_ROWS]

    def host_us(self, kind: str) -> float:
        return self._host_us.get(kind, 0.0)

    def copy_us(self, tokens: int) -> float:
        return self._copy(tokens) if self._copy else 0.0


def _curve(line: Line) -> Curve | None:
    return Curve(line.xs, line.us) if line.xs else None


def _dense(line: Line) -> list[float]:
    curve = _curve(line)
    return curve.dense(_DENSE_ROWS) if curve else [0.0] * (_DENSE_ROWS + 1)


def _surface(grid: Grid) -> Callable[[float, float], float] | None:
    """The surface's method, which is called in less time than the surface."""
    return Surface(grid.xs, grid.ys, grid.us).__call__ if grid.xs else None
