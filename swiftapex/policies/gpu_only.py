"""GPU-only: first come, first served, every request's KV on the GPU."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan
from swiftapex.policies.base import Policy
from swiftapex.scheduler.compose import gpu_batch
from swiftapex.scheduler.state import SchedulerState


class GpuOnly(Policy):
    """Continuous batching, chunked prefill, preemption by recomputing."""

    def plan(self, state: SchedulerState) -> StepPlan:
        return state.step_plan("sequential", [gpu_batch(state)])
