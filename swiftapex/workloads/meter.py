"""Reads an engine's and the machine's counters where the measured part of a run begins and ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from swiftapex.config.schema import WindowConfig
from swiftapex.core.records import BusyTimes
from swiftapex.workloads.energy import EnergyMeter, EnergyReading, EnergyUse, energy_between
from swiftapex.workloads.other_work import CpuReading, others_share, read_cpus


class Busy(Protocol):
    def busy(self) -> BusyTimes: ...


@dataclass(frozen=True, slots=True)
class BusySpan:
    """What the sides had computed at two moments, in seconds since the run's first arrival, and
    the energy used and the share of the CPUs' time that other processes took between them."""

    begin_s: float
    begin: BusyTimes
    end_s: float
    end: BusyTimes
    energy: EnergyUse = field(default=EnergyUse(None, None))
    others: float | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    time_s: float
    busy: BusyTimes
    energy: EnergyReading
    cpus: CpuReading | None


class RunMeter:
    """`start_s`: time.perf_counter at the first arrival. `num_requests`: of the run."""

    def __init__(
        self,
        engine: Busy,
        energy: EnergyMeter,
        window: WindowConfig | None,
        num_requests: int,
    ) -> None:
        self._engine = engine
        self._energy = energy
        self._begin: _Reading | None = None
        self._end: _Reading | None = None
        self.start_s = 0.0
        self._begins_s = 0.0 if window is None else window.warmup_s
        self._begins, self._ends = 0, num_requests + 1
        if window is not None and window.middle is not None:
            self._begins, self._ends = window.middle_requests(num_requests)

    def start(self) -> None:
        """Call at the first arrival."""
        self.start_s = time.perf_counter()

    def look(self, now_s: float, ended: int) -> None:
        """Call before every iteration; `ended`: requests that have ended so far."""
        if self._begin is None and now_s >= self._begins_s and ended >= self._begins:
            self._begin = self._read()
        if self._end is None and ended >= self._ends:
            self._end = self._read()

    def span(self) -> BusySpan | None:
        """Call at the run's end. None where it ended before it was to be measured."""
        begin, end = self._begin, self._end or self._read()
        if begin is None:
            return None
        energy = energy_between(begin.energy, end.energy)
        others = others_share(begin.cpus, end.cpus, end.time_s - begin.time_s)
        return BusySpan(begin.time_s, begin.busy, end.time_s, end.busy, energy, others)

    def _read(self) -> _Reading:
        now_s = time.perf_counter() - self.start_s
        return _Reading(now_s, self._engine.busy(), self._energy.read(), read_cpus())
