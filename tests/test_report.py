"""Metrics against values worked out by hand, and the files that are written."""

from __future__ import annotations

import csv
import hashlib
import json
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from swiftapex.config.load import RunPlan
from swiftapex.config.schema import (
    EngineConfig,
    GpuConfig,
    ModelSection,
    SloConfig,
    WindowConfig,
    WorkloadConfig,
)
from swiftapex.core.plan import Inequality
from swiftapex.core.records import BusyTimes, IterationRecord
from swiftapex.core.trace import Span, TracedIteration
from swiftapex.report import environment
from swiftapex.report.environment import describe_environment, git_revision, gpus_of
from swiftapex.report.files import RunResult, create_folder, write_run, write_summary
from swiftapex.report.html import samples, write_report
from swiftapex.report.metrics import DEFINITIONS, outputs_sha256, percentile, summarize
from swiftapex.report.snapshots import Snapshot
from swiftapex.report.table import duration, results_table
from swiftapex.report.warnings import warnings
from swiftapex.report.words import fastest, short_labels, verdicts, what_happened, why
from swiftapex.workloads.energy import EnergyUse
from swiftapex.workloads.meter import BusySpan
from swiftapex.workloads.replay import RequestOutcome, RunLog

START_S = 1000.0  # the engine's clock at the first arrival


def iteration(index: int, at_s: float, **values: Any) -> IterationRecord:
    fields = {
        "duration_us": 1000.0,
        "schedule_us": 10.0,
        "pipeline": "sequential",
        "prefill_tokens": 0,
        "gpu_decodes": 0,
        "cpu_decodes": 0,
        "parked": 0,
        "moves": 0,
        "completed_tokens": 1,
        "waiting": 0,
        "running": 1,
        "gpu_blocks_free": 3,
        "cpu_blocks_free": 4,
        "preemptions": 0,
    } | values
    return IterationRecord(index=index, start_s=START_S + at_s, **fields)  # type: ignore[arg-type]


OUTCOMES = (
    # ttft 1000, e2e 3000, tpot (3000 - 1000) / 2 = 1000, per token 1000, NEO's 3000 / 7
    RequestOutcome(0, "hello", 4, 0.0, "length", (5, 6, 7), (1.0, 2.0, 3.0), "a b c"),
    # ttft 500, e2e 500, no tpot, per token 500, NEO's 500 / 10
    RequestOutcome(1, None, 9, 0.5, "stop", (2,), (1.0,), ""),
    # failed after two tokens, and refused: in nothing but num_failed and the hash
    RequestOutcome(2, None, 9, 0.5, "error", (8, 9), (9.0, 10.0), "", "NaN"),
    RequestOutcome(3, None, 0, 0.5, "error", error="empty prompt"),
    # ttft 1500, e2e 4500, tpot 3000, per token 2250, NEO's 4500 / 5
    RequestOutcome(4, "again", 3, 0.5, "length", (1, 1), (2.0, 5.0), "x"),
)
ITERATIONS = (
    iteration(0, 0.0, gpu_decodes=2, cpu_decodes=1, predicted_us=900.0),
    iteration(1, 1.0, gpu_decodes=1, pipeline="asymmetric", predicted_us=1500.0),
    iteration(2, 2.0, cpu_decodes=4, pipeline="mine", predicted_us=1000.0),
    iteration(3, 3.0),
)
LOG = RunLog(START_S, OUTCOMES, ITERATIONS)


def test_summary_by_hand() -> None:
    summary = summarize(LOG)
    assert summary["num_requests"] == 5
    assert summary["num_failed"] == 2
    assert summary["num_unfinished"] == 0
    assert summary["num_truncated"] is None  # nobody said
    assert summary["output_tokens"] == 6
    assert summary["duration_s"] == 5.0
    assert summary["output_tokens_per_s"] == pytest.approx(1.2)
    assert summary["requests_per_s"] == pytest.approx(0.6)
    assert summary["ttft_ms"] == pytest.approx(
        {"mean": 1000.0, "p50": 1000.0, "p90": 1400.0, "p99": 1490.0}
    )
    assert summary["tpot_ms"] == pytest.approx(
        {"mean": 2000.0, "p50": 2000.0, "p90": 2800.0, "p99": 2980.0}
    )
    assert summary["e2e_ms"]["mean"] == pytest.approx(8000 / 3)
    assert summary["per_token_latency_ms"]["mean"] == pytest.approx(1250.0)
    assert summary["per_token_latency_ms"]["p50"] == pytest.approx(1000.0)
    assert summary["per_token_latency_neo_ms"]["p50"] == pytest.approx(3000 / 7)
    assert summary["strategy_share"] == {
        "sequential": 0.5,
        "asymmetric": 0.25,
        "async_overlap": 0.0,
        "symmetric": 0.0,
        "mine": 0.25,
    }
    assert summary["cpu_token_share"] == pytest.approx(5 / 8)
    assert summary["prediction_error_p50"] == pytest.approx(0.1)
    assert summary["gpu_busy"] is summary["cpu_busy"] is None
    assert summary["slo_attainment"] is None


