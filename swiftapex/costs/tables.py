"""Measured tables: curves and surfaces of µs, read by interpolation. No torch here.

All are monotone: neighbours that fell where they should have risen are noise, and count as their
median (`isotonic`); between the points values are interpolated linearly.
Extrapolation, the same everywhere: below the first point its value holds (a call that does little
still costs a call), beyond the last one the slope of the last segment goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import isfinite
from statistics import median
from typing import Any


def isotonic(values: Sequence[float]) -> list[float]:
    """The values where they do not fall; neighbours that do are pooled, and each pool takes its
    median, so that one disturbed measurement spoils neither those before it nor those behind it."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([max(0.0, value)])
        while len(pools) > 1 and median(pools[-2]) > median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [median(pool) for pool in pools for _ in pool]


class Curve:
    """f(x) over x > 0, in µs; 0 where x <= 0."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        assert len(xs) == len(ys) >= 1 and list(xs) == sorted(set(xs)), "xs must increase"
        self.xs = list(xs)
        self.ys = isotonic(ys)

    def __call__(self, x: float) -> float:
        if x <= 0:
            return 0.0
        xs, ys = self.xs, self.ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect_right(xs, x), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + slope * (x - xs[i - 1])

    def dense(self, last: int) -> list[float]:
        """f(0), f(1) .. f(last): for whole numbers that are asked for often."""
        return [self(x) for x in range(last + 1)]


class Surface:
    """f(x, y) over x > 0 and y >= 0: a curve over y for each x of a grid; between two of them,
    linearly in x. `values[i][j]` belongs to (xs[i], ys[j]); None: not measured, since there is no
    such work or no room for it. Such a value is taken from its curve's extrapolation."""

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        values: Sequence[Sequence[float | None]],
    ) -> None:
        assert len(xs) == len(values) >= 1 and list(xs) == sorted(set(xs)), "xs must increase"
        self.xs, self.ys = list(xs), list(ys)
        rows: list[list[float]] = []
        for row in values:
            known = [(y, v) for y, v in zip(ys, row, strict=True) if v is not None]
            assert known, "a curve needs a measured point"
            curve = Curve([y + 1 for y, _ in known], [v for _, v in known])
            rows.append([curve(y + 1) for y in ys])
        columns = [isotonic(column) for column in zip(*rows, strict=True)]
        self.rows: list[list[float]] = []
        for row in zip(*columns, strict=True):
            below = self.rows[-1] if self.rows else row
            self.rows.append([max(pair) for pair in zip(isotonic(row), below, strict=True)])
        self._slopes = list(accumulate((_end_slope(self.ys, row) for row in self.rows), max))
        # What another step of the last width in x adds, which must not fall in y either.
        before, last = self.rows[-2:] if len(self.rows) > 1 else (self.rows[0], self.rows[0])
        self._more = list(accumulate((b - a for a, b in zip(before, last, strict=True)), max))
        self._more_slope = self._slopes[-1] - self._slopes[max(0, len(self.rows) - 2)]
        # By the first points that lie beyond x and y, those outside the grid included.
        self._cells = [
            [self._cell(i, j) for j in range(len(self.ys) + 1)] for i in range(len(self.xs) + 1)
        ]

    def __call__(self, x: float, y: float) -> float:
        if x <= 0:
            return 0.0
        cell = self._cells[bisect_right(self.xs, x)][bisect_right(self.ys, y)]
        x0, width, y0, height, low, low_rise, high, high_rise = cell
        share = (y - y0) / height
        low += low_rise * share
        return low + (high + high_rise * share - low) * (x - x0) / width

    def _cell(self, i: int, j: int) -> tuple[float, ...]:
        """Between points i - 1 and i of x, j - 1 and j of y: where both begin and how far they go,
        and where the curves at both ends of x begin and how far they rise."""
        xs, rows, slopes = self.xs, self.rows, self._slopes
        y0, height = _segment(self.ys, j)
        if i == 0 or len(xs) == 1:
            low, low_rise = _piece(rows[0], slopes[0], j)
            return xs[0], 1.0, y0, height, low, low_rise, low, low_rise
        low, low_rise = _piece(rows[i - 1], slopes[i - 1], j)
        if i == len(xs):
            more, more_rise = _piece(self._more, self._more_slope, j)
            high, high_rise = low + more, low_rise + more_rise
            return xs[-1], xs[-1] - xs[-2], y0, height, low, low_rise, high, high_rise
        high, high_rise = _piece(rows[i], slopes[i], j)
        return xs[i - 1], xs[i] - xs[i - 1], y0, height, low, low_rise, high, high_rise


