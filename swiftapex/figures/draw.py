"""A figure in its paper's form, of measured points; reported single values as crosses."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swiftapex.figures.points import Point, curve, series_of, unsteady
from swiftapex.figures.spec import FigureConfig, X
from swiftapex.report.words import short_labels

_SIZE = (7.0, 4.2)  # inches
_DPI = 150
_NOTE_WIDTH = 120  # characters
_MARKERS = "osD^vP*"


def draw(figure: FigureConfig, points: Sequence[Point], notes: Sequence[str]) -> Figure:
    """`notes`: lines under the axes, such as what is emulated."""
    with matplotlib.rc_context({"font.size": 9}):
        picture = Figure(figsize=_SIZE, layout="constrained")
        axes = picture.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{figure.figure}: {figure.title}", loc="left", wrap=True)
        curves = {series: curve(figure, points, series) for series in series_of(points)}
        xs = list(dict.fromkeys(x for mine in curves.values() for x in mine))
        off = {series: unsteady(figure, points, series) for series in curves}
        if figure.form == "bars":
            places = _bars(axes, figure, curves, xs, off)
        else:
            places = _lines(axes, figure, curves, xs, off)
        _reported(axes, figure, curves, places)
        _finish(axes, figure)
        lines = [line for note in notes for line in textwrap.wrap(note, _NOTE_WIDTH)]
        picture.supxlabel("\n".join(lines), fontsize=7, color="#555555")
    return picture


def save(picture: Figure, folder: Path) -> None:
    """figure.png and figure.pdf."""
    picture.savefig(folder / "figure.png", dpi=_DPI)
    picture.savefig(folder / "figure.pdf", metadata={"CreationDate": None})


def _lines(
    axes: Axes,
    figure: FigureConfig,
    curves: dict[str, dict[X, float]],
    xs: list[X],
    off: dict[str, set[X]],
) -> dict[str, dict[X, float]]:
    """Where each point lies on the x axis: at its number, or in order where x is a name. Points
    that are `off` a steady state are hollow."""
    numeric = all(not isinstance(x, str) for x in xs)
    at = {x: float(x) if numeric else float(index) for index, x in enumerate(xs)}
    labels = _labels(figure, curves)
    for index, (series, mine) in enumerate(curves.items()):
        marker = _MARKERS[index % len(_MARKERS)]
        (line,) = axes.plot(
            [at[x] for x in mine],
            list(mine.values()),
            marker=marker,
            markersize=4,
            label=labels[index],
        )
        hollow = [x for x in mine if x in off[series]]
        axes.plot(
            [at[x] for x in hollow],
            [mine[x] for x in hollow],
            linestyle="none",
            marker=marker,
            markersize=4,
            markerfacecolor="white",
            markeredgecolor=line.get_color(),
        )
    if numeric and figure.x.log:
        axes.set_xscale("log", base=2)
    if not numeric or len(xs) < 12:
        axes.set_xticks(list(at.values()), short_labels(list(map(str, xs)), 16))
        axes.minorticks_off()
    return {series: at for series in curves}


def _bars(
    axes: Axes,
    figure: FigureConfig,
    curves: dict[str, dict[X, float]],
    xs: list[X],
    off: dict[str, set[X]],
) -> dict[str, dict[X, float]]:
    """A group of bars for each x; pale and with a star where they are `off` a steady state."""
    width = 0.8 / max(1, len(curves))
    places = {}
    labels = _labels(figure, curves)
    for index, (series, mine) in enumerate(curves.items()):
        shift = (index - (len(curves) - 1) / 2) * width
        places[series] = {x: xs.index(x) + shift for x in xs}
        at = [places[series][x] for x in mine]
        bars = axes.bar(at, list(mine.values()), 0.92 * width, label=labels[index])
        stars = ["*" if x in off[series] else "" for x in mine]
        for bar, star in zip(bars, stars, strict=True):
            bar.set_alpha(0.45 if star else 1.0)
        texts = [_short(bar.get_height()) + star for bar, star in zip(bars, stars, strict=True)]
        axes.bar_label(bars, texts, fontsize=6, padding=1)
    axes.set_xticks(range(len(xs)), short_labels(list(map(str, xs)), 16))
    return places


def _labels(figure: FigureConfig, curves: Iterable[str]) -> list[str]:
    return short_labels([figure.label(series) for series in curves])


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _reported(
    axes: Axes,
    figure: FigureConfig,
    curves: dict[str, dict[X, float]],
    places: dict[str, dict[X, float]],
) -> None:
    """Single values that were reported for one x of a series that is drawn in their unit."""
    label: str | None = "reported"
    for reported in figure.reported:
        where = reported.measured
        if where is None or where.over or where.metric or where.at is None or len(where.at) != 1:
            continue
        (x,) = where.at
        if figure.y.per_series is None and x in curves.get(where.of, {}):
            axes.plot(places[where.of][x], reported.value, "kx", markersize=7, label=label)
            label = None


def _finish(axes: Axes, figure: FigureConfig) -> None:
    axes.set_xlabel(figure.x.label)
    axes.set_ylabel(figure.y.label)
    if figure.y.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", frameon=False)
