"""Figures: their files, what is held against the papers, and the five that must run, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine

from swiftapex.core.errors import ConfigError
from swiftapex.core.request import FinishReason
from swiftapex.core.trace import TraceRecorder
from swiftapex.figures.draw import draw
from swiftapex.figures.notes import notes
from swiftapex.figures.points import Point, compare, curve
from swiftapex.figures.reproduce import reproduce
from swiftapex.figures.serving import plan_points
from swiftapex.figures.spec import FigureConfig, load_figure
from swiftapex.figures.tables import measured_points, paper_against_measured

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "experiments").glob("*/*.yaml"))
FIGURE = """
figure: paper/fig1
title: a figure
source: a paper
about: what it shows
x: {label: length}
y: {label: tokens/s, metric: output_tokens_per_s}
reported:
  - {what: gain, value: [10, 20], source: abstract, measured: {of: b, over: a}}
  - what: one place
    value: 7
    unit: ms
    source: table
    measured: {of: b, at: [4], metric: ttft_ms.p50}
  - {what: elsewhere, value: 7, source: table, measured: {of: b, at: [999]}}
  - {what: not asked for, value: 1, source: table}
budget_s: 60
experiment:
  model: {architecture: tiny, weights: dummy}
  engine: {device: reference, gpu: {kv_tokens: 4096}, cpu: {kv_tokens: 0}}
  workload: {kind: synthetic, num_requests: 4, input_len: 4, output_len: 6}
runs:
  - {name: a, policy: gpu_only}
  - {name: b, pipeline: sequential}
points:
  - {x: 2, set: {workload.output_len: 2}}
  - {x: 4, set: {workload.output_len: 4}}
variants:
  small: {budget_s: 5, note: smaller, changes: {experiment: {workload: {num_requests: 2}}}}
