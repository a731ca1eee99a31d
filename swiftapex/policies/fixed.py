"""The same pipeline in every iteration, for studies of one pipeline."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan
from swiftapex.policies.base import Policy
from swiftapex.scheduler.compose import gpu_batch
from swiftapex.scheduler.state import SchedulerState


class Fixed(Policy):
    """`fixed:<pipeline>`: batches as GPU-only composes them, run by the named pipeline."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline

    def plan(self, state: SchedulerState) -> StepPlan:
        return state.step_plan(self.pipeline, [gpu_batch(state)])
