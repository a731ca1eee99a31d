"""The rule of thumb rho_c rho_t > 1: use the CPU where it is strong enough beside the GPU."""

from __future__ import annotations

from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import Inequality, StepPlan
from swiftapex.core.request import Placement
from swiftapex.cost_model import CostModel, Load, gpu_only_us
from swiftapex.policies.base import Policy
from swiftapex.scheduler.candidates import (
    ASYMMETRIC,
    GPU_ONLY,
    OVERLAP,
    candidates,
    one_batch_us,
    times,
    two_batches_us,
)
from swiftapex.scheduler.cohorts import check_cohorts, cohorts_wanted
from swiftapex.scheduler.compose import add_gpu_decodes, main_batch, promote
from swiftapex.scheduler.cpu_tier import cohort_reserve, cohort_rows, cpu_decodes
from swiftapex.scheduler.equations import speedup_estimate
from swiftapex.scheduler.overlap import overlap_plan
from swiftapex.scheduler.prefill import add_prefill, full_for_overlap, gpu_first
from swiftapex.scheduler.split import add_split, split_for, split_wins, trim_swap_out
from swiftapex.scheduler.state import SchedulerState

_SAMPLE_TOKENS, _SAMPLE_REQUESTS = 16384, 32  # the decodes by which both sides are rated


class Rho(Policy):
    """Uses the CPU wherever S ~ rho_c rho_t is above `threshold`, else the GPU alone.

    rho_c is the CPU's rate of decode attention over the GPU's, rho_t the share of the iteration's
    time that is not prefill. Since rho_c < 1 on any machine with a GPU worth the name, and
    rho_t <= 1, the rule as stated (threshold 1) never uses the CPU: the threshold is a setting, for
    studies of the rule. With the CPU in use, two batches run where they are predicted to win, else
    asynchronous overlap, as with `apex`. `cohorts`: as for `apex`.
    """

    uses_cpu = True

    def __init__(self, threshold: float = 1.0, cohorts: int | None = None) -> None:
        if threshold < 0:
            raise ConfigError(f"threshold must be >= 0, got {threshold}")
        check_cohorts(cohorts)
        self.threshold = threshold
        self.cohorts = cohorts

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        rows = cohort_rows(state, self.cohorts)
        first = main_batch(state, cohort_reserve(state, rows))
        second = state.new_batch()
        wanted = cohorts_wanted(state.num_decoding(Placement.CPU), self.cohorts)
        add_gpu_decodes(state, first, demote=True)
        promote(state, first)
        add_prefill(state, first, gpu_first(state, full_for_overlap(state, cost_model, wanted)))

        waiting = cpu_decodes(state)
        overdue = len(state.overdue(waiting))
        split = split_for(state, cost_model, first, second, waiting, forced=overdue)
        found = candidates(state, cost_model, first, split, rows)
        estimate = speedup_estimate(cpu_over_gpu(cost_model), decode_share(cost_model, first.load))
        sides = Inequality("rho_c rho_t > threshold", estimate, self.threshold)
        uses_cpu = estimate > self.threshold or overdue or not first.num_rows
        if not uses_cpu or not (split.count or rows or state.num_in_flight):
            alone = one_batch_us(state, cost_model, first.load)
            return state.step_plan(GPU_ONLY, [first], (), alone, times(found), sides)
        if not split_wins(state, cost_model, first, split):
            return overlap_plan(state, cost_model, first, rows, OVERLAP, times(found), sides)
        split = trim_swap_out(state, cost_model, first, split)
        add_split(state, (first, second), waiting, split)
        predicted = two_batches_us(state, cost_model, first.load, second.load)
        return state.step_plan(ASYMMETRIC, [first, second], (), predicted, times(found), sides)


def cpu_over_gpu(cost: CostModel) -> float:
    """rho_c, for decodes of middling contexts."""
    gpu = cost.gpu_attention_us(_SAMPLE_TOKENS, _SAMPLE_REQUESTS)
    cpu = cost.cpu_attention_us(_SAMPLE_TOKENS, _SAMPLE_REQUESTS)
    return gpu / cpu if cpu > 0 else 0.0


def decode_share(cost: CostModel, load: Load) -> float:
    """rho_t: what the iteration would take without its chunks, over what it takes."""
    whole = gpu_only_us(cost, load)
    return gpu_only_us(cost, load.without_chunks()) / whole if whole > 0 else 1.0