def _segment(ys: Sequence[float], j: int) -> tuple[float, float]:
    """Where the segment before point j begins and how far it goes; 1 before and behind them all."""
    return (ys[j - 1], ys[j] - ys[j - 1]) if 0 < j < len(ys) else (ys[-1 if j else 0], 1.0)


def _piece(values: Sequence[float], slope: float, j: int) -> tuple[float, float]:
    """The value where that segment begins, and how far it rises: not at all before the first
    point, by `slope` behind the last one."""
    if j == 0:
        return values[0], 0.0
    return values[j - 1], values[j] - values[j - 1] if j < len(values) else slope


def _end_slope(ys: Sequence[float], values: Sequence[float]) -> float:
    return (values[-1] - values[-2]) / (ys[-1] - ys[-2]) if len(ys) > 1 else 0.0


@dataclass(frozen=True)
class Line:
    """What `Curve` is made from, as it is stored."""

    xs: tuple[float, ...] = ()
    us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Grid:
    """What `Surface` is made from, as it is stored."""

    xs: tuple[float, ...] = ()
    ys: tuple[float, ...] = ()
    us: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True)
class Tables:
    """What a profile holds, in µs; of one layer where nothing else is said.

    A linear stage's time holds what an attention call over one token costs besides, up to as many
    rows as there are decodes; attention is what longer contexts add to that. Without a CPU side its
    tables are empty.
    """

    num_layers: int
    linear: Line  # pre- and post-projection over rows
    iteration: Line  # of a pass: embedding, logits, sampling over completing rows
    gpu_attention: Grid  # decodes over (requests, tokens of KV in all)
    prefill_attention: Grid  # one chunk over (tokens, tokens before them)
    cpu_attention: Grid  # one task over (requests, tokens of KV in all), hand-off included
    hand_off: Line  # what rows handed to the CPU cost the GPU side besides, over rows
    layerwise: Line  # what layers take besides in passes that cohorts may join, over rows
    copy: Line  # of a move between the sides, all layers, over tokens
    host_us: Mapping[str, float] = field(default_factory=dict)  # of a pass, per kind of launch

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Tables:
        """ValueError, KeyError or TypeError where `data` is not what `as_dict` gave."""
        linear = _line(data["linear"])
        if not linear.xs:
            raise ValueError("no linear stage was measured")
        return Tables(
            num_layers=int(data["num_layers"]),
            linear=linear,
            iteration=_line(data["iteration"]),
            gpu_attention=_grid(data["gpu_attention"]),
            prefill_attention=_grid(data["prefill_attention"]),
            cpu_attention=_grid(data["cpu_attention"]),
            hand_off=_line(data["hand_off"]),
            layerwise=_line(data.get("layerwise", {"xs": (), "us": ()})),  # older results
            copy=_line(data["copy"]),
            host_us={str(k): float(v) for k, v in dict(data["host_us"]).items()},
        )


def _line(data: Mapping[str, Any]) -> Line:
    xs, us = _rising(data["xs"]), tuple(map(_number, data["us"]))
    if len(us) != len(xs):
        raise ValueError(f"a line of {len(xs)} points has {len(us)} times")
    return Line(xs, us)


def _grid(data: Mapping[str, Any]) -> Grid:
    xs, ys = _rising(data["xs"]), _rising(data["ys"])
    us = tuple(tuple(None if t is None else _number(t) for t in row) for row in data["us"])
    if [len(row) for row in us] != [len(ys)] * len(xs) or any(set(row) <= {None} for row in us):
        raise ValueError(f"a grid of {len(xs)} by {len(ys)} points has other times, or a row none")
    return Grid(xs, ys, us)


def _rising(values: Sequence[Any]) -> tuple[float, ...]:
    numbers = tuple(map(_number, values))
    if list(numbers) != sorted(set(numbers)):
        raise ValueError(f"{values}: expected rising numbers")
    return numbers


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{value!r}: expected a number")
    return value
