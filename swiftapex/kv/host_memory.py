"""Whether the host has room for the KV that is asked for. No torch."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

from swiftapex.backends.threads import cgroup_folders, read_or_empty
from swiftapex.core.errors import ConfigError

logger = logging.getLogger(__name__)


def check_host_memory(num_bytes: int, what: str, root: Path = Path("/")) -> None:
    """ConfigError where a cgroup of this process cannot grow by `num_bytes`, with what is needed
    and what there is. Only a warning where the system says that less is free: some virtual machines
    get their memory as they use it. `root`: the folder that holds /sys and /proc."""
    left, free = cgroup_bytes_left(root), bytes_available(root)
    if num_bytes > left:
        raise ConfigError(
            f"{what}: {_gib(num_bytes)} of KV in host memory, but this process's cgroup has "
            f"{_gib(left)} left: use a smaller kv_tokens or kv_memory"
        )
    if num_bytes > free:
        logger.warning(
            "%s: %s of KV in host memory, where %s are free now", what, _gib(num_bytes), _gib(free)
        )


def cgroup_bytes_left(root: Path = Path("/")) -> float:
    """Bytes by which the tightest cgroup of this process may still grow; infinity without one.
    What it holds of files can be given back, and counts as left."""
    left = math.inf
    for folder, version in cgroup_folders("memory", root):
        names = ("memory.max", "memory.current") if version == 2 else (
            "memory.limit_in_bytes", "memory.usage_in_bytes"
        )  # fmt: skip
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and used is not None:
            files = re.search(
                r"^(?:total_)?(?:inactive_)?file (\d+)", read_or_empty(folder / "memory.stat"), re.M
            )
            left = min(left, max(0, limit - used + (int(files[1]) if files else 0)))
    return left


def bytes_available(root: Path = Path("/")) -> float:
    """MemAvailable, which includes what the system would give back; infinity where unknown."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", read_or_empty(root / "proc/meminfo"), re.M)
    return math.inf if match is None else int(match[1]) * 1024


def _number(path: Path) -> int | None:
    text = read_or_empty(path)
    return int(text) if text.isdigit() else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
