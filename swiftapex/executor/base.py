"""The interface of an executor: it hides where the workers run."""

from __future__ import annotations

from typing import Protocol

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.core.records import BusyTimes


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one iteration on all workers."""

    def busy(self) -> BusyTimes:
        """Seconds of computing so far, on average over the workers."""

    def close(self) -> None:
        """Ends the workers and frees what they hold."""
