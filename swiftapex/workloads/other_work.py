"""CPU time that goes to other processes while a run is measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_NO_WORK = (3, 4)  # columns of /proc/stat: idle, waiting for a disk
_GUESTS = 8  # from here on: counted in the first two already


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds since the machine, or this process, was started."""

    used_s: float  # by anyone, also other virtual machines, on the CPUs open to this process
    own_s: float  # by this process
    num_cpus: int


def read_cpus(stat: Path = Path("/proc/stat")) -> CpuReading | None:
    """None where the system does not tell."""
    try:
        lines = stat.read_text().splitlines()
        cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    columns = [line.split()[1:] for line in lines if line.split(" ", 1)[0] in cpus]
    used = sum(
        int(value)
        for column in columns
        for index, value in enumerate(column[:_GUESTS])
        if index not in _NO_WORK
    )
    return CpuReading(used / ticks, time.process_time(), len(columns)) if columns else None


def others_share(begin: CpuReading | None, end: CpuReading | None, seconds: float) -> float | None:
    """Of the CPUs' time between two readings; None where it is not known."""
    if begin is None or end is None or seconds <= 0:
        return None
    others_s = (end.used_s - begin.used_s) - (end.own_s - begin.own_s)
    return max(0.0, others_s / (seconds * end.num_cpus))
