"""The report's plots, as SVG text to put inline into HTML."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swiftapex.core.records import IterationRecord
from swiftapex.report.files import RunResult
from swiftapex.report.words import label, short_labels

_MOST_POINTS = 600  # of one curve
_PERCENTILES = ("p50", "p90", "p99")


def throughput(runs: Sequence[Mapping[str, Any]]) -> str:
    """Output tokens per second, one bar per run."""

    def draw(axes: Axes) -> None:
        rates = [run["output_tokens_per_s"] for run in runs]
        bars = axes.barh(short_labels(list(map(label, runs))), [rate or 0.0 for rate in rates])
        words = ["not measured" if rate is None else f"{rate:.1f}" for rate in rates]
        axes.bar_label(bars, words, padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("output tokens / s")

    return _svg(draw, height=1.0 + 0.4 * len(runs))


def latency(runs: Sequence[Mapping[str, Any]], metric: str, name: str) -> str:
    """Percentiles of one latency metric, a group of bars per run."""

    def draw(axes: Axes) -> None:
        for offset, percentile in enumerate(_PERCENTILES):
            places = [index + (offset - 1) * 0.27 for index in range(len(runs))]
            axes.barh(places, [run[metric][percentile] or 0.0 for run in runs], 0.25)
        axes.set_yticks(range(len(runs)), short_labels(list(map(label, runs))))
        axes.invert_yaxis()
        axes.set_xlabel(f"{name}, ms")
        axes.legend(_PERCENTILES, loc="best", fontsize="small")

    return _svg(draw, height=1.2 + 0.6 * len(runs))


def pipelines_used(runs: Sequence[Mapping[str, Any]]) -> str:
    """Share of iterations per pipeline, a bar per run."""

    def draw(axes: Axes) -> None:
        shares = [run["strategy_share"] or {} for run in runs]
        left = [0.0] * len(runs)
        for name in dict.fromkeys(name for share in shares for name in share if share[name]):
            widths = [100 * share.get(name, 0.0) for share in shares]
            axes.barh(range(len(runs)), widths, left=left, label=name)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(runs)), short_labels(list(map(label, runs))))
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of iterations")
        if any(shares):
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize="small")

    return _svg(draw, height=1.2 + 0.4 * len(runs))


def tokens_over_time(results: Sequence[RunResult]) -> str:
    """Output tokens so far, over the time since the first arrival; one curve per run."""

    def draw(axes: Axes) -> None:
        runs = [{"name": r.plan.name, "sweep": r.plan.sweep} for r in results]
        for result, name in zip(results, short_labels(list(map(label, runs))), strict=True):
            times = sorted(t for o in result.log.outcomes for t in o.token_times_s)
            points = _thinned(list(enumerate(times, start=1)))
            axes.plot(
                [0.0, *(time_s for _, time_s in points)],
                [0, *(count for count, _ in points)],
                label=name,
            )
        axes.set_xlabel("seconds since the first arrival")
        axes.set_ylabel("output tokens so far")
        axes.legend(fontsize="small")

    return _svg(draw, height=3.2)


def batch_composition(result: RunResult) -> str:
    """Tokens of an iteration's batch: prefill, and decodes per side of their KV. A long run is
    shown as means over a few neighbouring iterations, so that rare prefills are not lost."""

    def draw(axes: Axes) -> None:
        groups = _groups(result.log.iterations)
        means = [
            [sum(getattr(record, name) for record in group) / len(group) for group in groups]
            for name in ("gpu_decodes", "cpu_decodes", "prefill_tokens")
        ]
        labels = ("GPU decodes", "CPU decodes", "prefill tokens")
        axes.stackplot([group[0].index for group in groups], means, labels=labels, step="post")
        axes.set_yscale("symlog", linthresh=64)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("iteration")
        axes.set_ylabel("tokens in the batch")
        axes.legend(loc="upper right", fontsize="small")

    return _svg(draw, height=2.6)


def requests(result: RunResult) -> str:
    """Requests after each iteration by what they are doing, and how many changed sides in it."""

    def draw(axes: Axes) -> None:
        groups = _groups(result.log.iterations)
        starts = [group[0].index for group in groups]
        for name, text in (
            ("waiting", "waiting"),
            ("running", "running"),
            ("parked", "of them parked: decode in flight on the CPU"),
        ):
            means = [sum(getattr(r, name) for r in group) / len(group) for group in groups]
            axes.step(starts, means, where="post", label=text)
        width = max(len(group) for group in groups)
        for name, text, sign in (
            ("moves", "moves", 1),
            ("preemptions", "preemptions (downwards)", -1),
        ):
            counts = [sum(getattr(r, name) for r in group) for group in groups]
            if any(counts):
                heights = [sign * count for count in counts]
                axes.bar(starts, heights, width, align="edge", alpha=0.5, label=text)
        axes.set_xlabel("iteration")
        axes.set_ylabel("requests")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small")

    return _svg(draw, height=2.6)


def has_predictions(result: RunResult) -> bool:
    return any(r.predicted_us is not None for r in result.log.iterations)


def prediction_error(result: RunResult) -> str:
    """Predicted over measured time of each iteration, a colour per pipeline."""

    def draw(axes: Axes) -> None:
        records = [r for r in result.log.iterations if r.predicted_us and r.duration_us > 0]
        for name in dict.fromkeys(record.pipeline for record in records):
            mine = _thinned([record for record in records if record.pipeline == name])
            ratios = [record.predicted_us / record.duration_us for record in mine]
            axes.plot([record.index for record in mine], ratios, ".", markersize=3, label=name)
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_xlabel("iteration")
        axes.set_ylabel("predicted / measured")
        axes.legend(loc="best", fontsize="small")

    return _svg(draw, height=2.4)


def choice(result: RunResult) -> str:
    """Predicted time of each strategy that was weighed, and which one ran."""

    def draw(axes: Axes) -> None:
        records = _thinned([r for r in result.log.iterations if r.candidates_us])
        names = dict.fromkeys(name for record in records for name in record.candidates_us)
        for name in names:
            mine = [record for record in records if name in record.candidates_us]
            times = [1e-3 * record.candidates_us[name] for record in mine]
            (line,) = axes.plot([r.index for r in mine], times, linewidth=0.8, label=name)
            ran = [(r.index, t) for r, t in zip(mine, times, strict=True) if r.pipeline == name]
            color = line.get_color()
            axes.plot([i for i, _ in ran], [t for _, t in ran], "o", color=color, markersize=3)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("iteration")
        axes.set_ylabel("predicted ms; dots: it ran")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small")

    return _svg(draw, height=2.6)


def block_use(result: RunResult) -> str:
    """Share of KV blocks in use after each iteration, per side that has any."""

    def draw(axes: Axes) -> None:
        records = _thinned(result.log.iterations)
        for side, total in (("gpu", result.gpu_blocks), ("cpu", result.cpu_blocks)):
            if total:
                used = [100 * (1 - getattr(r, f"{side}_blocks_free") / total) for r in records]
                name = f"{side.upper()}, {total} blocks"
                axes.step([r.index for r in records], used, where="post", label=name)
        axes.set_ylim(0, 105)
        axes.set_xlabel("iteration")
        axes.set_ylabel("% of KV blocks in use")
        axes.legend(loc="best", fontsize="small")

    return _svg(draw, height=2.2)


def _thinned(points: Sequence[Any], most: int = _MOST_POINTS) -> Sequence[Any]:
    """At most about `most` of the points, evenly chosen, the last one included."""
    step = max(1, -(-len(points) // most))
    chosen = list(points[::step])
    if points and (len(points) - 1) % step:
        chosen.append(points[-1])
    return chosen


def _groups(records: Sequence[IterationRecord]) -> list[Sequence[IterationRecord]]:
    """Neighbours together, in at most about _MOST_POINTS groups."""
    size = max(1, -(-len(records) // _MOST_POINTS))
    return [records[start : start + size] for start in range(0, len(records), size)]


def _svg(draw: Callable[[Axes], None], height: float, width: float = 7.5) -> str:
    """An inline <svg> of what `draw` puts into the axes."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
    return figure_svg(figure)


def figure_svg(figure: Figure) -> str:
    """An inline <svg>; text stays text."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
