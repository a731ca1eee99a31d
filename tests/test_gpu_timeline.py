"""scripts/bench_gpu_idle.py: what it makes of a list of activities, and a run without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
RMS = "void swiftapex::(anonymous namespace)::rms_norm_kernel<__nv_bfloat16>(NormArgs)"
GEMM = "nvjet_tst_64x8_64x16_4x1_v_bz_TNN"
ROWS = "void swiftapex::(anonymous namespace)::copy_rows_kernel<uint4>(char const*)"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_recorder
    import gpu_timeline

    yield SimpleNamespace(timeline=gpu_timeline, recorder=gpu_recorder)
    for name in ("gpu_recorder", "gpu_timeline"):
        del sys.modules[name]


def activities(timeline: Any) -> list[Any]:
    """100 µs of two passes through one layer, out of order. Kernels: [0, 20], [22, 40], [30, 35]
    inside it, [50, 60] with a wait before it, then one after 20 µs of nothing at [80, 90]."""

    def kernel(name: str, start: int, end: int) -> Any:
        return timeline.Activity("kernel", name, start * 1000, end * 1000)

    def call(name: str) -> Any:
        return timeline.Activity("call", name, 0, 1000)

    return [
        kernel(ROWS, 50, 60),
        kernel(RMS, 0, 20),
        kernel(GEMM, 22, 40),
        kernel("swiftapex::wait_word_spin(unsigned const*)", 40, 50),
        kernel(RMS, 30, 35),
        kernel(GEMM, 80, 90),
        timeline.Activity("copy", "Memcpy HtoD (Pinned -> Device)", 41000, 45000, 4096),
        timeline.Activity("copy", "Memcpy DtoH (Device -> Pinned)", 46000, 47000, 1000),
        *[call("cudaLaunchKernel")] * 3,
        call("cudaGraphLaunch"),
        call("cudaMemcpyAsync"),
        call("cudaEventRecord"),
    ]


def test_busy_idle_and_launches_of_known_activities(scripts: Any) -> None:
    timeline = scripts.timeline
    result = timeline.analyse(activities(timeline), 100e-6, passes=2, layers=1)
    assert result["gpu_busy"] == pytest.approx(0.58)  # 20 + 18 + 10 + 10
    assert result["idle_share"] == pytest.approx(1 - 0.63)  # what ran beside another counts too
    # 2 µs before the product; 10 and 20 before the rows and the last; 10 at the end.
    assert result["idle"] == {"under_5us": 0.02, "5_to_50us": 0.3, "over_50us": 0, "ends": 0.1}
    assert sum(result["idle"].values()) + result["gpu_busy"] == pytest.approx(1)
    assert result["idle_before_us_per_pass"] == {"matrix products": 11.0, "hand-off": 5.0}
    assert result["kernels_per_pass"] == result["kernels_per_layer"] == 2.5
    assert result["kernels"]["norm"] == {"per_pass": 1, "per_layer": 1, "us_per_pass": 12.5}
    assert result["launches_per_pass"] == {
        "cudaLaunchKernel": 1.5, "cudaGraphLaunch": 0.5, "cudaMemcpyAsync": 0.5,
    }  # fmt: skip
    assert result["copies"] == {"per_pass": 1, "us_per_pass": 2.5, "bytes_per_pass": 2548}


def test_a_long_gap_and_copies_of_unknown_size(scripts: Any) -> None:
    timeline = scripts.timeline
    kernels = [
        timeline.Activity("kernel", "at::native::add", *t) for t in ((0, 10), (60_010, 70_000))
    ]
    copy = timeline.Activity("copy", "Memset (Device)", 0, 5)
    result = timeline.analyse([*kernels, copy], 100e-6, passes=1, layers=2)
    assert result["idle"] == {"under_5us": 0, "5_to_50us": 0, "over_50us": 0.6, "ends": 0.3}
    assert result["copies"]["bytes_per_pass"] is None
    assert result["kernels"]["torch"]["per_layer"] == 1


def test_layers_and_classes_make_the_table(scripts: Any) -> None:
    timeline = scripts.timeline
    gpu = timeline.analyse(activities(timeline), 100e-6, passes=2, layers=1)
    host = {"us_per_layer": 7.5, "us_per_pass": 15.0}
    result = {"strategy": "x", "num_layers": 2, "gpu": gpu, "host": host}
    head, _, line = timeline.table([result, result | {"gpu": None}]).splitlines()
    names, cells = ([cell.strip() for cell in row.split("|")[1:-1]] for row in (head, line))
    assert dict(zip(names, cells, strict=True)) == {
        "strategy": "x", "launches per layer": "1.25", "kernels per layer": "2.5", "norm": "1.0",
        "hand-off": "0.5", "matrix products": "1.0", "kernels per pass": "2.5",
        "host µs per layer": "7.5", "host µs per pass": "15.0",
    }  # fmt: skip


class _Event:
    """Of torch's profiler, as far as it is read."""

    def __init__(self, name: str, device: str, about: str | None = None) -> None:
        self._name, self._device = name, device
        if about is not None:
            self.metadata_json = lambda: about

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return 7

    def duration_ns(self) -> int:
        return 3

    def device_type(self) -> Any:
        return SimpleNamespace(name=self._device)


