"""Paper against measured, and the measured points, as tables of texts."""

from __future__ import annotations

from collections.abc import Sequence

from swiftapex.figures.points import Comparison, Point, curve, series_of, unsteady
from swiftapex.figures.spec import FigureConfig

Rows = list[tuple[str, ...]]


def paper_against_measured(comparisons: Sequence[Comparison]) -> Rows:
    """The first row is the header. A star: points that are off a steady state are in it."""
    rows: Rows = [("value", "reported", "measured here", "source")]
    for comparison in comparisons:
        reported = comparison.reported
        given = reported.value
        low, high = (given, given) if isinstance(given, float) else given
        measured = "not measured"
        if comparison.measured is not None:
            measured = _range(*comparison.measured, reported.unit)
            measured += "*" * (not comparison.is_steady)
            found, asked = comparison.places
            measured += f" ({found} of {asked} points)" if found < asked else ""
        rows.append((reported.what, _range(low, high, reported.unit), measured, reported.source))
    return rows


def measured_points(figure: FigureConfig, points: Sequence[Point]) -> Rows:
    """A row per x, a column per series; a star behind what is off a steady state."""
    curves = {series: curve(figure, points, series) for series in series_of(points)}
    xs = list(dict.fromkeys(x for mine in curves.values() for x in mine))
    rows: Rows = [(figure.x.label, *(figure.label(series) for series in curves))]
    off = {series: unsteady(figure, points, series) for series in curves}
    for x in xs:
        cells = [
            _number(mine[x]) + "*" * (x in off[series]) if x in mine else "-"
            for series, mine in curves.items()
        ]
        rows.append((str(x), *cells))
    return rows


def _range(low: float, high: float, unit: str) -> str:
    sign = "+" if unit == "%" else ""
    ends = dict.fromkeys(_number(end, sign) for end in (low, high))
    return f"{' .. '.join(ends)} {unit}".strip()


def _number(number: float, sign: str = "") -> str:
    """Three digits, or all that stand before the point."""
    return f"{number:{sign}.0f}" if abs(number) >= 100 else f"{number:{sign}.3g}"
