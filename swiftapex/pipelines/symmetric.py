"""Symmetric pipelining (FastDecode+, the baseline in NEO's evaluation): two equal sub-batches.

    GPU   | post0[i] pre0[i+1] | post1[i] pre1[i+1] | post0[i+1] pre0[i+2] | ...
    CPU   | attend1[i] ....... | attend0[i+1] ..... | attend1[i+1] ....... | ...

All decode attention is on the CPU; the halves take turns. The GPU keeps no KV of decodes, and
prefills through the staging area.
"""

from __future__ import annotations

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.pipelines.base import Pipeline
from swiftapex.pipelines.walk import Walk


class Symmetric(Pipeline):
    """Decodes are split evenly over both sub-batches by the policy; chunks are in the first."""

    def step(self, plan: StepPlan) -> StepResult:
        halves = [
            Walk(self.parts, sub_batch, index=i, with_riders=i == 0)
            for i, sub_batch in enumerate(plan.sub_batches)
        ]
        if all(half.is_empty for half in halves):
            self.parts.parked.wait_for_oldest()
        self.parts.repeated.run(self._layers, *halves)
        return self.parts.complete([pair for half in halves for pair in half.results()])

    def _layers(self, *halves: Walk) -> None:
        for layer in range(self.parts.num_layers):
            for half in halves:
                if layer > 0:
                    half.post(layer - 1)
                half.pre(layer)
        for half in halves:
            half.post(self.parts.num_layers - 1)
