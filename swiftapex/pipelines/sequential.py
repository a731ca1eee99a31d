"""Sequential: one batch, one layer after the other. GPU-only execution, and the oracle."""

from __future__ import annotations

from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.pipelines.base import Pipeline


class Sequential(Pipeline):
    """Per layer: pre-projection, attention, post-projection."""

    def step(self, plan: StepPlan) -> StepResult:
        (sub_batch,) = plan.sub_batches
        stages, attention = self.parts.stages, self.parts.attention
        batch = self.parts.bind(sub_batch)
        x = stages.embed(batch.token_ids)
        for layer in range(stages.config.num_layers):
            qkv = stages.pre_attn(layer, x, batch.rotation)
            o = attention.submit(layer, batch.attention, qkv).wait()
            x = stages.post_attn(layer, o, x)
        return self.parts.complete(batch, x)
