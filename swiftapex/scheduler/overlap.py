"""An iteration of asynchronous overlap (APEX, arXiv 2506.03296)."""

from __future__ import annotations

from collections.abc import Mapping

from swiftapex.core.plan import Inequality, StepPlan
from swiftapex.core.request import CPU
from swiftapex.cost_model import CostModel, overlap_us, visit_us
from swiftapex.scheduler.cpu_tier import new_cohort
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.prefill import cut_chunks, overlap_chunk_tokens
from swiftapex.scheduler.state import SchedulerState


def overlap_plan(
    state: SchedulerState,
    cost: CostModel,
    main: BatchDraft,
    rows: int,
    pipeline: str = "async_overlap",
    candidates_us: Mapping[str, float] | None = None,
    inequality: Inequality | None = None,
    keep: int | None = None,
) -> StepPlan:
    """The plan of `main`, its chunks cut to `keep` tokens (None: what a pass should hold), and a
    cohort of at most `rows` CPU decodes."""
    in_flight = state.num_in_flight + rows
    if in_flight and main.chunks:
        if keep is None:
            cohorts = len(state.cohorts) + bool(rows)
            visit = visit_us(cost, state.cpu_tokens, cohorts, state.running_on(CPU))
            keep = overlap_chunk_tokens(cost, main.load, in_flight, visit, state.cpu_free)
        cut_chunks(state, main, main.chunks, keep)
    new = [new_cohort(state, main, rows)] if rows else []
    started = new[0].num_rows if new else 0
    in_flight, cohorts = state.num_in_flight + started, len(state.cohorts) + bool(started)
    predicted = overlap_us(cost, main.load, in_flight, cohorts)
    if moving := state.moving_tokens:
        predicted = max(predicted, cost.copy_us(moving))
    return state.step_plan(pipeline, [main], new, predicted, candidates_us, inequality)
