"""A profile's curves, as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swiftapex.costs.tables import Grid, Line, Tables


def formats() -> list[str]:
    """Suffixes of the pictures that can be drawn, without the dot."""
    return sorted(Figure().canvas.get_supported_filetypes())


def draw(tables: Tables, title: str, path: Path) -> None:
    """One panel per table, in the format of the path's suffix. Points are what was measured."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(3, 2)
    _line(panels[0, 0], tables.linear, "linear stages of a layer", "rows")
    _grid(panels[0, 1], tables.prefill_attention, "prefill attention", "prefix, tokens", "chunk")
    _grid(panels[1, 0], tables.gpu_attention, "GPU decode attention", "tokens", "requests")
    _grid(panels[1, 1], tables.cpu_attention, "CPU decode attention", "tokens", "requests")
    _line(panels[2, 0], tables.iteration, "an iteration besides its layers", "completing rows")
    _line(panels[2, 0], tables.hand_off, "hand-off, a layer", "rows")
    _line(panels[2, 0], tables.layerwise, "a layer launched by itself", "rows")
    _line(panels[2, 1], tables.copy, "copy between the sides, all layers", "tokens")
    figure.savefig(path)


def _line(axes: Axes, line: Line, name: str, what: str) -> None:
    if line.xs:
        axes.plot(line.xs, line.us, ".-", label=name)
        _finish(axes, what)


def _grid(axes: Axes, grid: Grid, name: str, what: str, each: str) -> None:
    axes.set_title(name, fontsize="medium")
    for x, row in zip(grid.xs, grid.us, strict=True):
        known = [(y, us) for y, us in zip(grid.ys, row, strict=True) if us is not None]
        axes.plot([y for y, _ in known], [us for _, us in known], ".-", label=f"{each} {x:g}")
    if grid.xs:
        _finish(axes, what)


def _finish(axes: Axes, what: str) -> None:
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(what)
    axes.set_ylabel("µs")
    axes.legend(fontsize="x-small")
