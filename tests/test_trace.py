"""The recorder of Chrome traces: windows near the middle, bounded memory, valid output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftapex.core.trace import GPU, LANES, TraceRecorder


def record(total: int, size: int) -> tuple[TraceRecorder, int]:
    """A recorder after `total` iterations of two spans, and the most iterations it ever held."""
    trace, most = TraceRecorder(size), 0
    for index in range(total):
        trace.begin_iteration(index)
        trace.span("GPU", "pre_attn", index, index + 0.25, layer=0)
        trace.span("CPU attention", "attend", index + 0.25, index + 0.75)
        most = max(most, len(trace._spans))
    return trace, most


@pytest.mark.parametrize("total", [1, 3, 10, 11, 37, 90, 400, 999, 5_000, 31_415])
def test_window_is_near_the_middle(total: int) -> None:
    trace, most = record(total, size=10)
    chosen = trace.recorded_iterations()
    assert len(chosen) == min(total, 10)
    assert chosen[-1] < total
    if total > 10:
        middle = (total - 10) / 2
        assert abs(chosen[0] - middle) <= max(1, 0.13 * middle)
    assert most <= 160


def test_short_runs_are_centred_exactly() -> None:
    assert record(30, size=10)[0].recorded_iterations() == range(10, 20)


def test_written_file_holds_all_lanes_and_the_chosen_spans(tmp_path: Path) -> None:
    trace, _ = record(500, size=10)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(lanes)[:4] == list(LANES)
    spans = [e for e in events if e["ph"] == "X"]
    assert sum(e["name"] == "pre_attn" for e in spans) == 10
    assert sum(e["name"].startswith("iteration") for e in spans) == 10
    attend = next(e for e in spans if e["name"] == "attend")
    assert attend["dur"] == 500_000
    assert attend["tid"] == lanes["CPU attention"]
    assert next(e for e in spans if e["name"] == "pre_attn")["args"] == {"layer": 0}


def test_iterations_are_tagged_with_their_pipeline(tmp_path: Path) -> None:
    trace = TraceRecorder(10)
    for index in range(4):
        trace.begin_iteration(index)
        trace.span("GPU", "pre_attn", index, index + 1)
        trace.tag("asymmetric" if index == 2 else "sequential")
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tags = [e["args"] for e in events if str(e["name"]).startswith("iteration")]
    ran = {tag["iteration"]: tag["pipeline"] for tag in tags}
    assert ran == {0: "sequential", 1: "sequential", 2: "asymmetric", 3: "sequential"}


def test_an_example_of_every_pipeline_outlives_the_windows(tmp_path: Path) -> None:
    """Asymmetric at the start only: the pair with work on the CPU is kept, with all its work."""
    trace, most = TraceRecorder(10), 0
    for index in range(5_000):
        trace.begin_iteration(index)
        trace.span("GPU", "pre_attn", index, index + 0.5, sub_batch=0)
        if index in (3, 4, 5):
            trace.span("CPU attention", "attend", index - 0.25, index + 0.25, sub_batch=1)
        trace.tag("asymmetric" if index < 8 else "sequential")
        most = max(most, len(trace._spans))
    assert [iteration.index for iteration in trace.example("asymmetric")] == [4, 5]
    assert [span.name for span in trace.spans_between(4.1, 5.1)] == [
        "pre_attn", "attend", "pre_attn", "attend",
    ]  # fmt: skip
    first, second = trace.example("sequential")
    assert abs(first.index - 2_500) < 400
    assert second.index == first.index + 1
    assert trace.example("symmetric") == []
    assert trace.pipelines() == ["asymmetric", "sequential"]
    assert most <= 166
    chosen = trace.recorded_iterations()
    assert len(chosen) == 10
    assert abs(chosen[0] - 2_495) < 400


def test_zero_iterations_record_nothing(tmp_path: Path) -> None:
    trace, most = record(100, size=0)
    assert not trace.active
    assert most == 0
    trace.write(tmp_path / "trace.json")
    assert all(
        e["ph"] == "M" for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    )


def test_a_trace_of_no_iterations_can_be_written(tmp_path: Path) -> None:
    TraceRecorder(5).write(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_recorder_that_restarts_forgets_and_records_from_there(tmp_path: Path) -> None:
    trace = TraceRecorder(0)
    for index in range(7):
        trace.begin_iteration(index)
        assert not trace.active
    trace.restart(4)
    for index in range(7, 10):
        trace.begin_iteration(index)
        trace.tag("sequential")
        trace.span(GPU, "embed", 1.0 + index, 1.5 + index)
    assert trace.recorded_iterations() == range(7, 10)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["name"] == "embed"]) == 3
    trace.restart(0)
    assert not trace.active and trace.pipelines() == []
    trace.begin_iteration(10)
    assert not trace.active
