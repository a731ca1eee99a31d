"""A policy that does anything that the rules allow, from a seed: what survives it is exact under
any placement, order and timing."""

from __future__ import annotations

import random

from swiftapex.core.plan import StepPlan
from swiftapex.core.request import SIDES, Placement, Request
from swiftapex.policies.base import Policy
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.state import SchedulerState

PIPELINES = ("sequential", "async_overlap", "asymmetric", "symmetric")


class RandomPolicy(Policy):
    """pipeline None: another one in every iteration."""

    uses_cpu = True

    def __init__(self, seed: int, pipeline: str | None = None) -> None:
        self._random = random.Random(seed)
        self._pipeline = pipeline
        self.used: set[str] = set()  # what happened at least once

    def plan(self, state: SchedulerState, *_: object) -> StepPlan:
        rng = self._random
        pipeline = self._pipeline or rng.choice(PIPELINES)
        two = pipeline in ("asymmetric", "symmetric")
        batches = [state.new_batch() for _ in range(2 if two else 1)]
        cohorts: list[BatchDraft] = []
        self._shuffle_placements(state)
        for request in state.decoding(Placement.GPU):
            wanted = state.is_free(request) and batches[0].room > 0 and rng.random() < 0.9
            if wanted and self._has_block(state, request):
                state.add_decode(batches[0], request)
        self._start(state)
        for request in state.prefilling():
            if rng.random() < 0.8:
                state.add_chunk(batches[0], request, rng.randint(1, 40))
        on_cpu = [r for r in state.decoding(Placement.CPU) if rng.random() < 0.8]
        rng.shuffle(on_cpu)
        for request in on_cpu:
            if not (state.is_free(request) and self._has_block(state, request)):
                continue
            if pipeline != "sequential" and rng.random() < 0.6:
                if not cohorts or rng.random() < 0.3:
                    cohorts.append(state.new_batch())
                draft = rng.choice(cohorts)
            else:
                draft = rng.choice(batches)
            if draft.room > 0:
                state.add_decode(draft, request)
        self.used |= {pipeline} | ({"cohort"} if any(c.rows for c in cohorts) else set())
        return state.step_plan(pipeline, batches, cohorts)

    def _shuffle_placements(self, state: SchedulerState) -> None:
        for request in state.queue.running:
            if not state.is_free(request) or self._random.random() > 0.15:
                continue
            target = self._random.choice(SIDES)
            if self._random.random() < 0.2:
                state.preempt(request)
                self.used.add("preempt")
            elif request.placement.side is not target and state.can_move(request, target):
                state.move(request, target)
                self.used.add(f"move to {target.value}")

    def _has_block(self, state: SchedulerState, request: Request) -> bool:
        """Where there is none, some other request may have to yield, as in any policy."""
        if state.has_block(request):
            return True
        side = request.placement.side
        others = [
            r
            for r in state.queue.running
            if r is not request and r.placement.side is side and state.is_free(r)
        ]
        if others:
            state.preempt(self._random.choice(others))
        return state.has_block(request)

    def _start(self, state: SchedulerState) -> None:
        while state.queue.num_waiting and self._random.random() < 0.7:
            request = state.queue.waiting[0]
            sides = [Placement.GPU, Placement.STAGING]
            self._random.shuffle(sides)
            fitting = [p for p in sides if state.can_start(request, p)]
            if not fitting:
                return
            state.start(request, fitting[0])
            self.used.add(fitting[0].value)
