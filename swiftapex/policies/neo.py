"""NEO (MLSys'25): two sub-batches where that serves more requests per time, else GPU-only."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan
from swiftapex.cost_model import CostModel
from swiftapex.policies.base import Policy
from swiftapex.scheduler.candidates import (
    ASYMMETRIC,
    EQUATION_5,
    GPU_ONLY,
    against_gpu_only,
    candidates,
    one_batch_us,
    times,
    two_batches_us,
)
from swiftapex.scheduler.compose import add_gpu_decodes, main_batch, promote
from swiftapex.scheduler.cpu_tier import cpu_decodes
from swiftapex.scheduler.prefill import add_prefill, full_for_split, gpu_first
from swiftapex.scheduler.split import add_split, split_for, split_wins, trim_swap_out
from swiftapex.scheduler.state import SchedulerState


class Neo(Policy):
    """The six steps of section 4 of the paper. CPU decodes that are overdue are taken in whether
    or not the GPU hides them."""

    uses_cpu = True

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        # 1. Two empty sub-batches.
        first, second = main_batch(state), state.new_batch()
        # 2. GPU decodes; what the GPU cannot hold goes to the CPU, what it can comes back.
        add_gpu_decodes(state, first, demote=True)
        promote(state, first)
        # 3. Prefill chunks.
        add_prefill(state, first, gpu_first(state, full_for_split(state, cost_model)))
        # 4. CPU decodes, as long as their attention stays hidden.
        waiting = cpu_decodes(state)
        overdue = len(state.overdue(waiting))
        split = split_for(state, cost_model, first, second, waiting, forced=overdue)
        # 5. Not so many chunks of prompts bound for the CPU that it idles.
        split = trim_swap_out(state, cost_model, first, split)
        # 6. Two batches, or the GPU's alone.
        found = candidates(state, cost_model, first, split, rows=0)
        sides = against_gpu_only(found, EQUATION_5, ASYMMETRIC)
        if not overdue and not split_wins(state, cost_model, first, split):
            alone = one_batch_us(state, cost_model, first.load)
            return state.step_plan(GPU_ONLY, [first], (), alone, times(found), sides)
        add_split(state, (first, second), waiting, split)
        predicted = two_batches_us(state, cost_model, first.load, second.load)
        return state.step_plan(ASYMMETRIC, [first, second], (), predicted, times(found), sides)
