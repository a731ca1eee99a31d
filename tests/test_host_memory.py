"""Room for KV on the host, from faked system files; and what an engine says that asks for more."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from swiftapex import LLM
from swiftapex.core.errors import ConfigError
from swiftapex.kv.host_memory import bytes_available, cgroup_bytes_left, check_host_memory
from tests.test_threads import write

GIB = 2**30
V2 = {
    "proc/self/cgroup": "0::/a/b",
    "sys/fs/cgroup/a/b/memory.max": "max",
    "sys/fs/cgroup/a/memory.max": str(8 * GIB),
    "sys/fs/cgroup/a/memory.current": str(5 * GIB),
    "sys/fs/cgroup/a/memory.stat": f"anon {4 * GIB}\nfile {GIB}\n",
    "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {2 * 2**20} kB\n",
}


def test_the_tightest_cgroup_counts_and_files_can_be_given_back(tmp_path: Path) -> None:
    root = write(tmp_path, V2)
    assert cgroup_bytes_left(root) == 4 * GIB
    assert bytes_available(root) == 2 * GIB


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/x\n1:cpu:/\n0::/",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(GIB),
    }
    assert cgroup_bytes_left(write(tmp_path, files)) == 2 * GIB


def test_without_limits_and_files(tmp_path: Path) -> None:
    assert cgroup_bytes_left(tmp_path) == math.inf == bytes_available(tmp_path)
    check_host_memory(10**15, "kv", tmp_path)


def test_more_than_the_cgroup_is_refused_and_more_than_is_free_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write(tmp_path, V2)
    with pytest.raises(ConfigError, match=r"kv: 4\.5 GiB of KV .* 4\.0 GiB left"):
        check_host_memory(9 * GIB // 2, "kv", root)
    with caplog.at_level(logging.WARNING):
        check_host_memory(GIB, "kv", root)
        assert not caplog.records
        check_host_memory(3 * GIB, "kv", root)
    assert "3.0 GiB of KV in host memory, where 2.0 GiB are free now" in caplog.text


def test_an_engine_that_asks_for_too_much_says_how_much() -> None:
    with pytest.raises(ConfigError, match=r"[\d.]+ GiB of KV"):
        LLM(
            {"architecture": "tiny", "weights": "dummy"},
            policy="neo",
            cpu={"kv_memory": "4000000GiB"},
        )