"""


class ReusedEngine(FakeEngine):
    """A fake engine that can be used again."""

    reused = 0

    def reuse(self, policy: str, policy_args: Any) -> None:
        self.reused += 1
        for request in self._open:
            request.finish_reason = FinishReason.ABORT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "fig.yaml").write_text(FIGURE)
    return tmp_path / "fig.yaml"


def points(a: tuple[float, float], b: tuple[float, float]) -> list[Point]:
    return [
        Point(series, x, {"output_tokens_per_s": rate, "ttft_ms": {"p50": 3.0}})
        for series, rates in (("a", a), ("b", b))
        for x, rate in zip((2, 4), rates, strict=True)
    ]


def test_what_is_held_against_the_paper(path: Path) -> None:
    figure = load_figure(path)
    gain, one, elsewhere, unasked = compare(figure, points((100, 200), (150, 180)))
    assert gain.measured == pytest.approx((-10.0, 50.0))
    assert one.measured == (3.0, 3.0)
    assert elsewhere.measured is unasked.measured is None
    rows = paper_against_measured([gain, one, elsewhere])
    assert rows[1] == ("gain", "+10 .. +20 %", "-10 .. +50 %", "abstract")
    assert rows[2] == ("one place", "7 ms", "3 ms", "table")
    assert rows[3][2] == "not measured"


def test_what_is_off_a_steady_state_is_marked(path: Path) -> None:
    balances = {("a", 2): 1.0, ("a", 4): 1.2, ("b", 2): 0.95, ("b", 4): None}
    found = [
        Point(p.series, p.x, {**p.values, "steady_balance": balances[p.series, p.x]})
        for p in points((100, 200), (150, 180))
    ]
    figure = load_figure(path)
    assert measured_points(figure, found)[1:] == [("2", "100", "150"), ("4", "200*", "180")]
    relative = load_figure(path, assignments=["y.per_series=a"])
    assert measured_points(relative, found)[2] == ("4", "1*", "0.9*")
    gain, one, *_ = compare(figure, found)
    assert not gain.is_steady and one.is_steady
    assert paper_against_measured([gain, one])[1][2].endswith("*")
    for form in ("bars", "lines"):
        picture = draw(load_figure(path, assignments=[f"form={form}"]), found, ["a note"])
        (axes,) = picture.axes
        pale = [bar for bar in axes.patches if bar.get_alpha() == 0.45]
        hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
        assert len(pale) + sum(len(line.get_xdata()) for line in hollow) == 1


def test_curves_are_scaled_or_relative(path: Path) -> None:
    found = points((100, 200), (150, 180))
    scaled = load_figure(path, assignments=["y.scale=0.5"])
    assert curve(scaled, found, "b") == {2: 75.0, 4: 90.0}
    relative = load_figure(path, assignments=["y.per_series=a"])
    assert curve(relative, found, "b") == pytest.approx({2: 1.5, 4: 0.9})
    assert measured_points(relative, found)[1] == ("2", "1", "1.5")
    unmeasured = [Point("b", 2, {"output_tokens_per_s": None})]
    assert curve(scaled, unmeasured, "b") == {}


def test_a_variant_is_put_over_the_file(path: Path) -> None:
    small = load_figure(path, "small")
    assert (small.budget_s, small.note) == (5, "smaller")
    assert small.experiment is not None and small.experiment["workload"]["num_requests"] == 2
    assert small.experiment["workload"]["input_len"] == 4
    with pytest.raises(ConfigError, match="expected one of: small"):
        load_figure(path, "large")
    with pytest.raises(ConfigError, match=r"nearest known key: title"):
        load_figure(path, assignments=["titel=x"])


def test_points_share_an_engine_and_equal_runs_are_one(path: Path) -> None:
    planned = plan_points(load_figure(path), path)
    assert [(p.series, p.xs) for p in planned] == [
        ("a", (2,)),
        ("b", (2,)),
        ("a", (4,)),
        ("b", (4,)),
    ]
    assert len({p.engine_key for p in planned}) == 1
    assert len({p.plan.folder for p in planned}) == 4
    at = ["{x: 1, set: {engine.cpu.threads: 1}}", "{x: 2, set: {engine.cpu.threads: 2}}"]
    threads = [f"points=[{', '.join(at)}]", "experiment.engine.device=cuda"]
    alike = plan_points(load_figure(path, assignments=threads), path)
    assert [(p.series, p.xs) for p in alike] == [("a", (1, 2)), ("b", (1, 2))]
    neo = [*threads, "runs=[{name: a, policy: gpu_only}, {name: b, policy: neo}]"]
    mixed = plan_points(load_figure(path, assignments=neo), path)
    assert [(p.series, p.xs) for p in mixed] == [("a", (1, 2)), ("b", (1,)), ("b", (2,))]
    assert len({p.engine_key for p in mixed}) == 3


def test_a_run_may_have_settings_of_its_own_at_a_point(path: Path) -> None:
    own = "points=[{x: 1, set: {seed: 3}, per_run: {b: {seed: 4, workload.warm_start: 2}}}]"
    planned = plan_points(load_figure(path, assignments=[own]), path)
    assert [(p.series, p.plan.seed, p.plan.workload.warm_start) for p in planned] == [
        ("a", 3, False),
        ("b", 4, 2),
    ]
    assert len({p.engine_key for p in planned}) == 1
    stranger = load_figure(path, assignments=["points=[{x: 1, per_run: {c: {seed: 4}}}]"])
    with pytest.raises(ConfigError, match="no run 'c'; known: a, b"):
        plan_points(stranger, path)


def test_a_figure_is_measured_drawn_and_written(path: Path, tmp_path: Path, capsys: Any) -> None:
    engines: list[ReusedEngine] = []

    def factory(plan: object, trace: object) -> Any:
        engines.append(ReusedEngine())
        return engines[-1]

    folder, complete = reproduce(load_figure(path), path, tmp_path / "out", factory)
    assert complete
    (engine,) = engines
    assert engine.reused == 3 and engine.closed
    assert len(engine.added) == 16
    document = json.loads((folder / "figure.json").read_text())
    assert [(p["series"], p["x"], p["output_tokens"]) for p in document["points"]] == [
        ("a", 2, 8), ("b", 2, 8), ("a", 4, 16), ("b", 4, 16),
    ]  # fmt: skip
    assert document["paper_against_measured"][0]["measured"] is not None
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    lines = (folder / "a__0" / "iterations.jsonl").read_text().splitlines()
    assert len(lines) == 2  # of this run alone
    printed = capsys.readouterr().out
    assert "+10 .. +20 %" in printed and "Here: at the paper's size." in printed
    assert printed.startswith((folder / "figure.txt").read_text().rstrip())
    assert (
        "Settings: tiny, auto, dummy weights; device reference, 4096 tokens of KV on the" in printed
    )


def test_a_point_says_what_it_was_measured_with(
    path: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    own = (
        "points=[{x: 1, set: {seed: 3}}, "
        "{x: 2, set: {seed: 3}, per_run: {b: {seed: 4, workload.window.middle: .5}}}]"
    )
    figure = load_figure(path, assignments=[own])
    factory: Any = lambda plan, trace: ReusedEngine()  # noqa: E731
    folder, _ = reproduce(figure, path, tmp_path / "out", factory, ["paper/fig1", "--quick"])
    document = json.loads((folder / "figure.json").read_text())
    settings = {(p["series"], p["x"]): p["settings"] for p in document["points"]}
    assert {key: value["seed"] for key, value in settings.items()} == {
        ("a", 1): 3, ("a", 2): 3, ("b", 1): 3, ("b", 2): 4,
    }  # fmt: skip
    assert settings["b", 2]["set"] == {"seed": 4, "workload.window.middle": 0.5}
    assert settings["b", 2]["workload"]["window"]["middle"] == 0.5
    assert settings["a", 2]["workload"]["warm_start"] is False
    environment = document["environment"]
    assert environment["arguments"] == ["paper/fig1", "--quick"]
    assert datetime.fromisoformat(environment["started"]) <= datetime.now().astimezone()
    assert environment["cuda_visible_devices"] == "" and environment["gpus_used"] == []
    assert environment["sources"]["version"] and len(environment["sources"]["code"]) == 16


@pytest.mark.parametrize("window", ["{middle: 0.4}", "null"])
def test_a_run_that_leaves_nothing_open_is_traced_too(
    path: Path, tmp_path: Path, window: str
) -> None:
    """Behind the window of a middle share; at the middle of a run that is measured whole."""
    traces: list[TraceRecorder] = []
    traced: list[tuple[int, int]] = []

    class Traced(ReusedEngine):
        def step(self) -> Any:
            (trace,) = traces
            trace.begin_iteration(len(self.iterations))
            trace.tag("sequential")
            now_s = time.perf_counter()
            trace.span("GPU", "pre_attn", now_s, now_s + 1e-5, layer=0)
            if trace.active:
                done = sum(request.finish_reason is not None for request in self.added)
                traced.append((len(self.iterations), done))
            return super().step()

    def factory(plan: object, trace: TraceRecorder) -> Any:
        traces.append(trace)
        return Traced()

    # 20 requests that end one after the other
    lengths = "experiment.workload={kind: synthetic, num_requests: 20, input_len: 4, " + (
        f"output_len: {{mean: 200, spread: 0.9}}, window: {window}}}"
    )
    one = ["points=[{x: 1}]", "runs=[{name: a, policy: gpu_only}]", lengths]
    folder, complete = reproduce(
        load_figure(path, assignments=one), path, tmp_path / "out", factory
    )
    assert complete and traced
    first_done = traced[0][1]
    assert first_done >= (14 if window != "null" else 10)
    assert all(done >= first_done for _, done in traced)
    report = (folder / "report.html").read_text()
    assert report.count('class="pipeline"') == 1
    events = json.loads((folder / "a__0" / "trace.json").read_text())["traceEvents"]
    assert any(event["name"] == "pre_attn" for event in events)


def test_a_figure_for_a_gpu_is_refused_at_once_without_one(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for name in ("apex/fig3", "apex/fig6a"):
        file = ROOT / "experiments" / f"{name}.yaml"
        with pytest.raises(ConfigError, match=r"device cuda: no GPU here; --cpu"):
            reproduce(load_figure(file), file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_known_at_all_places_is_said(path: Path) -> None:
    found = points((100, 200), (150, 180))
    lacking = [Point(p.series, p.x, {**p.values, "ttft_ms": {"p50": p.x if p.x == 4 else None}})
               for p in found]  # fmt: skip
    gain = (
        "reported=[{what: w, value: 1, source: s, measured: {of: b, over: a, metric: ttft_ms.p50}}]"
    )
    (row,) = paper_against_measured(compare(load_figure(path, assignments=[gain]), lacking))[1:]
    assert row[2] == "+0 % (1 of 2 points)"


def test_what_stands_under_a_figure(path: Path) -> None:
    cuts = [
        "experiment.model.num_layers=2",
        "experiment.engine.device=cuda",
        "experiment.engine.gpu.sm_count=8",
        "experiment.engine.cpu={kv_memory: 3GiB}",
        "experiment.workload.window={warmup_s: 1, measure_s: 4}",
    ]
    figure = load_figure(path, "small", cuts)
    plans = [point.plan for point in plan_points(figure, path)]
    environment = {
        "cpu": {"model": "a CPU", "usable_threads": 3},
        "gpus_used": ["1: a GPU, 1.2, 9 MiB"],
    }
    assert list(notes(figure, plans, environment)) == [
        "Here: smaller.",
        "Settings: tiny cut to 2 layers, auto, dummy weights; device cuda, 4096 tokens of KV on "
        "the GPU side, 3 GiB of KV on the CPU side; 2 requests, 4 s measured after 1 s.",
        "Machine: a GPU; a CPU, 3 threads; 8 multiprocessors of this large GPU stand for a small "
        "one, whose copies and caches are the large one's.",
    ]


def test_no_point_is_begun_after_the_budget(path: Path, tmp_path: Path) -> None:
    figure = load_figure(path, assignments=["budget_s=0.05"])
    slow = lambda plan, trace: ReusedEngine(step_s=0.05)  # noqa: E731
    folder, complete = reproduce(figure, path, tmp_path / "out", slow)
    assert not complete
    document = json.loads((folder / "figure.json").read_text())
    assert document["left_out"] == ["b at 2", "a at 4", "b at 4"]
    assert "3" in document["notes"][-1] and "budget" in document["notes"][-1]


def test_a_failed_point_leaves_the_others(path: Path, tmp_path: Path) -> None:
    engines: list[ReusedEngine] = []

    def fail_in_the_second_run(engine: FakeEngine, index: int) -> None:
        if index == 2 and engine is engines[0]:  # the first run has two iterations
            engine.fail("out of order")

    def factory(plan: object, trace: object) -> Any:
        engines.append(ReusedEngine(at_step=fail_in_the_second_run))
        return engines[-1]

    folder, complete = reproduce(load_figure(path), path, tmp_path / "out", factory)
    assert not complete
    document = json.loads((folder / "figure.json").read_text())
    assert document["failures"] == {"b__0": "out of order"}
    assert [(p["series"], p["x"]) for p in document["points"]] == [("a", 2), ("a", 4), ("b", 4)]
    assert len(engines) == 2 and engines[0].closed


def test_an_engine_that_cannot_be_had_leaves_the_others(path: Path, tmp_path: Path) -> None:
    runs = "runs=[{name: a, policy: gpu_only}, {name: b, policy: neo}]"

    def factory(plan: Any, trace: object) -> Any:
        if plan.policy == "neo":
            raise MemoryError("no room for KV")
        return ReusedEngine()

    figure = load_figure(path, assignments=[runs])
    folder, complete = reproduce(figure, path, tmp_path / "out", factory)
    assert not complete
    document = json.loads((folder / "figure.json").read_text())
    assert set(document["failures"].values()) == {"MemoryError: no room for KV"}
    assert [(p["series"], p["x"]) for p in document["points"]] == [("a", 2), ("a", 4)]
    assert "Traceback" in (folder / "b__0.error.txt").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_file_is_valid_in_all_its_variants(file: Path) -> None:
    for variant in (None, "quick", "cpu"):
        figure = load_figure(file, variant)
        assert figure.figure == f"{file.parent.name}/{file.stem}"
        assert all(reported.source for reported in figure.reported)
        names = {"cpu", "gpu"} if figure.kernels is not None else set()
        names |= {str(run["name"]) for run in figure.runs}
        for reported in figure.reported:
            where = reported.measured
            assert where is None or {where.of, where.over} - {None} <= names
        if variant == "quick":
            assert figure.budget_s <= 300
            if figure.experiment is not None:  # a point may begin just before the budget's end
                windows = [p.plan.workload.window for p in plan_points(figure, file)]
                last_s = max(w.warmup_s + (w.measure_s or 0) for w in windows if w)
                assert figure.budget_s + last_s + 20 <= 300
        if figure.experiment is not None:
            planned = plan_points(figure, file)
            devices = {p.plan.engine.device for p in planned}
            assert devices == {"cpu" if variant == "cpu" else "cuda"}


def small(figure: str) -> FigureConfig:
    """The cpu variant with shorter windows, fewer points, and threads that need not wait for each
    other on a busy machine."""
    file = ROOT / "experiments" / f"{figure}.yaml"
    if figure == "apex/fig3":
        return load_figure(file, "cpu", ["kernels.batches=[1, 4]", "kernels.seconds=0.02"])
    window = "experiment.workload.window={warmup_s: 0.1, measure_s: 0.3}"
    few = ["experiment.workload.num_requests=60", "experiment.engine.cpu.threads=1"]
    found = load_figure(file, "cpu", [window, *few])
    return found.model_copy(update={"points": found.points[:2]})


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "figure", ["apex/fig3", "apex/fig6a", "apex/fig8", "apex/fig9", "neo/fig10a"]
)
def test_figures_run_on_a_cpu(figure: str, tmp_path: Path) -> None:
    file = ROOT / "experiments" / f"{figure}.yaml"
    folder, complete = reproduce(small(figure), file, tmp_path)
    assert complete
    document = json.loads((folder / "figure.json").read_text())
    assert len(document["points"]) >= 4
    metric = "us" if figure == "apex/fig3" else "output_tokens_per_s"
    for series in {point["series"] for point in document["points"]}:
        numbers = [point[metric] for point in document["points"] if point["series"] == series]
        assert None not in numbers and max(numbers) > 0
    assert (folder / "figure.pdf").stat().st_size > 1000
    assert (folder / "report.html").stat().st_size > 10_000


def test_the_command_names_what_it_knows_and_copies_what_is_small(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "reproduce.py")]
    listed = subprocess.run([*script, "--list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names == sorted(f"{file.parent.name}/{file.stem}" for file in FILES)
    few = ["--cpu", "--out", str(tmp_path), "--copy-to", str(tmp_path / "few")]
    less = ["--set", "kernels.batches=[1]", "--set", "kernels.seconds=0.01"]
    subprocess.run([*script, "apex/fig3", *few, *less], capture_output=True, check=True)
    assert {file.name for file in (tmp_path / "few").iterdir()} == {
        "figure.json", "figure.yaml", "figure.png", "figure.txt",
    }  # fmt: skip
    document = json.loads((tmp_path / "few" / "figure.json").read_text())
    assert document["environment"]["arguments"] == ["apex/fig3", *few, *less]
    assert document["kernels"]["batches"] == [1]
    both = subprocess.run(
        [*script, "apex/fig3", "--cpu", "--quick"], capture_output=True, text=True
    )
    assert both.returncode == 2 and "not allowed with" in both.stderr
    wrong = subprocess.run([*script, "apex/fig99"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "apex/fig9" in wrong.stderr
