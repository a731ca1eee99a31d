"""Asymmetric pipelining (NEO, MLSys'25): two sub-batches half a layer out of phase.

    GPU   | post0[i] pre0[i+1] attend0 | post1[i] pre1[i+1] | post0[i+1] ...
    CPU   | attend1[i] ............... | attend0[i+1] ..... | attend1[i+1] ...

Sub-batch 0 holds all prefill chunks, all GPU decodes and few CPU decodes; sub-batch 1 most CPU
decodes. While the GPU runs the linear layers of one, the CPU attends for the other. The price is
that the linear layers read their weights twice.
"""

from __future__ import annotations

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.pipelines.base import Pipeline
from swiftapex.pipelines.walk import Walk


class Asymmetric(Pipeline):
    """Parked cohorts ride along with sub-batch 0. All CPU decodes of a plan end within it."""

    def step(self, plan: StepPlan) -> StepResult:
        large, small = plan.sub_batches
        first = Walk(self.parts, large, plan.new_cohorts, index=0)
        second = Walk(self.parts, small, index=1, with_riders=False)
        if first.is_empty and second.is_empty:
            self.parts.parked.wait_for_oldest()
        self.parts.repeated.run(self._layers, first, second)
        return self.parts.complete(first.results() + second.results())

    def _layers(self, first: Walk, second: Walk) -> None:
        last = self.parts.num_layers - 1
        first.pre(0)
        second.pre(0)
        for layer in range(last):
            first.post(layer)
            first.pre(layer + 1)
            second.post(layer)
            second.pre(layer + 1)
        first.post(last)
        second.post(last)
