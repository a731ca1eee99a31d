"""Pipelines for the profiler: a batch through all layers several times, or without attention."""

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
            self.parts.repeated.run(layers, walk)
        return self.parts.complete(walk.results())


class LinearStages(Pipeline):
    """The layers without attention: what lies where its outputs would does not change their time.
    Rows of decodes would add an attention call over as many contexts, chunks one over their own
    tokens; a pass of some hundred rows has neither."""

    def step(self, plan: StepPlan) -> StepResult:
        (sub_batch,) = plan.sub_batches
        batch, stages = self.parts.bind(sub_batch), self.parts.stages(0)
        x = stages.embed(batch.token_ids)
        o = None
        for layer in range(self.parts.num_layers):
            qkv = stages.pre_attn(layer, x, batch.rotation)
            if o is None:
                o = qkv[:, : stages.config.num_q_heads].flatten(1)
            x = stages.post_attn(layer, o, x)
        return self.parts.complete([(batch, x)])
