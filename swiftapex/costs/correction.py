"""Online correction: measured iterations bend a cost model that is wrong or has become stale."""

from __future__ import annotations

from collections.abc import Mapping

from swiftapex.core.plan import StepPlan
from swiftapex.core.request import Placement
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
_GOOD_ENOUGH_TWO = 0.03  # of two sub-batches, which wait for one another
_CLOSE = 0.8  # from this share of the GPU's time on, the CPU's may have been what took longer
_RELAX = 0.01  # share of the CPU's factor (its logarithm) that is forgotten where nothing overran
_FORGET = 0.003  # and in an iteration that says nothing of it
_STEP = 1.5  # a single iteration's ratio counts as no more than this
_OUTLIER = 3.0  # an iteration that took so many times longer or shorter says nothing


class CorrectedCostModel:
    """`base`, each stage's time multiplied by a bounded factor.

    An iteration that took r times as long as predicted moves every stage's factor towards r, in
    proportion to the stage's share of the predicted time: factor *= r ** (gain * share). Iterations
    that differ in their shares tell stages apart in the long run.

    Two sub-batches are made so that the GPU just hides the CPU's attention. One that took longer
    than predicted would, put down to the GPU's work, let still more CPU decodes be hidden behind
    it, and so on to the bound. So it is put down to the CPU, whose rate varies with what else reads
    the host's memory: as long as it should have taken at least 0.8 of the GPU's time by `base`, and
    where nothing overran that factor falls back towards 1, so that it cannot stay too high. While
    there are no such iterations it does so too, by half in some 230 of others, since a policy that
    finds the CPU too slow to be used would not see that it is faster again.
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

    def layerwise_us(self, rows: int) -> float:
        return self._base.layerwise_us(rows) * self.factors[REST]

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
        two, close = len(plan.sub_batches) > 1, 1.0
        good_enough = _GOOD_ENOUGH_TWO if two else _GOOD_ENOUGH
        if two and ratio >= 1 + good_enough:
            close = min(1.0, _CLOSE * self.factors[CPU_ATTENTION])
        elif self.factors[CPU_ATTENTION] > 1 and (two or not _cpu_decodes(plan)):
            self.factors[CPU_ATTENTION] **= 1 - (_RELAX if two else _FORGET)
        if abs(ratio - 1) < good_enough or not 1 / _OUTLIER < ratio < _OUTLIER:
            return
        ratio = min(max(ratio, 1 / _STEP), _STEP)
        for stage, us in stage_times(self, plan, close).items():
            share = min(1.0, us / predicted)
            factor = self.factors[stage] * ratio ** (self._gain * share)
            self.factors[stage] = min(max(factor, 1 / self._bound), self._bound)


def _cpu_decodes(plan: StepPlan) -> bool:
    """They are the last rows of a sub-batch."""
    last = [batch.rows[-1] for batch in plan.sub_batches if batch.rows]
    return any(row.placement is Placement.CPU for row in last)


def stage_times(cost: CostModel, plan: StepPlan, close: float = 1.0) -> Mapping[str, float]:
    """µs of an iteration by stage, as far as they lie on its critical path: where the CPU's
    attention takes longer than the GPU's work beside it, or than a share `close` of that, the CPU's
    counts and that work does not."""
    loads = [Load.of(batch.rows) for batch in plan.sub_batches]
    layers = cost.num_layers
    us = dict.fromkeys(STAGES, 0.0)
    first, second = loads[0], loads[1] if len(loads) > 1 else Load()
    attention = gpu_side_attention_us(cost, first)
    decode = cost.gpu_attention_us(first.gpu_tokens, first.gpu_requests)
    beside_first, beside_second = gpu_halves_us(cost, first, second)
    if len(loads) == 1 and first.cpu_requests:  # one batch: nothing hides the CPU
        us[CPU_ATTENTION] = layers * cpu_side_attention_us(cost, first)
    hidden_by_second = cpu_side_attention_us(cost, second) > close * beside_first
    hidden_by_first = cpu_side_attention_us(cost, first) > close * beside_second
    if len(loads) > 1 and hidden_by_second:
        us[CPU_ATTENTION] += layers * cpu_side_attention_us(cost, second)
    else:
        us[LINEAR] += layers * cost.linear_us(first.rows)
    if len(loads) > 1 and hidden_by_first:
        us[CPU_ATTENTION] += layers * cpu_side_attention_us(cost, first)
    else:
        us[LINEAR] += layers * cost.linear_us(second.rows)
        us[GPU_ATTENTION] += layers * decode
        us[PREFILL] += layers * (attention - decode)
    us[REST] = max(0.0, (plan.predicted_us or 0.0) - sum(us.values()))
    return us
