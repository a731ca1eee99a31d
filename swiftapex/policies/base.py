"""The interface of a policy: one file, one class, one method."""

from __future__ import annotations

from abc import ABC, abstractmethod

from swiftapex.core.plan import StepPlan
from swiftapex.cost_model import CostModel
from swiftapex.scheduler.state import SchedulerState


class Policy(ABC):
    """Decides what runs in an iteration. Constructed with the YAML's `policy_args`.

    `uses_cpu`: whether it places KV on the CPU; without it no CPU side is set up.
    """

    uses_cpu: bool = False

    @abstractmethod
    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        """Composes the next iteration with the verbs of `state`. May be empty if nothing waits."""