def test_events_of_torch_are_told_apart(scripts: Any) -> None:
    read, kind = scripts.recorder.activity, scripts.timeline.Activity
    about = '"device": 0, "stream": 7, "bytes": 512, "memory bandwidth (GB/s)": 1.5'
    copy = "Memcpy HtoD (Pinned -> Device)"
    assert read(_Event("cudaLaunchKernel", "CPU")) == kind("call", "cudaLaunchKernel", 7, 10)
    assert read(_Event(GEMM, "CUDA", "")) == kind("kernel", GEMM, 7, 10)
    assert read(_Event(copy, "CUDA", about)) == kind("copy", copy, 7, 10, 512)
    assert read(_Event(copy, "CUDA")) == kind("copy", copy, 7, 10, None)


class _Session:
    """torch.profiler.profile, with the events that it has recorded."""

    def __init__(self, events: list[_Event]) -> None:
        results = SimpleNamespace(events=lambda: events)
        self.profiler = SimpleNamespace(kineto_results=results)

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_a_recording_without_kernels_is_refused(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [_Event("cudaLaunchKernel", "CPU")]
    monkeypatch.setattr(scripts.recorder, "profile", lambda activities: _Session(events))
    with pytest.raises(SystemExit, match="recorded no kernel"):
        scripts.recorder.recorded(lambda: 5)
    events.append(_Event(GEMM, "CUDA"))
    found, result = scripts.recorder.recorded(lambda: 5)
    assert [each.kind for each in found] == ["call", "kernel"] and result == 5


def run(*more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_gpu_idle.py"), "--device", "cpu"]
    command += ["--model", "tiny", "--dtype", "float32", "--gpu-kv", "512", "--cpu-gib", "0.02"]
    command += ["--max-len", "256", "--lengths", "20x60", "--threads", "1", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.timeout(120)
def test_a_run_on_the_cpu_has_all_but_the_gpus_numbers() -> None:
    done = run("--passes", "20", "--warmup", "12", "--table")
    assert done.returncode == 0, done.stderr
    *lines, head, rule = done.stdout.splitlines()
    results = {line["strategy"]: line for line in map(json.loads, lines)}
    assert list(results) == ["gpu_only", "fixed:asymmetric", "fixed:async_overlap"]
    assert head.startswith("| strategy | launches per layer") and set(rule) <= set("| -")
    for result in results.values():
        assert result["gpu"] is None and result["steady"] and result["passes"] == 20
        per_pass = result["host"]["us_per_pass"]
        assert 0 < result["host"]["launch_us_per_pass"] < per_pass <= 1e3 * result["ms_per_pass"]
    assert results["gpu_only"]["cpu"] is None
    for name in ("fixed:asymmetric", "fixed:async_overlap"):
        cpu = results[name]["cpu"]
        assert (
            min(cpu["read_gb_per_s"]) > cpu["kv_gb_per_s"] > 0 and 0 < cpu["threads_in_kernel"] < 1
        )


def test_what_cannot_be_measured_is_refused_in_words() -> None:
    assert "512 holds no request" in run("--passes", "400").stderr
    assert "cannot be watched" in run("--tp", "2").stderr
