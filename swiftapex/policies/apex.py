"""APEX (arXiv 2506.03296): GPU-only, asymmetric or asynchronous overlap, iteration by iteration."""

from __future__ import annotations

import enum

from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import Inequality, StepPlan
from swiftapex.core.request import Placement
from swiftapex.cost_model import CostModel
from swiftapex.policies.base import Policy
from swiftapex.scheduler.candidates import (
    ASYMMETRIC,
    EQUATION_5,
    GPU_ONLY,
    OVERLAP,
    against_gpu_only,
    candidates,
    one_batch_us,
    times,
    two_batches_us,
)
from swiftapex.scheduler.cohorts import check_cohorts, cohorts_wanted
from swiftapex.scheduler.compose import add_gpu_decodes, main_batch, promote
from swiftapex.scheduler.cpu_tier import cohort_reserve, cohort_rows, cpu_decodes
from swiftapex.scheduler.overlap import overlap_plan
from swiftapex.scheduler.prefill import add_prefill, full_for_overlap, gpu_first
from swiftapex.scheduler.split import add_split, split_for, split_wins, trim_swap_out
from swiftapex.scheduler.state import SchedulerState

_RATIO = "CPU requests per GPU request > min_cpu_gpu_ratio"


class Strategy(enum.Enum):
    GPU_ONLY = GPU_ONLY
    ASYMMETRIC = ASYMMETRIC
    OVERLAP = OVERLAP


def select_strategy(
    *,
    num_gpu: int,
    num_cpu: int,
    gpu_rows: int,
    overdue: int,
    min_ratio: float,
    scheduled: int,
    asymmetric_wins: bool,
    overlap: bool = True,
) -> Strategy:
    """StrategySelection of the paper.

    num_gpu, num_cpu: requests that decode on each side, parked ones included. gpu_rows: GPU
    decodes and chunks of this iteration; without any there is no GPU-only. overdue: CPU requests
    that must not be left out again. scheduled: CPU decodes that NEO's split takes in. overlap:
    whether asynchronous overlap may be chosen; without it what is schedulable and overdue, or has
    no GPU rows to run beside, is still scheduled.
    """
    few = num_cpu < min_ratio * num_gpu
    if gpu_rows and not overdue and (num_cpu == 0 or few):
        return Strategy.GPU_ONLY
    if scheduled and asymmetric_wins:
        return Strategy.ASYMMETRIC
    if overlap:
        return Strategy.OVERLAP
    must = scheduled and (overdue or not gpu_rows)
    return Strategy.ASYMMETRIC if must else Strategy.GPU_ONLY


class Apex(Policy):
    """`min_cpu_gpu_ratio`: with fewer CPU requests per GPU request an iteration is GPU-only.
    `cohorts`: how many are in flight at most, from 2 to 32 (None: one per 16 CPU requests, and no
    more than 8 unless those had more than 64 each).

    For ablations: without `overlap` there is no asynchronous overlap, and what is not worth two
    batches runs on the GPU alone. Without `analytic_model` nothing is predicted: the ratio does not
    count, and two batches run wherever NEO's split takes a CPU decode in."""

    uses_cpu = True

    def __init__(
        self,
        min_cpu_gpu_ratio: float = 8,
        cohorts: int | None = None,
        overlap: bool = True,
        analytic_model: bool = True,
    ) -> None:
        if min_cpu_gpu_ratio < 0:
            raise ConfigError(f"min_cpu_gpu_ratio must be >= 0, got {min_cpu_gpu_ratio}")
        check_cohorts(cohorts)
        self.min_cpu_gpu_ratio = min_cpu_gpu_ratio
        self.cohorts = cohorts
        self.overlap = overlap
        self.analytic_model = analytic_model

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        rows = cohort_rows(state, self.cohorts) if self.overlap else 0
        first = main_batch(state, cohort_reserve(state, rows))
        second = state.new_batch()
        num_gpu = state.num_decoding(Placement.GPU)
        num_cpu = state.num_decoding(Placement.CPU)
        wanted = cohorts_wanted(num_cpu, self.cohorts)
        add_gpu_decodes(state, first, demote=True)
        promote(state, first)
        add_prefill(state, first, gpu_first(state, full_for_overlap(state, cost_model, wanted)))

        waiting = cpu_decodes(state)
        overdue = len(state.overdue(waiting))
        split = split_for(state, cost_model, first, second, waiting, forced=overdue)
        found = candidates(state, cost_model, first, split, rows)
        sides = against_gpu_only(found, EQUATION_5, ASYMMETRIC)
        wins = split_wins(state, cost_model, first, split) if self.analytic_model else True
        ratio = self.min_cpu_gpu_ratio if self.analytic_model else 0
        strategy = select_strategy(
            num_gpu=num_gpu,
            num_cpu=num_cpu,
            gpu_rows=first.num_rows,
            overdue=overdue,
            min_ratio=ratio,
            scheduled=split.count,
            asymmetric_wins=wins,
            overlap=self.overlap,
        )
        if strategy is Strategy.OVERLAP:
            chunk = found[OVERLAP].chunk if OVERLAP in found else None
            return overlap_plan(state, cost_model, first, rows, OVERLAP, times(found), sides, chunk)
        if strategy is Strategy.GPU_ONLY:
            if 0 < num_cpu < ratio * num_gpu and not overdue:  # which decided it
                sides = Inequality(_RATIO, num_cpu / num_gpu, ratio)
            alone = one_batch_us(state, cost_model, first.load)
            return state.step_plan(GPU_ONLY, [first], (), alone, times(found), sides)
        split = trim_swap_out(state, cost_model, first, split)
        add_split(state, (first, second), waiting, split)
        predicted = two_batches_us(state, cost_model, first.load, second.load)
        return state.step_plan(ASYMMETRIC, [first, second], (), predicted, times(found), sides)
