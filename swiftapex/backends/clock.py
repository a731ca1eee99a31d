"""When work on the GPU side began and ended, on the time scale of time.perf_counter."""

from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    costs: bool  # whether marks slow the device down

    def mark(self) -> Any:
        """The moment at which the work launched so far is done."""

    def seconds(self, mark: Any) -> float:
        """A mark's time. Asked once all work is done."""

    def restart(self) -> None:
        """Called while the device is idle, before the work of an iteration."""


class HostClock:
    """For backends that compute when they are called."""

    costs = False

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark

    def restart(self) -> None:
        pass