def test_busy_shares_by_hand() -> None:
    # 2 of 8 s, and 1 of 8 s; counted from where the measured part of the run begins
    span = BusySpan(2.0, BusyTimes(1.0, 0.5), 10.0, BusyTimes(3.0, 1.5))
    summary = summarize(replace(LOG, busy=span))
    assert (summary["gpu_busy"], summary["cpu_busy"]) == (0.25, 0.125)
    no_cpu_side = replace(span, begin=BusyTimes(1.0, None), end=BusyTimes(3.0, None))
    summary = summarize(replace(LOG, busy=no_cpu_side))
    assert (summary["gpu_busy"], summary["cpu_busy"]) == (0.25, None)
    assert summarize(replace(LOG, busy=replace(span, end_s=2.0)))["gpu_busy"] is None


def test_hash_by_hand() -> None:
    ids = [5, 6, 7, -1, 2, -1, 8, 9, -1, -1, 1, 1, -1]
    expected = hashlib.sha256(struct.pack("<13i", *ids)).hexdigest()
    assert summarize(LOG)["outputs_sha256"] == expected
    assert outputs_sha256([]) == hashlib.sha256().hexdigest()


def test_what_cannot_be_measured_is_null() -> None:
    failed = tuple(outcome for outcome in OUTCOMES if outcome.failed)
    summary = summarize(RunLog(START_S, failed, ()))
    assert summary["output_tokens"] == 0
    nothing = {"mean": None, "p50": None, "p90": None, "p99": None}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "per_token_latency_ms"):
        assert summary[name] == nothing
    for name in ("duration_s", "output_tokens_per_s", "requests_per_s", "strategy_share"):
        assert summary[name] is None
    assert summary["cpu_token_share"] is None
    assert summary["prediction_error_p50"] is None


def test_unfinished_requests_have_no_hash() -> None:
    open_request = replace(OUTCOMES[4], finish_reason="unfinished")
    summary = summarize(RunLog(START_S, (*OUTCOMES[:4], open_request), ITERATIONS, True))
    assert summary["num_unfinished"] == 1
    assert summary["outputs_sha256"] is None
    assert (summary["output_tokens"], summary["duration_s"]) == (4, 3.0)


def test_window_by_hand() -> None:
    # [0.9, 2.9): tokens at 1.0, 2.0, 1.0, 2.0; only request 1 completes; iterations 1 and 2.
    summary = summarize(LOG, WindowConfig(warmup_s=0.9, measure_s=2.0))
    assert summary["output_tokens"] == 4
    assert summary["duration_s"] == pytest.approx(1.1)  # the run's tokens end inside the window
    assert summary["ttft_ms"]["mean"] == 500.0
    assert summary["strategy_share"]["asymmetric"] == 0.5

    open_request = replace(OUTCOMES[4], finish_reason="unfinished")
    log = RunLog(START_S, (*OUTCOMES[:4], open_request), ITERATIONS)
    summary = summarize(log, WindowConfig(warmup_s=0.9, measure_s=2.0))
    assert summary["duration_s"] == pytest.approx(2.0)
    assert summary["output_tokens_per_s"] == pytest.approx(2.0)
    assert summary["requests_per_s"] == pytest.approx(0.5)


def test_slo_attainment_by_hand() -> None:
    assert summarize(LOG, slo=SloConfig(ttft_ms=1200))["slo_attainment"] == pytest.approx(2 / 3)
    both = SloConfig(ttft_ms=1200, tpot_ms=999)
    assert summarize(LOG, slo=both)["slo_attainment"] == pytest.approx(1 / 3)


