"""The interface of an executor: it hides where the workers run."""

from __future__ import annotations

from typing import Protocol

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.core.request import Placement


class Executor(Protocol):
    num_blocks: dict[Placement, int]  # KV blocks that the workers have, per side

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one iteration on all workers."""

    def close(self) -> None:
        """Ends the workers and frees what they hold."""
