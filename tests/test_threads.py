"""ThreadPlan from faked affinity masks, cgroup files and CPU topologies."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from swiftapex.backends.threads import cgroup_cpus, cpu_threads, physical_cores_first
from swiftapex.core.errors import ConfigError


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def siblings(cores: list[str]) -> dict[str, str]:
    """Topology files: cores[i] is the sibling list of CPU i."""
    folder = "sys/devices/system/cpu"
    return {f"{folder}/cpu{i}/topology/thread_siblings_list": core for i, core in enumerate(cores)}


def test_affinity_alone(tmp_path: Path) -> None:
    plan = cpu_threads("auto", affinity={3, 1, 2}, root=tmp_path)
    assert (plan.count, plan.cpus, plan.limited_by) == (3, (1, 2, 3), "affinity")


@pytest.mark.parametrize(
    ("cpu_max", "count", "cpus"),
    [
        ("max 100000", 4, (0, 1, 2, 3)),
        ("400000 100000", 4, (0, 1, 2, 3)),
        ("250000 100000", 2, ()),
        ("50000 100000", 1, ()),
    ],
)
def test_quota_of_version_2(tmp_path: Path, cpu_max: str, count: int, cpus: tuple[int]) -> None:
    files = {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": cpu_max}
    plan = cpu_threads("auto", affinity=range(4), root=write(tmp_path, files))
    assert (plan.count, plan.cpus) == (count, cpus)


def test_smallest_quota_of_all_levels_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "150000 50000",
        "sys/fs/cgroup/cpu.max": "700000 100000",
    }
    assert cgroup_cpus(write(tmp_path, files)) == 3.0


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(tmp_path: Path, mount: str) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n0::/",
        f"sys/fs/cgroup/{mount}/cpu.cfs_quota_us": "-1",
        f"sys/fs/cgroup/{mount}/cpu.cfs_period_us": "100000",
        f"sys/fs/cgroup/{mount}/x/cpu.cfs_quota_us": "320000",
        f"sys/fs/cgroup/{mount}/x/cpu.cfs_period_us": "100000",
    }
    assert cgroup_cpus(write(tmp_path, files)) == 3.2


def test_physical_cores_come_first(tmp_path: Path) -> None:
    write(tmp_path, siblings(["0,4", "1,5", "2,6", "3,7"] * 2))
    assert physical_cores_first(list(range(8)), tmp_path) == list(range(8))
    assert physical_cores_first([0, 4, 5, 6], tmp_path) == [0, 5, 6, 4]


def test_neighbouring_hyperthreads(tmp_path: Path) -> None:
    write(tmp_path, siblings(["0-1", "0-1", "2-3", "2-3"]))
    assert cpu_threads(2, affinity=range(4), root=tmp_path).cpus == (0, 2)


def test_requested_never_oversubscribes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert cpu_threads(8, affinity=range(2), root=tmp_path).count == 2
        assert cpu_threads(1, affinity=range(2), root=tmp_path).count == 1
    assert caplog.messages == [
        "CPU threads = 2 (affinity, 8 requested)",
        "CPU threads = 1 (requested)",
    ]


@pytest.mark.parametrize("requested", [0, -1, "all", 1.5])
def test_bad_request(requested: object) -> None:
    with pytest.raises(ConfigError, match="threads must be"):
        cpu_threads(requested)  # type: ignore[arg-type]


def test_this_machine() -> None:
    plan = cpu_threads("auto")
    assert plan.count >= 1
    assert len(plan.cpus) in (0, plan.count)
