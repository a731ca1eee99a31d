"""What the command leaves of real runs under every pipeline: traces, pictures, busy shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftapex.core.trace import LANES
from swiftapex.run_experiment import main

PIPELINES = ("sequential", "asymmetric", "symmetric", "async_overlap")
LAYER_WORK = {"pre_attn", "attention", "post_attn", "attend"}
NUM_LAYERS = 4
EXPERIMENT = """
name: traced
model: {architecture: tiny, weights: dummy}
engine: {device: cpu, gpu: {kv_tokens: 128}, cpu: {kv_tokens: 4096}, block_size: 16}
runs:
  - {name: sequential, pipeline: sequential}
  - {name: asymmetric, pipeline: asymmetric}
  - {name: symmetric, pipeline: symmetric}
  - {name: async_overlap, pipeline: async_overlap}
workload: {kind: synthetic, num_requests: 6, input_len: 20, output_len: 12, ignore_eos: true}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("traced")
    (base / "exp.yaml").write_text(EXPERIMENT)
    assert main([str(base / "exp.yaml"), "--out", str(base / "out")]) == 0
    return next((base / "out" / "traced").iterdir())


def spans(folder: Path, run: str) -> list[tuple[str, dict[str, Any]]]:
    """Every span with the name of its lane."""
    events = json.loads((folder / run / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == list(LANES)
    return [(lanes[event["tid"]], event) for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_spans_say_layer_and_sub_batch(folder: Path, pipeline: str) -> None:
    found = spans(folder, pipeline)
    work = [(lane, event) for lane, event in found if event["name"] in LAYER_WORK]
    assert {event["args"]["layer"] for _, event in work} == set(range(NUM_LAYERS))
    assert all(lane == ("CPU attention" if e["name"] == "attend" else "GPU") for lane, e in work)
    whole = [e["args"] for _, e in found if str(e["name"]).startswith("iteration")]
    assert {args["pipeline"] for args in whole} == {pipeline}
    on_cpu = {event["args"]["sub_batch"] for _, event in work if event["name"] == "attend"}
    expected: dict[str, set[int | str]] = {
        "sequential": set(),
        "symmetric": {0, 1},
        "async_overlap": {"parked"},
    }
    if pipeline in expected:
        assert on_cpu == expected[pipeline]
    else:
        assert 1 in on_cpu
    linear = {event["args"]["sub_batch"] for lane, event in work if lane == "GPU"}
    two = pipeline in ("asymmetric", "symmetric")
    assert linear - {"parked"} == ({0, 1} if two else {0})
    assert sum(event["name"] == "logits" for _, event in found) > 0


def test_summary_has_busy_shares_and_shares_of_pipelines(folder: Path) -> None:
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    assert len({run["outputs_sha256"] for run in runs}) == 1
    for run in runs:
        assert 0 < run["gpu_busy"] <= 1
        assert run["strategy_share"][run["name"]] == 1.0
        assert run["prediction_error_p50"] > 0
        if run["name"] == "sequential":
            assert run["cpu_busy"] is None
            assert run["cpu_token_share"] == 0
        else:
            assert 0 < run["cpu_busy"] <= 1
            assert 0 < run["cpu_token_share"] <= 1


def test_the_report_pictures_every_pipeline(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count('<figure class="pipeline">') == 4
    assert "No picture of" not in text
    assert text.count("parked cohort") == 1
    for name in ("Sequential:", "(NEO)", "(FastDecode)", "(APEX)"):
        assert text.count(name) == 1
