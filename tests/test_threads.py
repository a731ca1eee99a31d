"""ThreadPlan from faked affinity masks, cgroup files and CPU topologies."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from swiftapex.backends.threads import (
    bind_rank,
    cgroup_cpus,
    cpu_threads,
    physical_cores_first,
    rank_cpus,
)
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


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    """Whole cores, neighbours together; two ranks on two NUMA nodes get one each."""
    cores = ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"] * 2
    write(tmp_path, siblings(cores))
    for cpu in range(16):  # even CPUs on node 0, as many systems number them
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}/node{cpu % 2}").mkdir()

    def of(ranks: int) -> list[list[int]]:
        return [rank_cpus(range(16), rank, ranks, tmp_path) for rank in range(ranks)]

    assert of(1) == [list(range(16))]
    assert of(2) == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert of(4)[0] == [0, 2, 8, 10]
    for ranks in (2, 3, 4, 8):
        cpus = of(ranks)
        assert sorted(cpu for rank in cpus for cpu in rank) == list(range(16)), "disjoint"
        assert max(map(len, cpus)) - min(map(len, cpus)) <= 2
    assert [rank_cpus([0, 8, 1], rank, 3, tmp_path) for rank in range(3)] == [[0, 8], [1], [0, 8]]


def test_ranks_share_a_quota(tmp_path: Path) -> None:
    """Then their masks overlap, and they only divide the number."""
    files = {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "800000 100000"}
    write(tmp_path, files)

    def plan(requested: object, ranks: int) -> tuple[int, int]:
        found = cpu_threads(requested, ranks, affinity=range(16), root=tmp_path)  # type: ignore[arg-type]
        return found.count, len(found.cpus)

    assert plan("auto", 2) == plan(8, 2) == plan(9, 2) == (4, 0)
    assert plan(6, 2) == (3, 0)
    assert plan("auto", 16) == plan(1, 2) == (1, 0)


def test_binding_a_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the system forbids it, the rank goes on unbound and says so."""
    bound: list[tuple[int, list[int]]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cpus: bound.append((pid, cpus)))
    monkeypatch.setattr("swiftapex.backends.threads.cgroup_cpus", lambda: 2.0)
    monkeypatch.setattr("swiftapex.backends.threads.rank_cpus", lambda cpus, rank, ranks: [rank])
    bind_rank(1, 2)
    assert bound == [(0, [1])]
    monkeypatch.setattr("swiftapex.backends.threads.cgroup_cpus", lambda: 1.5)
    bind_rank(1, 2)
    assert len(bound) == 1, "left alone under a quota"

    def forbidden(pid: int, cpus: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr("swiftapex.backends.threads.cgroup_cpus", lambda: 2.0)
    monkeypatch.setattr("os.sched_setaffinity", forbidden)
    bind_rank(0, 2)
    assert "rank 0 is not bound to CPUs of its own: not here" in caplog.text


def test_this_machine() -> None:
    plan = cpu_threads("auto")
    assert plan.count >= 1
    assert len(plan.cpus) in (0, plan.count)
