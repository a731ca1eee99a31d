"""Asynchronous overlap (APEX, arXiv 2506.03296): one unified batch, CPU results one pass later.

    GPU   | pre 0 | attend 0 | post 0, pre 1 | attend 1 | post 1, pre 2 | ...
    CPU   |        cohort A at layer 0 ................ | cohort B at layer 1 ...

After `pre` of a layer a cohort's CPU rows hand over Q, K, V and park there with their residual; the
pass goes on with the GPU rows. When a later pass reaches `post` of that layer and the cohort's
ticket is ready, it rejoins the unified batch, advances to the next layer and parks again. A cohort
that is not ready stays parked: the pass never waits for the CPU. So the CPU has a whole pass for
what would else have to fit into one layer's GPU attention, and no linear layer runs twice.
"""

from __future__ import annotations

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.pipelines.base import Pipeline
from swiftapex.pipelines.walk import Walk


class AsyncOverlap(Pipeline):
    """The sub-batch holds GPU decodes and prefill chunks; `new_cohorts` the CPU decodes.

    A pass with no rows of its own waits for the longest-submitted ticket, and only for it:
    waiting at every layer would gather all cohorts into one.
    """

    def step(self, plan: StepPlan) -> StepResult:
        (sub_batch,) = plan.sub_batches
        walk = Walk(self.parts, sub_batch, plan.new_cohorts)
        if walk.is_empty:
            self.parts.parked.wait_for_oldest()
        for layer in range(self.parts.num_layers):
            walk.pre(layer)
            walk.post(layer)
        return self.parts.complete(walk.results())
