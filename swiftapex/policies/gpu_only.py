"""GPU-only: first come, first served, every request's KV on the GPU."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan
from swiftapex.cost_model import CostModel, gpu_only_us
from swiftapex.policies.base import Policy
from swiftapex.scheduler.compose import gpu_batch
from swiftapex.scheduler.state import SchedulerState


class GpuOnly(Policy):
    """Continuous batching, chunked prefill, preemption by recomputing."""

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        batch = gpu_batch(state)
        predicted = gpu_only_us(cost_model, batch.load)
        return state.step_plan("sequential", [batch], predicted_us=predicted)
