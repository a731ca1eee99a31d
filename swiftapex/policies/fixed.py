"""The same pipeline in every iteration, for studies of one pipeline."""

from __future__ import annotations

from collections.abc import Callable

from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import StepPlan
from swiftapex.core.request import Placement
from swiftapex.cost_model import CostModel, asymmetric_us, gpu_only_us
from swiftapex.policies.base import Policy
from swiftapex.scheduler.cohorts import check_cohorts, cohorts_wanted
from swiftapex.scheduler.compose import add_gpu_decodes, gpu_batch, main_batch, promote
from swiftapex.scheduler.cpu_tier import (
    add_cpu_halves,
    cohort_reserve,
    cohort_rows,
    cpu_decodes,
    take_cpu_decode,
)
from swiftapex.scheduler.overlap import overlap_plan
from swiftapex.scheduler.prefill import (
    add_prefill,
    full_for_overlap,
    full_for_split,
    gpu_first,
    never_full,
)
from swiftapex.scheduler.split import add_split, split_for
from swiftapex.scheduler.state import SchedulerState

_SHAPES = {"asymmetric": "two", "symmetric": "halves", "async_overlap": "cohorts"}


class Fixed(Policy):
    """`fixed:<pipeline>`, a known name or `package.module:Class`.

    `shape` of its batches (None: what the pipeline of that name takes, else "one"):
    one      a single batch. Without `use_cpu` as GPU-only composes it, else with CPU decodes.
    two      NEO's split, without the choice of GPU-only; at least one CPU decode.
    halves   CPU decodes in two equal halves, whether or not they are hidden.
    cohorts  asynchronous overlap; `cohorts` in flight at most (None: as for `apex`).
    """

    def __init__(
        self,
        pipeline: str,
        shape: str | None = None,
        use_cpu: bool = False,
        cohorts: int | None = None,
    ) -> None:
        shape = shape or _SHAPES.get(pipeline, "one")
        composers: dict[str, Callable[[SchedulerState, CostModel], StepPlan]] = {
            "one": self._one if use_cpu else self._gpu_only,
            "two": self._two,
            "halves": self._halves,
            "cohorts": self._cohorts,
        }
        if shape not in composers:
            raise ConfigError(f"shape {shape!r} is unknown: expected one of {', '.join(composers)}")
        check_cohorts(cohorts)
        self.pipeline = pipeline
        self.cohorts = cohorts
        self.uses_cpu = use_cpu or shape != "one"
        self._compose = composers[shape]

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        return self._compose(state, cost_model)

    def _gpu_only(self, state: SchedulerState, cost: CostModel) -> StepPlan:
        batch = gpu_batch(state)
        predicted = gpu_only_us(cost, batch.load)
        return state.step_plan(self.pipeline, [batch], predicted_us=predicted)

    def _one(self, state: SchedulerState, cost: CostModel) -> StepPlan:
        batch = main_batch(state)
        for request in state.overdue(cpu_decodes(state)):
            take_cpu_decode(state, batch, request)
        add_gpu_decodes(state, batch, demote=True)
        promote(state, batch)
        for request in list(cpu_decodes(state)):
            take_cpu_decode(state, batch, request)
        add_prefill(state, batch, gpu_first(state, never_full))
        load = batch.load
        on_cpu = cost.num_layers * cost.cpu_attention_us(load.cpu_tokens)  # nothing hides it
        predicted = gpu_only_us(cost, load) + on_cpu
        return state.step_plan(self.pipeline, [batch], predicted_us=predicted)

    def _two(self, state: SchedulerState, cost: CostModel) -> StepPlan:
        first, second = main_batch(state), state.new_batch()
        add_gpu_decodes(state, first, demote=True)
        promote(state, first)
        add_prefill(state, first, gpu_first(state, full_for_split(state, cost)))
        waiting = cpu_decodes(state)
        forced = max(1, len(state.overdue(waiting)))
        split = split_for(state, cost, first, second, waiting, forced)
        add_split(state, (first, second), waiting, split)
        predicted = asymmetric_us(cost, first.load, second.load)
        return state.step_plan(self.pipeline, [first, second], predicted_us=predicted)

    def _halves(self, state: SchedulerState, cost: CostModel) -> StepPlan:
        first, second = main_batch(state), state.new_batch()
        add_gpu_decodes(state, first, demote=True)
        promote(state, first)
        add_cpu_halves(state, first, second, cpu_decodes(state))
        add_prefill(state, first, gpu_first(state, never_full))
        predicted = asymmetric_us(cost, first.load, second.load)
        return state.step_plan(self.pipeline, [first, second], predicted_us=predicted)

    def _cohorts(self, state: SchedulerState, cost: CostModel) -> StepPlan:
        rows = cohort_rows(state, self.cohorts)
        main = main_batch(state, cohort_reserve(state, rows))
        wanted = cohorts_wanted(state.num_decoding(Placement.CPU), self.cohorts)
        add_gpu_decodes(state, main, demote=True)
        promote(state, main)
        add_prefill(state, main, gpu_first(state, full_for_overlap(state, cost, wanted)))
        return overlap_plan(state, cost, main, rows, self.pipeline)
