"""How many CPU threads this process may use, and on which CPUs. No torch here."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swiftapex.core.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """`cpus[i]` is meant for thread i; it has `count` entries, or none where threads should not be
    pinned. `limited_by` says what decided the count."""

    count: int
    cpus: tuple[int, ...]
    limited_by: str


def cpu_threads(
    requested: int | Literal["auto"],
    ranks: int = 1,
    *,
    affinity: Iterable[int] | None = None,
    root: Path = Path("/"),
) -> ThreadPlan:
    """The number of threads is floor(min(CPUs of the affinity mask, cgroup CPU quota)), at least
    1, and no more than `requested`; more would only take turns. CPUs are listed so that every
    physical core comes once before any comes twice.

    Under a quota smaller than the affinity mask other containers share the same CPUs and most
    likely pin from CPU 0 on too, so there the plan names no CPUs.

    Of `ranks` processes with affinity masks of their own (`bind_rank`) each gets an equal part of
    the quota and of the number requested, at least one thread.

    `affinity` and `root` (the folder that holds /sys and /proc) are for tests.
    Raises ConfigError if `requested` is neither "auto" nor a positive number.
    """
    if requested != "auto" and (not isinstance(requested, int) or requested < 1):
        raise ConfigError(f"threads must be 'auto' or a number >= 1, got {requested!r}")
    cpus = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    quota = cgroup_cpus(root) / ranks
    if requested != "auto":
        requested = max(1, requested // ranks)
    count, limited_by = len(cpus), "affinity"
    if quota < count:
        count, limited_by = max(1, math.floor(quota)), f"cgroup quota of {quota:g} CPUs"
    shared = quota < len(cpus)
    if requested != "auto":
        if requested > count:
            limited_by += f", {requested} requested"
        else:
            count, limited_by = requested, "requested"
    pinned = () if shared else tuple(physical_cores_first(cpus, root)[:count])
    logger.info("CPU threads = %d (%s)", count, limited_by)
    return ThreadPlan(count, pinned, limited_by)


def bind_rank(rank: int, ranks: int) -> None:
    """Confines this process, and all threads that it starts from now on, to the CPUs of a rank, so
    that memory which it touches first lies on their NUMA node. Left alone where a quota is smaller
    than the affinity mask, or where the system forbids it."""
    cpus = sorted(os.sched_getaffinity(0))
    if cgroup_cpus() < len(cpus):
        return
    try:
        os.sched_setaffinity(0, rank_cpus(cpus, rank, ranks))
    except OSError as error:
        logger.warning("rank %d is not bound to CPUs of its own: %s", rank, error)


def rank_cpus(cpus: Iterable[int], rank: int, ranks: int, root: Path = Path("/")) -> list[int]:
    """The CPUs of one rank: whole physical cores, neighbours on the same NUMA node, disjoint
    between ranks. Ranks that are more than the cores take turns on them."""
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(cpus):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        node = min((int(path.name[4:]) for path in folder.glob("node[0-9]*")), default=0)
        core = read_or_empty(folder / "topology/thread_siblings_list") or f"cpu {cpu}"
        cores.setdefault((node, core), []).append(cpu)
    ordered = [cores[key] for key in sorted(cores, key=lambda key: (key[0], cores[key][0]))]
    if len(ordered) < ranks:
        return ordered[rank % len(ordered)]
    mine = ordered[rank * len(ordered) // ranks : (rank + 1) * len(ordered) // ranks]
    return sorted(cpu for core in mine for cpu in core)


def split_threads(
    requested: int | Literal["auto"], ranks: int = 1
) -> tuple[ThreadPlan, ThreadPlan]:
    """Threads of the GPU side and of the CPU side where both run on this machine's cores: the CPU
    side gets `requested`, or half of what there is, and the GPU side the rest; one at least.
    `ranks` as for `cpu_threads`."""
    both = cpu_threads("auto", ranks)
    half = max(1, both.count // 2)
    if requested != "auto":
        half = min(max(1, requested // ranks), both.count)
    rest = max(1, both.count - half)
    return (
        ThreadPlan(rest, both.cpus[:rest], f"{both.limited_by}, beside {half} for the CPU side"),
        ThreadPlan(
            half, both.cpus[::-1][:half], f"{both.limited_by}, beside {rest} for the GPU side"
        ),
    )


def threads_beside_launching(requested: int | Literal["auto"], ranks: int = 1) -> ThreadPlan:
    """Threads of the CPU side where a GPU computes: `requested`, or all but one, since the thread
    that launches the GPU's work needs a core too. It keeps the first. `ranks` as for
    `cpu_threads`."""
    everything = cpu_threads("auto", ranks)
    count = max(1, everything.count - 1)
    if requested != "auto":
        count = min(max(1, requested // ranks), everything.count)
    first = 1 if len(everything.cpus) > count else 0
    cpus = everything.cpus[first : first + count]
    return ThreadPlan(count, cpus, f"{everything.limited_by}, beside the launching thread")


def physical_cores_first(cpus: list[int], root: Path = Path("/")) -> list[int]:
    """Orders CPUs by their rank among the hyperthreads of their core, then by number."""
    seen: dict[str, int] = {}  # core -> CPUs of it so far
    ranked = []
    for cpu in sorted(cpus):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        core = read_or_empty(path) or f"cpu {cpu}"
        rank = seen.get(core, 0)
        seen[core] = rank + 1
        ranked.append((rank, cpu))
    return [cpu for _, cpu in sorted(ranked)]


def cgroup_cpus(root: Path = Path("/")) -> float:
    """CPUs' worth of time that the cgroups of this process allow; infinity without a quota.
    Every level from the process's own group up to the mount's root may hold a quota."""
    quotas = {1: _quota_v1, 2: _quota_v2}
    return min(
        (quotas[version](folder) for folder, version in cgroup_folders("cpu", root)),
        default=math.inf,
    )


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[tuple[Path, int]]:
    """The folders that may limit this process in `controller`, from its own group up to the root
    of the mount, each with the version of its cgroups."""
    found = []
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, version = [root / "sys/fs/cgroup"], 2
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (controller, controllers)]
            version = 1
        else:
            continue
        own = path.strip("/")
        levels = [Path(own), *Path(own).parents] if own else [Path()]
        found += [(mount / level, version) for mount in mounts for level in levels]
    return found


def _quota_v2(group: Path) -> float:
    quota, _, period = read_or_empty(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf


def _quota_v1(group: Path) -> float:
    quota, period = (
        read_or_empty(group / "cpu.cfs_quota_us"),
        read_or_empty(group / "cpu.cfs_period_us"),
    )
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf


def read_or_empty(path: Path) -> str:
    """What a file of the system holds, without white space around it; "" where it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
