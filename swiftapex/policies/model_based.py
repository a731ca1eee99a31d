"""The best of all strategies, as the cost model predicts them for the present state."""

from __future__ import annotations

from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import StepPlan
from swiftapex.core.request import Placement, Request
from swiftapex.cost_model import CostModel
from swiftapex.policies.base import Policy
from swiftapex.scheduler.candidates import (
    ASYMMETRIC,
    BEST_RATE,
    GPU_ONLY,
    OVERLAP,
    Candidate,
    against_gpu_only,
    candidates,
    cpu_pays,
    one_batch_us,
    times,
    two_batches_us,
)
from swiftapex.scheduler.cohorts import cohorts_wanted
from swiftapex.scheduler.compose import add_gpu_decodes, main_batch, promote
from swiftapex.scheduler.cpu_tier import cohort_reserve, cohort_rows, cpu_decodes
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.overlap import overlap_plan
from swiftapex.scheduler.prefill import CpuFull, add_prefill, full_for_overlap, gpu_first
from swiftapex.scheduler.split import add_split, split_for, trim_swap_out
from swiftapex.scheduler.state import SchedulerState


class ModelBased(Policy):
    """Predicts GPU-only, asymmetric pipelining and asynchronous overlap, and takes the one that
    serves most requests per time; a visit of a parked decode counts 1 / (L + 1) of a token.

    `cohorts`: as for `apex`. `margin`: by what share a strategy with the CPU must beat GPU-only:
    what predictions get wrong must not cost anything where the CPU has little to give. No prompt is
    sent to the CPU while decoding there would not raise the rate.
    """

    uses_cpu = True

    def __init__(self, cohorts: int | None = None, margin: float = 0.02) -> None:
        if cohorts is not None and cohorts < 1:
            raise ConfigError(f"cohorts must be >= 1 or null, got {cohorts}")
        if margin < 0:
            raise ConfigError(f"margin must be >= 0, got {margin}")
        self.cohorts = cohorts
        self.margin = margin

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        rows = cohort_rows(state, self.cohorts)
        first = main_batch(state, cohort_reserve(state, rows))
        second = state.new_batch()
        add_gpu_decodes(state, first, demote=True)
        promote(state, first)
        place = gpu_first(state, self._cpu_full(state, cost_model), keep_busy=False)
        add_prefill(state, first, place)

        waiting = cpu_decodes(state)
        overdue = len(state.overdue(waiting))
        split = split_for(state, cost_model, first, second, waiting, forced=overdue)
        found = candidates(state, cost_model, first, split, rows)
        sides = against_gpu_only(found, BEST_RATE, ASYMMETRIC, OVERLAP)
        chosen = self._best(found, must_use_cpu=overdue > 0)
        if chosen == OVERLAP:
            return overlap_plan(state, cost_model, first, rows, OVERLAP, times(found), sides)
        if chosen == GPU_ONLY:
            alone = one_batch_us(state, cost_model, first.load)
            return state.step_plan(GPU_ONLY, [first], (), alone, times(found), sides)
        split = trim_swap_out(state, cost_model, first, split)
        add_split(state, (first, second), waiting, split)
        predicted = two_batches_us(state, cost_model, first.load, second.load)
        return state.step_plan(ASYMMETRIC, [first, second], (), predicted, times(found), sides)

    def _best(self, found: dict[str, Candidate], must_use_cpu: bool) -> str:
        """The highest rate. GPU-only where nothing can run, and not where a CPU decode must."""
        rates = {name: candidate.rate for name, candidate in found.items()}
        if GPU_ONLY in rates:
            rates[GPU_ONLY] *= 1 + self.margin
        if must_use_cpu and len(rates) > 1:
            rates.pop(GPU_ONLY, None)
        return max(rates, key=rates.__getitem__, default=GPU_ONLY)

    def _cpu_full(self, state: SchedulerState, cost: CostModel) -> CpuFull:
        """Full as for asynchronous overlap; and always where decoding there does not pay."""
        wanted = cohorts_wanted(state.num_decoding(Placement.CPU), self.cohorts)
        full = full_for_overlap(state, cost, wanted)

        pays: list[bool] = []  # asked once: the iteration's decodes are there already

        def is_full(batch: BatchDraft, request: Request) -> bool:
            if full(batch, request):
                return True
            if not pays:
                pays.append(cpu_pays(state, cost, batch.load, request.num_tokens, self.margin))
            return not pays[0]

        return is_full
