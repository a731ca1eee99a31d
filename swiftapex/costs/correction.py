"""Online correction: measured iterations bend a cost model that is wrong or has become stale."""

from __future__ import annotations

from collections.abc import Mapping

from swiftapex.core.plan import StepPlan
from swiftapex.cost_model import (
    CostModel,
    Load,
    cpu_side_attention_us,
    gpu_halves_us,
    gpu_side_attention_us,
)

STAGES = LINEAR, GPU_ATTENTION, PREFILL, CPU_ATTENTION, REST = (
    "linear", "gpu_attention", "prefill_attention", "cpu_attention", "rest",
)  # fmt: skip
_BOUND = 2.0  # factors stay within [1 / _BOUND, _BOUND]
_GAIN = 0.1  # share of an iteration's error (its logarithm) that is taken in at once
_GOOD_ENOUGH = 0.01  # relative error from which on there is something to correct
_OUTLIER = 3.0  # an iteration that took so many times longer or shorter says nothing


class CorrectedCostModel:
    """`base`, each stage's time multiplied by a bounded factor.

    An iteration that took r times as long as predicted moves every stage's factor towards r, in
    proportion to the stage's share of the predicted time: factor *= r ** (gain * share). Iterations
    that differ in their shares tell stages apart in the long run.
    """

    def __init__(self, base: CostModel, gain: float = _GAIN, bound: float = _BOUND) -> None:
        self.num_layers = base.num_layers
        self.factors = dict.fromkeys(STAGES, 1.0)
        self._base = base
        self._gain = gain
        self._bound = bound

    def linear_us(self, rows: int) -> float:
        return self._base.linear_us(rows) * self.factors[LINEAR]

    def gpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        return self._base.gpu_attention_us(tokens, requests) * self.factors[GPU_ATTENTION]

    def prefill_attention_us(self, chunk: int, prefix: int) -> float:
        return self._base.prefill_attention_us(chunk, prefix) * self.factors[PREFILL]

    def cpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        return self._base.cpu_attention_us(tokens, requests) * self.factors[CPU_ATTENTION]

    def iteration_us(self, completing: int) -> float:
        return self._base.iteration_us(completing) * self.factors[REST]

    def hand_off_us(self, rows: int) -> float:
        return self._base.hand_off_us(rows) * self.factors[REST]

    def host_us(self, kind: str) -> float:
        return self._base.host_us(kind) * self.factors[REST]

    def copy_us(self, tokens: int) -> float:
        return self._base.copy_us(tokens)

    def observe(self, plan: StepPlan, measured_us: float) -> None:
        """Takes in how long an iteration took. Without a prediction nothing is learned."""
        predicted = plan.predicted_us
        if not predicted or measured_us <= 0:
            return
        ratio = measured_us / predicted
        if abs(ratio - 1) < _GOOD_ENOUGH or not 1 / _OUTLIER < ratio < _OUTLIER:
            return
        for stage, us in stage_times(self, plan).items():
            share = min(1.0, us / predicted)
            factor = self.factors[stage] * ratio ** (self._gain * share)
            self.factors[stage] = min(max(factor, 1 / self._bound), self._bound)


def stage_times(cost: CostModel, plan: StepPlan) -> Mapping[str, float]:
    """µs of an iteration by stage, as far as they lie on its critical path: where the CPU's
    attention hides the GPU's work, the CPU's counts and that work does not."""
    loads = [Load.of(batch.rows) for batch in plan.sub_batches]
    layers = cost.num_layers
    us = dict.fromkeys(STAGES, 0.0)
    first, second = loads[0], loads[1] if len(loads) > 1 else Load()
    attention = gpu_side_attention_us(cost, first)
    decode = cost.gpu_attention_us(first.gpu_tokens, first.gpu_requests)
    beside_first, beside_second = gpu_halves_us(cost, first, second)
    if len(loads) == 1 and first.cpu_requests:  # one batch: nothing hides the CPU
        us[CPU_ATTENTION] = layers * cpu_side_attention_us(cost, first)
    hidden_by_second = len(loads) > 1 and cpu_side_attention_us(cost, second) > beside_first
    hidden_by_first = len(loads) > 1 and cpu_side_attention_us(cost, first) > beside_second
    if hidden_by_second:
        us[CPU_ATTENTION] += layers * cpu_side_attention_us(cost, second)
    else:
        us[LINEAR] += layers * cost.linear_us(first.rows)
    if hidden_by_first:
        us[CPU_ATTENTION] += layers * cpu_side_attention_us(cost, first)
    else:
        us[LINEAR] += layers * cost.linear_us(second.rows)
        us[GPU_ATTENTION] += layers * decode
        us[PREFILL] += layers * (attention - decode)
    us[REST] = max(0.0, (plan.predicted_us or 0.0) - sum(us.values()))
    return us
