"""Pictures of pipelines: what each side did in two iterations, as lanes over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from swiftapex.core.trace import LANES
from swiftapex.report.snapshots import Bar, Excerpt, Snapshot, bars, excerpts, whole

_WIDTH = 11.0  # inches
_CHARACTER = 0.08  # inches that a character of a label takes
_SHORTEST = 0.025  # inches of a bar, however short the work
_KINDS = {  # name of a span -> its name in the legend, its colour
    "pre_attn": ("pre-projection", "#3b75af"),
    "post_attn": ("post-projection", "#2e8b57"),
    "attention": ("attention (GPU)", "#e68a00"),
    "embed": ("embedding, logits", "#8c8c8c"),
    "logits": ("embedding, logits", "#8c8c8c"),
    "attend": ("attention (CPU)", "#b8336a"),
    "copy": ("copy of KV", "#8c6239"),
    "plan": ("scheduling", "#222222"),
}
_OTHER = ("other", "#5c5c99")
_PARKED = "parked"
CAPTIONS = {
    "sequential": "Sequential: one batch goes through the layers, one step after the other.",
    "asymmetric": "Asymmetric pipelining (NEO): two sub-batches half a layer out of phase. While "
    "the GPU computes the projections of one, the CPU attends for the other.",
    "async_overlap": "Asynchronous overlap (APEX): one batch. CPU decodes park in cohorts while "
    "the CPU attends for them, and rejoin when the batch next reaches their layer.",
    "symmetric": "Symmetric pipelining (FastDecode): two equal sub-batches with all decode "
    "attention on the CPU, which attends for one while the GPU computes the other.",
}


def pipeline_picture(snapshot: Snapshot) -> Figure:
    """A strip with the whole iterations on top, and a few layers of each below it."""
    overview, details = whole(snapshot), excerpts(snapshot)
    origin_s = overview.start_s
    with matplotlib.rc_context({"font.size": 9, "hatch.linewidth": 0.6}):
        heights = [0.7, *(1.25 for _ in details)]
        figure = Figure(figsize=(_WIDTH, sum(heights) + 1.0), layout="constrained")
        strip, *panels = figure.subplots(len(heights), 1, height_ratios=heights)
        lanes = _used_lanes(snapshot)
        _draw_lanes(strip, snapshot, overview, origin_s, lanes, with_layers=False)
        for iteration, excerpt in zip(snapshot.iterations, details, strict=True):
            _mark(strip, iteration.start_s, excerpt, f"iteration {iteration.index}", origin_s)
        for axes, excerpt in zip(panels, details, strict=True):
            _draw_lanes(axes, snapshot, excerpt, origin_s, lanes, with_layers=True)
            axes.set_title(excerpt.title, fontsize=9, loc="left")
        panels[-1].set_xlabel("milliseconds; numbers in the bars are layers")
        handles = _legend(bars(snapshot, overview, origin_s))
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _used_lanes(snapshot: Snapshot) -> list[str]:
    """The usual lanes, and those that someone else's pipeline added."""
    return list(dict.fromkeys((*LANES, *(span.lane for span in snapshot.spans))))


