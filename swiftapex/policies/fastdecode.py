"""FastDecode+ (the baseline of NEO's evaluation): all decode attention on the CPU."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan
from swiftapex.cost_model import CostModel, asymmetric_us
from swiftapex.policies.base import Policy
from swiftapex.scheduler.compose import add_gpu_decodes, main_batch
from swiftapex.scheduler.cpu_tier import add_cpu_halves, cpu_decodes
from swiftapex.scheduler.prefill import add_prefill, cpu_first
from swiftapex.scheduler.state import SchedulerState


class FastDecode(Policy):
    """Every prompt is prefilled through the staging area to the CPU; decodes run in two equal
    halves. Only a request that the CPU could never hold decodes on the GPU."""

    uses_cpu = True

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        first, second = main_batch(state), state.new_batch()
        add_gpu_decodes(state, first, demote=False)
        add_cpu_halves(state, first, second, cpu_decodes(state))
        add_prefill(state, first, cpu_first(state))
        predicted = asymmetric_us(cost_model, first.load, second.load)
        return state.step_plan("symmetric", [first, second], predicted_us=predicted)
