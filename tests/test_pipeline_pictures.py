"""The pictures of pipelines: which iterations they show, and where each bar lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import swiftapex.core.trace as trace_module
from swiftapex.core.trace import COPIES, CPU_ATTENTION, GPU, LANES, SCHEDULER, TraceRecorder
from swiftapex.report.plots import figure_svg
from swiftapex.report.snapshots import Snapshot, bars, excerpts, take_snapshots, whole
from swiftapex.report.timeline import pipeline_picture

LAYER_S = 0.010
LATE_LAYERS = range(20, 26)


class Clock:
    """time.perf_counter as a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(trace_module.time, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run_iteration(
    trace: TraceRecorder, clock: Clock, index: int, pipeline: str, layers: int
) -> None:
    """Layers of 10 ms: 2 pre-projection, 3 attention, 5 post-projection. With asymmetric
    pipelining the CPU attends for sub-batch 1 meanwhile; with overlap for a cohort, through two
    layers and across iterations, noted one iteration later."""
    trace.begin_iteration(index)
    trace.span(SCHEDULER, "plan", clock.now_s, clock.now_s + 0.001)
    trace.tag(pipeline)
    if pipeline == "async_overlap" and index:
        previous_s = clock.now_s - layers * LAYER_S
        for layer in LATE_LAYERS:
            start_s = previous_s + layer * LAYER_S
            tags: dict[str, Any] = {"layer": layer, "sub_batch": "parked"}
            trace.span(CPU_ATTENTION, "attend", start_s, start_s + 2 * LAYER_S, **tags)
    for layer in range(layers):
        start_s, tags = clock.now_s, {"layer": layer, "sub_batch": 0}
        trace.span(GPU, "pre_attn", start_s, start_s + 0.002, **tags)
        trace.span(GPU, "attention", start_s + 0.002, start_s + 0.005, **tags)
        trace.span(GPU, "post_attn", start_s + 0.005, start_s + 0.010, **tags)
        if pipeline == "asymmetric":
            tags["sub_batch"] = 1
            trace.span(CPU_ATTENTION, "attend", start_s + 0.001, start_s + 0.009, **tags)
            trace.span(COPIES, "copy", start_s, start_s + 0.000_001)
        clock.now_s += LAYER_S


def snapshots(clock: Clock, pipelines: Sequence[str], layers: int = 4) -> list[Snapshot]:
    trace = TraceRecorder(50)
    for index, pipeline in enumerate(pipelines):
        run_iteration(trace, clock, index, pipeline, layers)
    return list(take_snapshots(trace))


def test_each_pipeline_has_two_iterations_in_a_row(clock: Clock) -> None:
    ran = ["sequential", "asymmetric", "sequential", "sequential", "async_overlap", "async_overlap"]
    found = {s.pipeline: [i.index for i in s.iterations] for s in snapshots(clock, ran)}
    assert found == {"sequential": [2, 3], "asymmetric": [1], "async_overlap": [4, 5]}


def test_iterations_that_computed_nothing_have_no_picture(clock: Clock) -> None:
    trace = TraceRecorder(50)
    run_iteration(trace, clock, 0, "sequential", layers=2)
    trace.begin_iteration(1)
    trace.span(SCHEDULER, "plan", clock.now_s, clock.now_s + 0.001)
    trace.tag("async_overlap")
    assert [snapshot.pipeline for snapshot in take_snapshots(trace)] == ["sequential"]


def test_bars_are_cut_at_the_excerpt_and_keep_their_tags(clock: Clock) -> None:
    (snapshot,) = snapshots(clock, ["asymmetric"] * 2)
    overview = whole(snapshot)
    assert (overview.start_s, overview.end_s) == pytest.approx((100.0, 100.08))
    placed = bars(snapshot, overview, overview.start_s)
    attend = [bar for bar in placed if bar.lane == CPU_ATTENTION]
    assert [(bar.layer, bar.sub_batch) for bar in attend] == 2 * [(i, 1) for i in range(4)]
    assert [bar.start_ms for bar in attend] == pytest.approx([10 * i + 1 for i in range(8)])
    assert [bar.length_ms for bar in attend] == pytest.approx([8.0] * 8)
    second = excerpts(snapshot)[1]
    assert second.title == "iteration 1"
    assert min(bar.start_ms for bar in bars(snapshot, second, overview.start_s)) == (
        pytest.approx(40.0)
    )


def test_deep_models_show_the_first_layers(clock: Clock) -> None:
    (snapshot,) = snapshots(clock, ["asymmetric"] * 2, layers=32)
    assert [e.title for e in excerpts(snapshot)] == [
        f"iteration {i}, layers 0 to 5" for i in (0, 1)
    ]
    first, second = excerpts(snapshot)
    assert (first.start_s, first.end_s) == pytest.approx((100.0, 100.06))
    assert (second.start_s, second.end_s) == pytest.approx((100.32, 100.38))


def test_few_cohorts_are_shown_at_the_layers_they_reach(clock: Clock) -> None:
    """Their attention was noted an iteration later than it ran, and is placed where it ran."""
    (snapshot,) = snapshots(clock, ["async_overlap"] * 4, layers=32)
    first_index = snapshot.iterations[0].index
    first = excerpts(snapshot)[0]
    assert first.title == f"iteration {first_index}, layers 20 to 25"
    start_s = snapshot.iterations[0].start_s
    parked = [bar for bar in bars(snapshot, first, start_s) if bar.sub_batch == "parked"]
    assert {bar.layer for bar in parked} == set(LATE_LAYERS)
    assert parked[0].start_ms == pytest.approx(200.0)
    assert parked[0].length_ms == pytest.approx(20.0)  # two layers of the GPU's
    assert parked[-1].length_ms == pytest.approx(10.0)  # cut at the excerpt's end


def rectangles(axes: Axes) -> list[Rectangle]:
    return [p for p in axes.patches if isinstance(p, Rectangle) and p.get_height() == 0.8]


def check_picture(figure: Figure, num_iterations: int) -> None:
    strip, *panels = figure.axes
    assert len(panels) == num_iterations
    for axes in (strip, *panels):
        assert [text.get_text() for text in axes.get_yticklabels()] == list(LANES)
        begin, end = axes.get_xlim()
        assert rectangles(axes)
        for bar in rectangles(axes):
            assert begin - 1e-6 <= bar.get_x()
            assert bar.get_x() + bar.get_width() <= end + 1e-6
            assert bar.get_width() > 0
            assert bar.get_y() + 0.4 in range(len(LANES))


@pytest.mark.parametrize("pipeline", ["sequential", "asymmetric", "async_overlap", "mine"])
def test_pictures_have_lanes_bars_and_layers(clock: Clock, pipeline: str) -> None:
    (snapshot,) = snapshots(clock, [pipeline] * 4, layers=32)
    figure = pipeline_picture(snapshot)
    check_picture(figure, num_iterations=2)
    titles = [axes.get_title(loc="left") for axes in figure.axes[1:]]
    indices = [iteration.index for iteration in snapshot.iterations]
    assert [title.split(",")[0] for title in titles] == [f"iteration {i}" for i in indices]
    layers = [text.get_text() for text in figure.axes[1].texts]
    assert layers.count("20" if pipeline == "async_overlap" else "0") >= 3
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert ("parked cohort" in legend) == (pipeline == "async_overlap")
    assert ("sub-batch 1: light" in legend) == (pipeline == "asymmetric")
    assert figure_svg(figure).startswith("<svg")


def test_kinds_and_sub_batches_differ_in_colour(clock: Clock) -> None:
    (snapshot,) = snapshots(clock, ["asymmetric"] * 2)
    panel = pipeline_picture(snapshot).axes[1]
    assert len({bar.get_facecolor() for bar in rectangles(panel)}) == 6


def test_a_lane_of_ones_own_is_shown(clock: Clock) -> None:
    trace = TraceRecorder(50)
    run_iteration(trace, clock, 0, "mine", layers=2)
    trace.span("network", "send", 100.001, 100.002)
    (snapshot,) = take_snapshots(trace)
    labels = [text.get_text() for text in pipeline_picture(snapshot).axes[0].get_yticklabels()]
    assert labels == [*LANES, "network"]