def _draw_lanes(
    axes: Axes,
    snapshot: Snapshot,
    excerpt: Excerpt,
    origin_s: float,
    lanes: Sequence[str],
    with_layers: bool,
) -> None:
    begin_ms, end_ms = (excerpt.start_s - origin_s) * 1e3, (excerpt.end_s - origin_s) * 1e3
    axes.set_xlim(begin_ms, end_ms)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.tick_params(axis="y", length=0, labelsize=9 if with_layers else 7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    inches_per_ms = (_WIDTH - 1.3) / (end_ms - begin_ms)
    shortest_ms = (_SHORTEST if with_layers else _SHORTEST / 2) / inches_per_ms
    free_from = dict.fromkeys(lanes, begin_ms)  # where a lane is free for labels beside short bars
    for bar in bars(snapshot, excerpt, origin_s):
        lane = lanes.index(bar.lane)
        length_ms = min(max(bar.length_ms, shortest_ms), end_ms - bar.start_ms)
        outlined = with_layers and length_ms > 3 * shortest_ms
        hatched = with_layers and length_ms > shortest_ms and bar.sub_batch == _PARKED
        axes.add_patch(_rectangle(bar, lane, length_ms, outlined, hatched))
        if with_layers and bar.layer is not None:
            text_ms = _CHARACTER * len(str(bar.layer)) / inches_per_ms
            free_from[bar.lane] = _label(axes, bar, lane, text_ms, free_from[bar.lane])


def _rectangle(bar: Bar, lane: int, length_ms: float, outlined: bool, hatched: bool) -> Rectangle:
    return Rectangle(
        (bar.start_ms, lane - 0.4),
        length_ms,
        0.8,
        facecolor=_colour(bar.name, bar.sub_batch),
        edgecolor="white",
        linewidth=0.5 if outlined else 0,
        hatch="////" if hatched else None,
    )


def _label(axes: Axes, bar: Bar, lane: int, text_ms: float, free_from_ms: float) -> float:
    """Writes the layer into the bar, or beside it where attention on the CPU is short. Returns
    from where the lane is free."""
    end_ms = bar.start_ms + bar.length_ms
    text: dict[str, Any] = {"va": "center", "fontsize": 7, "clip_on": True}
    red, green, blue = colour = _colour(bar.name, bar.sub_batch)
    if bar.length_ms > text_ms:
        is_dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.6
        text |= {"ha": "center", "color": "white" if is_dark else "black"}
        if bar.sub_batch == _PARKED:
            text |= {"bbox": {"facecolor": colour, "linewidth": 0, "pad": 0.8}}
        axes.text(bar.start_ms + bar.length_ms / 2, lane, str(bar.layer), **text)
    elif bar.name == "attend" and bar.start_ms >= free_from_ms:
        axes.text(
            end_ms + 0.4 * text_ms,
            lane,
            str(bar.layer),
            ha="left",
            color=_colour(bar.name, 0),
            **text,
        )
        return end_ms + 1.6 * text_ms
    return end_ms


def _colour(name: str, sub_batch: int | str | None) -> tuple[float, float, float]:
    """The kind's colour; lighter for the second sub-batch."""
    red, green, blue = to_rgb(_KINDS.get(name, _OTHER)[1])
    if sub_batch != 1:
        return red, green, blue
    return tuple(1 - 0.45 * (1 - part) for part in (red, green, blue))  # type: ignore[return-value]


def _mark(axes: Axes, start_s: float, excerpt: Excerpt, name: str, origin_s: float) -> None:
    """Where an iteration begins, and which part of it is shown below."""
    start_ms = (start_s - origin_s) * 1e3
    axes.axvline(start_ms, color="#222222", linewidth=0.8)
    axes.axvspan(
        (excerpt.start_s - origin_s) * 1e3,
        (excerpt.end_s - origin_s) * 1e3,
        color="#fff2b3",
        zorder=0,
        linewidth=0,
    )
    transform = axes.get_xaxis_transform()
    axes.text(start_ms, 1.04, f" {name}", transform=transform, ha="left", va="bottom")


def _legend(shown: Sequence[Bar]) -> list[Patch]:
    """The kinds of work in the picture, then the marks of sub-batches."""
    kinds = dict.fromkeys(_KINDS.get(bar.name, _OTHER) for bar in shown)
    ordered = [kind for kind in dict.fromkeys((*_KINDS.values(), _OTHER)) if kind in kinds]
    handles = [Patch(facecolor=colour, label=name) for name, colour in ordered]
    sub_batches = {bar.sub_batch for bar in shown}
    if 1 in sub_batches:
        handles.append(Patch(facecolor="#555555", label="sub-batch 0: dark"))
        handles.append(Patch(facecolor="#b3b3b3", label="sub-batch 1: light"))
    if _PARKED in sub_batches:
        handles.append(
            Patch(facecolor="#555555", edgecolor="white", hatch="////", label="parked cohort")
        )
    return handles
