"""Sequential: one batch, one layer after the other. GPU-only execution, and the oracle."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.pipelines.base import Pipeline
from swiftapex.pipelines.walk import Walk


class Sequential(Pipeline):
    """Per layer: pre-projection, attention (waited for, on either side), post-projection."""

    def step(self, plan: StepPlan) -> StepResult:
        (sub_batch,) = plan.sub_batches
        walk = Walk(self.parts, sub_batch)
        if walk.is_empty:
            self.parts.parked.wait_for_oldest()
        self.parts.repeated.run(self._layers, walk)
        return self.parts.complete(walk.results())

    def _layers(self, walk: Walk) -> None:
        for layer in range(self.parts.num_layers):
            walk.pre(layer)
            walk.post(layer)
