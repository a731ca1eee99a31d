"""CPU time of other processes beside a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swiftapex.workloads.other_work import CpuReading, others_share, read_cpus


def test_the_system_counts_by_cpu_and_what_idles_is_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 1 20 7777 55 3 4 72 60 0\ncpu1 5 5 5 5 5 5 5 5 5 5\n"
        "cpu2 50 0 0 8888 0 0 0 0 0 0\ncpu20 7 7 7 7 7 7 7 7 7 7\nintr 1 2\n"
    )
    reading = read_cpus(stat)
    assert reading is not None
    assert (reading.used_s, reading.num_cpus) == (2.5, 2)
    assert read_cpus(tmp_path / "none") is None
    stat.write_text("cpu  1 2 3\n")
    assert read_cpus(stat) is None


def test_the_share_is_what_is_not_our_own() -> None:
    begin, end = CpuReading(10.0, 1.0, 4), CpuReading(18.0, 3.0, 4)
    assert others_share(begin, end, 5.0) == pytest.approx(0.3)
    assert others_share(begin, CpuReading(10.9, 2.0, 4), 5.0) == 0.0  # clocks tick apart
    assert others_share(None, end, 5.0) is others_share(begin, end, 0.0) is None


def test_another_process_is_seen() -> None:
    begin = read_cpus()
    if begin is None:
        pytest.skip("this system does not tell")
    spin = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", spin], check=True)
    share = others_share(begin, read_cpus(), time.perf_counter() - start)
    assert share is not None
    assert share * begin.num_cpus * (time.perf_counter() - start) > 0.4