def test_percentiles_interpolate() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)


SNAPSHOT = Snapshot(
    "asymmetric",
    (TracedIteration(1, "asymmetric", 5.0, 6.0),),
    (Span("GPU", "pre_attn", 5.0, 5.5, {"layer": 0, "sub_batch": 0}),),
)


def result(name: str = "gpu-only", log: RunLog = LOG, **sweep: Any) -> RunResult:
    plan = RunPlan(
        name=name,
        folder=name,
        policy="gpu_only",
        policy_args={},
        model=ModelSection(architecture="tiny", weights="dummy"),
        engine=EngineConfig(),
        workload=WorkloadConfig(path="p.jsonl"),
        seed=0,
        sweep=sweep,
    )
    return RunResult(plan, log, gpu_blocks=8, cpu_blocks=16, snapshots=(SNAPSHOT,))


def test_folders_are_never_reused(tmp_path: Path) -> None:
    folders = [create_folder(tmp_path, "name") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() and folder.parent == tmp_path / "name" for folder in folders)


def test_run_files(tmp_path: Path) -> None:
    write_run(tmp_path, result())
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").open(encoding="utf-8")]
    assert [request["output_tokens"] for request in requests] == [3, 1, 2, 0, 2]
    assert requests[0]["ttft_ms"] == 1000.0
    assert requests[1]["tpot_ms"] is None
    assert requests[2]["e2e_ms"] is None
    assert requests[3]["error"] == "empty prompt"
    lines = [json.loads(line) for line in (tmp_path / "iterations.jsonl").open()]
    assert [line["start_s"] for line in lines] == [0.0, 1.0, 2.0, 3.0]
    assert lines[1]["predicted_us"] == 1500.0
    assert "block_size: 32" in (tmp_path / "run.yaml").read_text()


def test_latencies_of_a_request_that_began_before_the_run(tmp_path: Path) -> None:
    times = (1.0, 3.0, 4.0)  # 1.5 s a token; 20 came before
    warm = RequestOutcome(0, None, 9, 0.0, "length", (7,) * 23, times, progress=20)
    last = replace(warm, token_times_s=(1.0,), progress=22)
    cold = replace(warm, output_ids=(7,) * 3, progress=0, truncated=True)
    write_run(tmp_path, result(log=RunLog(START_S, (warm, last, cold), ())))
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").open()]
    assert [(line["progress"], line["output_tokens"]) for line in lines] == [
        (20, 23), (22, 23), (0, 3),
    ]  # fmt: skip
    assert [line["ttft_ms"] for line in lines] == [None, None, 1000.0]
    assert [line["tpot_ms"] for line in lines] == [1500.0, None, 1500.0]
    assert [line["e2e_ms"] for line in lines] == [None, None, 4000.0]
    assert [line["truncated"] for line in lines] == [None, None, True]


