"""Measured points, and how they stand beside what a paper reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftapex.figures.spec import FigureConfig, MeasuredConfig, ReportedConfig, X
from swiftapex.report import metrics

OFF_BALANCE = 0.1  # of a window's prompts against its outputs


@dataclass(frozen=True)
class Point:
    """One measurement of a series. `values`: a run's summary, or a kernel's numbers; `settings`:
    what it was measured with, as far as points differ in it."""

    series: str
    x: X
    values: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_steady(self) -> bool:
        """Whether its window took in prompts as fast as it gave outputs. Kernels have no window."""
        balance = self.values.get("steady_balance")
        return balance is None or abs(balance - 1) <= OFF_BALANCE


@dataclass(frozen=True)
class Comparison:
    """A reported value and the range of what was measured for it; None: nothing was. `is_steady`:
    whether all of that was. `places`: at how many x of so many it could be measured."""

    reported: ReportedConfig
    measured: tuple[float, float] | None
    is_steady: bool = True
    places: tuple[int, int] = (0, 0)


def curve(figure: FigureConfig, points: Sequence[Point], series: str) -> dict[X, float]:
    """What is drawn of a series, by x: scaled, or as a ratio to another one."""
    y = figure.y
    mine = _by_x(points, series, y.metric)
    if y.per_series is None:
        return {x: y.scale * number for x, number in mine.items()}
    base = _by_x(points, y.per_series, y.metric)
    return {x: y.scale * number / base[x] for x, number in mine.items() if base.get(x)}


def unsteady(figure: FigureConfig, points: Sequence[Point], series: str) -> set[X]:
    """Where a series is drawn from a window that was no steady state, its own or that of the series
    which it is divided by."""
    drawn = {series, figure.y.per_series}
    return {point.x for point in points if point.series in drawn and not point.is_steady}


def compare(figure: FigureConfig, points: Sequence[Point]) -> list[Comparison]:
    """Every reported value with what was measured in its place."""
    return [_comparison(figure, points, reported) for reported in figure.reported]


def series_of(points: Sequence[Point]) -> list[str]:
    """Names in order of appearance."""
    return list(dict.fromkeys(point.series for point in points))


def _comparison(
    figure: FigureConfig, points: Sequence[Point], reported: ReportedConfig
) -> Comparison:
    wanted = reported.measured
    if wanted is None:
        return Comparison(reported, None)
    asked = [p for p in points if wanted.at is None or p.x in wanted.at]
    found = _measured(figure, asked, wanted)
    used = [p for p in asked if p.series in (wanted.of, wanted.over) and p.x in found]
    places = len(found), len({p.x for p in asked if p.series == wanted.of})
    ends = (min(found.values()), max(found.values())) if found else None
    return Comparison(reported, ends, all(p.is_steady for p in used), places)


def _measured(
    figure: FigureConfig, points: Sequence[Point], wanted: MeasuredConfig
) -> dict[X, float]:
    metric = wanted.metric or figure.y.metric
    mine = _by_x(points, wanted.of, metric)
    if wanted.over is None:
        scale = figure.y.scale if metric == figure.y.metric else 1.0
        return {x: scale * number for x, number in mine.items()}
    base = _by_x(points, wanted.over, metric)
    return {x: 100 * (number / base[x] - 1) for x, number in mine.items() if base.get(x)}


def _by_x(points: Sequence[Point], series: str, metric: str) -> dict[X, float]:
    numbers = {
        point.x: metrics.field(point.values, metric) for point in points if point.series == series
    }
    return {x: number for x, number in numbers.items() if number is not None}
