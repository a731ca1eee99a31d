"""Metrics against values worked out by hand from a list of events: tokens, iterations, counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from pydantic import ValidationError

from swiftapex.config.schema import GpuConfig, SloConfig, WindowConfig, WorkloadConfig
from swiftapex.core.records import BusyTimes, IterationRecord
from swiftapex.executor.rank import mean_busy
from swiftapex.report.metrics import DEFINITIONS, summarize
from swiftapex.workloads import energy
from swiftapex.workloads.build import build_workload
from swiftapex.workloads.energy import EnergyMeter, EnergyReading, EnergyUse, energy_between
from swiftapex.workloads.meter import BusySpan
from swiftapex.workloads.replay import RequestOutcome, RunLog, replay

START_S = 50.0
# Seconds since the first arrival: request, prompt tokens, arrival, times of its tokens.
EVENTS = (
    (0, 8, 0.0, (1.0, 2.0)),
    (1, 6, 0.0, (1.0, 2.0, 3.0, 4.0)),
    (2, 4, 1.0, (3.0, 4.5, 6.0)),
    (3, 4, 2.0, (4.0, 8.0)),
    (4, 4, 2.0, (4.0, 10.0)),
)
# start, seconds, free blocks on the GPU and on the CPU, decodes on each
ITERATIONS = ((0.0, 1.0, 6, 20, 2, 0), (1.0, 3.0, 2, 10, 3, 6), (4.0, 6.0, 8, 0, 1, 8))
BLOCKS = (10, 20)


def log(**fields: Any) -> RunLog:
    outcomes = tuple(
        RequestOutcome(index, None, prompt, arrival, "length", tuple(range(len(times))), times)
        for index, prompt, arrival, times in EVENTS
    )
    records = tuple(
        IterationRecord(
            index, START_S + start, 1e6 * seconds, 1.0, "asymmetric", 0, on_gpu, on_cpu, 1, 0, 5,
            0, 0, gpu_free, cpu_free, 0,
        )
        for index, (start, seconds, gpu_free, cpu_free, on_gpu, on_cpu) in enumerate(ITERATIONS)
    )  # fmt: skip
    return RunLog(START_S, outcomes, records, **fields)


def span(**energy: Any) -> BusySpan:
    begin, end = BusyTimes(None, 1.0, 4_000_000_000), BusyTimes(None, 6.0, 24_000_000_000)
    return BusySpan(0.0, begin, 10.0, end, EnergyUse(**energy))


def test_goodput_counts_what_keeps_all_limits() -> None:
    # ttft 1, 1, 2, 2, 2 s; tpot 1, 1, 1.5, 4, 6 s; five requests in 10 s
    assert summarize(log())["goodput_requests_per_s"] is None
    one = summarize(log(), slo=SloConfig(ttft_ms=1500))
    assert (one["goodput_requests_per_s"], one["slo_attainment"]) == (0.2, 0.4)
    both = summarize(log(), slo=SloConfig(ttft_ms=2000, tpot_ms=1500))
    assert (both["goodput_requests_per_s"], both["slo_attainment"]) == (0.3, 0.6)


def test_what_was_in_progress_is_not_judged() -> None:
    plain, limits = log(), SloConfig(ttft_ms=2000, tpot_ms=1500)
    # Requests 0 to 2 keep the limits, in 10 s; 0 had begun before.
    some = replace(plain, outcomes=(replace(plain.outcomes[0], progress=3), *plain.outcomes[1:]))
    found = summarize(some, slo=limits)
    assert (found["goodput_requests_per_s"], found["slo_attainment"]) == (0.2, 0.5)
    every = replace(plain, outcomes=tuple(replace(o, progress=3) for o in plain.outcomes))
    found = summarize(every, slo=limits)
    assert found["requests_per_s"] == 0.5
    assert found["goodput_requests_per_s"] is found["slo_attainment"] is None
    # None completed in the window: that is a rate of 0, of nothing to judge.
    found = summarize(every, WindowConfig(warmup_s=2.5, measure_s=1.2), limits)
    assert (found["goodput_requests_per_s"], found["slo_attainment"]) == (0.0, None)


def test_inter_token_latency_is_over_gaps() -> None:
    # gaps of 1; 1, 1, 1; 1.5, 1.5; 4; 6 s
    itl = summarize(log())["itl_ms"]
    assert itl["mean"] == pytest.approx(17_000 / 8)
    assert itl["p50"] == pytest.approx(1250)
    assert itl["p99"] == pytest.approx(4000 + 2000 * 0.93)
    # In [3.5, 7): tokens at 4 (after 3), 4.5 and 6; the first tokens at 4 end no gap.
    itl = summarize(log(), WindowConfig(warmup_s=3.5, measure_s=3.5))["itl_ms"]
    assert itl["mean"] == pytest.approx(4000 / 3)


def test_per_token_latency_as_each_paper_defines_it() -> None:
    # e2e 2, 4, 5, 6, 8 s over 2, 4, 3, 2, 2 output tokens; with 8, 6, 4, 4, 4 of the prompt
    summary = summarize(log())
    assert summary["per_token_latency_ms"]["mean"] == pytest.approx(
        1000 * (1 + 1 + 5 / 3 + 3 + 4) / 5
    )
    assert summary["per_token_latency_neo_ms"]["mean"] == pytest.approx(
        1000 * (2 / 10 + 4 / 10 + 5 / 7 + 6 / 6 + 8 / 6) / 5
    )


def test_the_middle_share_of_the_requests() -> None:
    # Requests end at 2, 4, 6, 8, 10 s. The middle 60 % of five: after the first, up to the fourth.
    summary = summarize(log(), WindowConfig(middle=0.6))
    assert summary["duration_s"] == pytest.approx(6.0)
    assert summary["requests_per_s"] == pytest.approx(3 / 6)
    # tokens after 2 s and until 8 s: 3, 4 of request 1; 3, 4.5, 6 of 2; 4, 8 of 3; 4 of 4
    assert summary["output_tokens"] == 8
    assert summary["output_tokens_per_s"] == pytest.approx(8 / 6)
    assert summary["e2e_ms"]["mean"] == pytest.approx(5000)
    everything = summarize(log(), WindowConfig(middle=1.0))
    assert (everything["output_tokens"], everything["duration_s"]) == (13, pytest.approx(10.0))


def test_windows_are_of_one_kind() -> None:
    for wrong in ({}, {"measure_s": 1.0, "middle": 0.4}, {"middle": 0.4, "warmup_s": 1.0}):
        with pytest.raises(ValidationError, match="middle"):
            WindowConfig(**wrong)


def test_a_window_in_balance_takes_in_what_it_gives() -> None:
    # In [3.5, 7): tokens at 4, 4, 4, 4.5, 6 of 13 that were asked for; the last iteration's prefill
    # of 13 of 26 prompt tokens, so half of the prompts for 5 / 13 of the outputs.
    plain = log()
    asked = tuple(replace(o, max_tokens=len(o.token_times_s)) for o in plain.outcomes)
    *early, last = plain.iterations
    found = replace(plain, outcomes=asked, iterations=(*early, replace(last, prefill_tokens=13)))
    window = WindowConfig(warmup_s=3.5, measure_s=3.5)
    assert summarize(found, window)["steady_balance"] == pytest.approx((13 / 26) / (5 / 13))
    assert summarize(found)["steady_balance"] is None
    assert summarize(plain, window)["steady_balance"] is None  # nobody knows what was asked for


def test_use_of_kv_on_both_sides_over_time() -> None:
    summary = summarize(log(), blocks=BLOCKS)
    # 4, 8, 2 of 10 blocks for 1, 3, 6 s; 0, 10, 20 of 20
    assert summary["kv_use"]["gpu"] == {"mean": pytest.approx(0.4), "max": pytest.approx(0.8)}
    assert summary["kv_use"]["cpu"] == {"mean": pytest.approx(0.75), "max": pytest.approx(1.0)}
    assert summary["kv_offload_share"] == pytest.approx(15 / 19)
    assert summary["cpu_token_share"] == pytest.approx(14 / 20)
    windowed = summarize(log(), WindowConfig(warmup_s=0.5, measure_s=3.0), blocks=BLOCKS)
    assert windowed["kv_use"]["gpu"]["mean"] == pytest.approx(0.8)
    no_cpu_side = summarize(log(), blocks=(10, 0))
    assert no_cpu_side["kv_use"]["cpu"] == {"mean": None, "max": None}
    assert summarize(log())["kv_offload_share"] is None


def test_busy_share_link_and_energy_by_hand() -> None:
    summary = summarize(log(busy=span(gpu_j=200.0, cpu_j=50.0)), gpu=GpuConfig())
    assert (summary["gpu_busy"], summary["cpu_busy"]) == (None, 0.5)
    assert summary["pcie_gb_per_s"] == pytest.approx(2.0)
    assert summary["energy_j"] == {"gpu": 200.0, "cpu": 50.0}
    # 13 tokens in 10 s
    assert summary["tokens_per_j"] == pytest.approx({"gpu": 0.065, "cpu": 0.26, "both": 0.052})
    assert summary["energy_comparable"] is True
    part = summarize(log(busy=span(gpu_j=200.0, cpu_j=None)), gpu=GpuConfig(sm_count=8))
    assert part["energy_comparable"] is False
    assert part["tokens_per_j"] == {"gpu": pytest.approx(0.065), "cpu": None, "both": None}


def test_what_nobody_measured_is_null() -> None:
    summary = summarize(log(busy=span(gpu_j=None, cpu_j=None)))
    assert summary["energy_j"] == {"gpu": None, "cpu": None}
    assert summary["tokens_per_j"] == dict.fromkeys(("gpu", "cpu", "both"))
    assert summary["energy_comparable"] is summarize(log())["pcie_gb_per_s"] is None
    assert set(summary) <= set(DEFINITIONS) | {"num_unfinished"}


def test_a_meter_of_a_middle_window_begins_and_ends_with_its_requests() -> None:
    # Ten requests of 1, 2, ..., 10 tokens: one ends in every iteration.
    workload = WorkloadConfig(
        kind="synthetic", num_requests=10, input_len=3, output_len=1, window={"middle": 0.4}
    )
    items = [
        item.__class__(item.index, 0.0, item.prompt, False, item.sampling.__class__(max_tokens=n))
        for n, item in enumerate(build_workload(workload, 0, 90), start=1)
    ]
    run = replay(FakeEngine(), items, workload)
    assert run.busy is not None and run.busy.begin.gpu_s is not None
    # Read before the fourth iteration (three have ended), and before the eighth.
    assert (run.busy.begin.gpu_s, run.busy.end.gpu_s) == (0.25 * 3, 0.25 * 7)


def test_rapl_domains_are_read_once_and_may_begin_anew(tmp_path: Path) -> None:
    for name, label, used in (
        ("intel-rapl:0", "package-0", 900),
        ("intel-rapl:0:0", "core", 500),  # a part of the package
        ("intel-rapl:0:1", "dram", 100),
        ("intel-rapl:1", "package-1", 300),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(label + "\n")
        (tmp_path / name / "energy_uj").write_text(str(used * 10**6))
        (tmp_path / name / "max_energy_range_uj").write_text(str(1000 * 10**6))
    meter = EnergyMeter(0, tmp_path)
    begin = meter.read()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text(str(50 * 10**6))  # 150 J later
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text(str(320 * 10**6))
    assert energy_between(begin, meter.read()) == EnergyUse(None, pytest.approx(170.0))
    assert EnergyMeter(0, tmp_path / "absent").read() == EnergyReading(None, None)


class FakeNvml:
    """Two GPUs; the second has no counter. Handles are 10 and 11, joules 7 and more each time."""

    def __init__(self) -> None:
        self.millijoules = 7000
        self.asked: list[bytes | int] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        self.asked.append(index)
        handle._obj.value = 10 + index
        return 0 if index < 2 else 2

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked.append(uuid)
        handle._obj.value = 10
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any) -> int:
        millijoules._obj.value = self.millijoules
        self.millijoules += 2500
        return 0 if handle.value == 10 else 3


def test_nvml_counts_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meter = EnergyMeter(1, tmp_path)
    assert energy_between(meter.read(), meter.read()) == EnergyUse(pytest.approx(2.5), None)
    assert nvml.asked == [0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc,1")
    assert EnergyMeter(1, tmp_path).read().gpu_j is not None
    assert nvml.asked == [0, b"GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert EnergyMeter(1, tmp_path).read().gpu_j is None  # no counter
    assert EnergyMeter(0, tmp_path).read().gpu_j is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert EnergyMeter(1, tmp_path).read().gpu_j is None  # no such GPU


def test_busy_times_of_ranks_are_means_and_their_bytes_a_sum() -> None:
    one, other = BusyTimes(None, 1.0, 100), BusyTimes(2.0, 3.0, 50)
    assert mean_busy([one, other]) == BusyTimes(None, 2.0, 150)
    assert mean_busy([one, BusyTimes(1.0, 1.0)]).link_bytes is None