def test_summary_files(tmp_path: Path) -> None:
    runs = [result(), result("other", **{"engine.block_size": 16})]
    write_summary(tmp_path, "example", runs, {"third": "out of memory"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["name"] == "example"
    assert [run["name"] for run in summary["runs"]] == ["gpu-only", "other"]
    assert summary["runs"][1]["sweep"] == {"engine.block_size": 16}
    assert summary["failed_runs"] == [{"folder": "third", "error": "out of memory"}]
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ttft_ms.p50"] for row in rows] == ["1000.0", "1000.0"]
    assert rows[1]["sweep.engine.block_size"] == "16"
    assert rows[0]["gpu_busy"] == ""


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href")]


def test_report_is_one_file_with_plots_samples_and_definitions(tmp_path: Path) -> None:
    hostile = replace(OUTCOMES[0], prompt="<script>alert(1)</script>", text="1 < 2 & 3")
    log = RunLog(START_S, (hostile, *OUTCOMES[1:]), ITERATIONS)
    path = tmp_path / "report.html"
    runs = [result(log=log), result("other", log)]
    write_report(path, "example", "Why.", runs, {"third": "no"}, {"cpu": "x"}, "seed: 0")
    text = path.read_text(encoding="utf-8")
    parser = _Tags()
    parser.feed(text)
    assert parser.tags.count("svg") == 6 + 2 * (4 + 1)
    assert parser.tags.count("figure") == 2
    assert "No picture of sequential, mine: none of the traced" in text
    assert "Asymmetric pipelining (NEO)" in text
    assert "5 of 8 decoded tokens had their attention on the CPU" in text
    assert "All 2 runs generated the same tokens." in text
    assert "script" not in parser.tags
    assert all(link is None or link.startswith("#") for link in parser.links)
    for expected in ("1 &lt; 2 &amp; 3", "gpu-only, other", "Run third failed: no", "seed: 0"):
        assert expected in text
    for term in DEFINITIONS:
        assert f"<code>{term}</code>" in text


def test_long_names_are_short_in_plots_and_whole_in_tables(tmp_path: Path) -> None:
    names = ["a" * 99 + end for end in "xyz"] + ["a" * 49 + "b" * 2 + "a" * 48 + "x", "short"]
    shown = short_labels(names)
    assert shown[-1] == "short" and len(set(shown)) == 5
    assert all(len(text) <= 30 for text in shown)
    assert shown[0] == "a" * 14 + "\N{HORIZONTAL ELLIPSIS}" + "a" * 14 + "x"
    assert shown[3].endswith(" #2")  # its ends are those of the first
    path = tmp_path / "report.html"
    write_report(path, "example", "", [result(name) for name in names[:2]], {}, {}, "")
    text = path.read_text(encoding="utf-8")
    svgs = [part.partition("</svg>")[0] for part in text.split("<svg")[1:]]
    assert any(shown[1] in svg for svg in svgs)
    assert not any(names[0] in svg for svg in svgs)
    assert f"<td>{names[0]}</td>" in text


def test_report_without_results(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", "x", "", [], {"run": "broken"}, {}, "")
    assert "Run run failed: broken" in (tmp_path / "r.html").read_text()


def test_report_says_once_what_engines_note(tmp_path: Path) -> None:
    noted = replace(result(), notes=("KV is <pageable>.",))
    runs = [noted, result("other"), replace(noted, plan=replace(noted.plan, name="third"))]
    write_report(tmp_path / "r.html", "x", "", runs, {}, {}, "")
    text = (tmp_path / "r.html").read_text()
    assert text.count("gpu-only, third: KV is &lt;pageable&gt;.") == text.count("pageable") == 1


def test_report_marks_energy_of_a_larger_gpu(tmp_path: Path) -> None:
    busy = BusyTimes(None, None)
    span = BusySpan(0.0, busy, 5.0, busy, EnergyUse(1234.0, None))
    small = result(log=replace(LOG, busy=span))
    part = EngineConfig(gpu=GpuConfig(sm_count=8))
    large = replace(small, plan=replace(small.plan, name="part", engine=part))
    for runs, marked in (([small], False), ([small, large], True)):
        write_report(tmp_path / "r.html", "x", "", runs, {}, {}, "")
        text = (tmp_path / "r.html").read_text()
        assert "<td>1234.0</td>" in text
        assert ("* Of a large GPU" in text) is marked


def test_samples_join_runs_with_equal_texts() -> None:
    other = replace(OUTCOMES[0], text="different")
    found = samples([result(), result("same"), result("other", RunLog(START_S, (other,), ()))])
    assert found[0] == ("hello", [("gpu-only, same", "a b c"), ("other", "different")])
    assert [prompt for prompt, _ in found] == ["hello", "again"]


def test_table_is_readable() -> None:
    runs = [result().summary(), result("other").summary()]
    lines = results_table(runs).splitlines()
    assert lines[0].split("  ")[0] == "run"
    assert "3 of 5, 2 failed" in lines[2]
    assert "1.2" in lines[2]
    assert "1.00 s" in lines[2]
    assert lines[-1] == "All 2 runs generated the same tokens."
    runs[1]["outputs_sha256"] = "other"
    assert results_table(runs).endswith(
        "did not all generate the same tokens (outputs_sha256 in summary.json): other differs from "
        "the other 1 run."
    )
    assert [duration(value) for value in (None, 0.1234, 99.9, 512.3, 1500)] == [
        "-", "0.123 ms", "99.9 ms", "512 ms", "1.50 s",
    ]  # fmt: skip


def test_sentences_about_runs() -> None:
    assert what_happened([]) == "No iteration ran."
    assert what_happened(ITERATIONS) == (
        "Of 4 iterations, 2 ran sequentially, 1 ran with asymmetric pipelining and 1 ran with "
        "mine; 5 of 8 decoded tokens had their attention on the CPU; no request was moved between "
        "the sides, no request was preempted."
    )
    moved = [iteration(0, 0.0, gpu_decodes=1, moves=2), iteration(1, 1.0, moves=1, preemptions=1)]
    assert what_happened(moved) == (
        "2 iterations ran sequentially; 0 of 1 decoded token had their attention on the CPU; "
        "requests were moved between the sides 3 times, requests were preempted once."
    )
    runs = [result("slow").summary(), result("quick").summary()]
    runs[1]["output_tokens_per_s"] *= 2
    assert fastest(runs) == "Fastest: quick with 2.4 output tokens/s: 2.00 times slow."
    for run in runs:
        run |= {"cpu_token_share": 0.0, "policy": "apex"}
    idle = " The CPU decoded nothing in any of them: these differences are not those of hybrid "
    assert fastest(runs) == (
        f"Fastest: quick with 2.4 output tokens/s: 2.00 times slow.{idle}execution."
    )
    alone = [run | {"policy": "gpu_only"} for run in runs]
    assert fastest(alone) == "Fastest: quick with 2.4 output tokens/s: 2.00 times slow."
    assert fastest(runs[:1]) is None
    runs[1]["output_tokens_per_s"] = None
    assert fastest(runs) is None


def test_the_fastest_is_sought_among_runs_of_one_workload() -> None:
    def run(name: str, rate: float, value: int, **settings: Any) -> dict[str, Any]:
        found = result(name, **{"workload.output_len": value})
        workload = WorkloadConfig(path="p.jsonl", output_len=value)
        plan = replace(found.plan, workload=workload, **settings)
        return replace(found, plan=plan).summary() | {"output_tokens_per_s": rate}

    runs = [run("a", 10, 50), run("b", 20, 50), run("a", 90, 500), run("b", 30, 500)]
    assert verdicts(runs) == [
        "Fastest: b (output_len=50) with 20.0 output tokens/s: 2.00 times a (output_len=50).",
        "Fastest: a (output_len=500) with 90.0 output tokens/s: 3.00 times b (output_len=500).",
    ]
    assert verdicts(runs[1:3]) == []  # alone with their workload
    cut = EngineConfig(max_model_len=64)
    others = ({"seed": 1}, {"model": ModelSection(architecture="llama2-7b", weights="dummy")},
              {"engine": cut})  # fmt: skip
    for other in others:
        assert verdicts([run("a", 10, 50), run("b", 20, 50, **other)]) == []
    same = {"engine": EngineConfig(block_size=16), "policy": "apex"}
    assert len(verdicts([run("a", 10, 50), run("b", 20, 50, **same)])) == 1


def with_window(window: dict[str, float], log: RunLog = LOG) -> RunResult:
    run = result(log=log)
    workload = WorkloadConfig.model_validate({"path": "p.jsonl", "window": window})
    return replace(run, plan=replace(run.plan, workload=workload))


def test_an_empty_window_is_said_with_what_to_change(tmp_path: Path) -> None:
    late = with_window({"warmup_s": 60.0, "measure_s": 1.0})
    assert warnings(late) == [
        "Nothing was measured: the window began at 60 s (workload.window.warmup_s), and the last "
        "token came at 10 s; it needs a smaller warmup_s, or a larger workload.num_requests."
    ]
    (few,) = warnings(with_window({"middle": 0.1}, RunLog(START_S, OUTCOMES[:2], ITERATIONS)))
    assert few == (
        "Nothing was measured: the middle 0.1 of 2 completed requests holds none; it needs a "
        "larger workload.num_requests or workload.window.middle."
    )
    slow = (replace(OUTCOMES[4], finish_reason="unfinished", token_times_s=(), output_ids=()),)
    (none,) = warnings(
        with_window({"warmup_s": 0.5, "measure_s": 1.0}, RunLog(START_S, slow, ITERATIONS))
    )
    assert "no token came before it ended; it needs a larger measure_s" in none
    for holds in ({"middle": 0.5}, {"warmup_s": 0.9, "measure_s": 2.0}):
        assert warnings(with_window(holds)) == []
    assert warnings(result()) == []
    disturbed = result()
    span = BusySpan(0.0, BusyTimes(None, None), 5.0, BusyTimes(None, None), others=0.34)
    disturbed = replace(disturbed, log=replace(disturbed.log, busy=span))
    (beside,) = warnings(disturbed)
    assert beside.startswith("Other processes took 34% of the CPUs' time meanwhile")
    ranks = replace(disturbed.plan, engine=EngineConfig(tensor_parallel_size=2))
    assert warnings(replace(disturbed, plan=ranks)) == []  # they are processes of their own
    write_report(tmp_path / "r.html", "x", "", [late], {}, {}, "")
    text = (tmp_path / "r.html").read_text()
    assert "gpu-only: Nothing was measured: the window began at 60 s" in text
    assert (
        text.count("not measured</text>") == 1
    )  # in the plot of throughput, where others have rates


def test_truncated_requests_are_counted_and_said(tmp_path: Path) -> None:
    cut = [replace(o, truncated=o.index in (1, 4)) for o in OUTCOMES]
    run = result(log=RunLog(START_S, tuple(cut), ITERATIONS))
    assert run.summary()["num_truncated"] == 2
    said = "2 of 5 requests were cut to max_model_len (over_length: truncate)."
    assert warnings(run) == [said]
    write_report(tmp_path / "r.html", "x", "", [run], {}, {}, "")
    assert f"gpu-only: {said}" in (tmp_path / "r.html").read_text()


def test_environment_is_described(tmp_path: Path) -> None:
    found = describe_environment()
    assert found["packages"]["torch"] is not None
    assert found["cpu"]["usable_threads"] >= 1
    assert found["memory"]["total_bytes"] > 2**28
    json.dumps(found)
    assert git_revision(tmp_path) is None


def weighed(index: int, pipeline: str, left: float, right: float) -> IterationRecord:
    return iteration(
        index,
        float(index),
        pipeline=pipeline,
        predicted_us=1100.0,
        candidates_us={"sequential": 900.0, "asymmetric": 1100.0},
        inequality=Inequality("requests per ms: asymmetric > GPU-only (Eq. 5)", left, right),
    )


WEIGHED = (
    weighed(0, "asymmetric", 12.0, 10.0),
    weighed(1, "sequential", 8.0, 10.0),
    weighed(2, "sequential", 7.0, 9.0),
    iteration(3, 3.0, candidates_us={"sequential": 900.0}, predicted_us=900.0),
    iteration(4, 4.0, candidates_us={"asymmetric": 900.0}, pipeline="asymmetric"),
)


def test_sentences_about_why_the_cpu_was_used() -> None:
    assert why(ITERATIONS) is None  # nothing was weighed
    text = why(WEIGHED)
    assert text == (
        "In 1 iteration there was no request on the CPU that it could have decoded in time, so "
        "that the GPU ran alone. Requests per ms: asymmetric > GPU-only (Eq. 5): this held in 1 of "
        "3 cases (medians 8 against 10), and the CPU was used in 1 of them. 1 iteration had no GPU "
        "rows, so that there was no GPU-only."
    )


def test_predictions_and_choices_are_drawn_and_kept(tmp_path: Path) -> None:
    run = result(log=RunLog(START_S, OUTCOMES, WEIGHED))
    write_report(tmp_path / "report.html", "quick", "", [run], {}, {}, "name: quick")
    html = (tmp_path / "report.html").read_text()
    for words in ("Predicted against measured time", "Strategies weighed", "this held in 1 of 3"):
        assert words in html
    write_run(tmp_path, run)
    lines = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]
    assert lines[0]["inequality"]["left"] == 12.0 and lines[3]["inequality"] is None
    assert lines[0]["candidates_us"] == {"sequential": 900.0, "asymmetric": 1100.0}


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        (None, ["0: A, 1", "1: B, 2"]),
        ("1", ["1: B, 2"]),
        ("1,0", ["1: B, 2", "0: A, 1"]),
        ("GPU-bb", ["GPU-bb: B, 2"]),
        ("", []),
        ("1,7,0", ["1: B, 2"]),  # CUDA ends at the first that there is not
    ],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch: Any, wanted: str | None, seen: Any) -> None:
    gpus = [("GPU-aa11", "A, 1"), ("GPU-bb22", "B, 2")]
    monkeypatch.setattr(environment, "_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if wanted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    found = describe_environment()
    assert found["gpus"] == ["A, 1", "B, 2"] and found["visible_gpus"] == seen
    assert gpus_of(found, 1) == seen[:1] and gpus_of(found, 0) == []
