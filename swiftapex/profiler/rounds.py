"""A pipeline for the profiler: takes a batch through all layers several times."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.pipelines.base import Pipeline
from swiftapex.pipelines.sequential import Sequential
from swiftapex.pipelines.walk import Walk

ROUNDS = 4


class Rounds(Pipeline):
    """As Sequential, but takes the batch through all layers ROUNDS times. The difference to one
    round is the time of the layers alone; the rest is what an iteration costs besides."""

    def step(self, plan: StepPlan) -> StepResult:
        (sub_batch,) = plan.sub_batches
        walk = Walk(self.parts, sub_batch)
        layers = Sequential(self.parts)._layers
        for _ in range(ROUNDS):
            self.parts.repeated.run(walk, layers)
        return self.parts.complete(walk.results())
