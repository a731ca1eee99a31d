"""Online correction: measured iterations bend a cost model that is wrong or has become stale."""

from __future__ import annotations

from collections.abc import Sequence

from swiftapex.core.plan import CpuWork, StepPlan
from swiftapex.cost_model import (
    CostModel,
    Load,
    cpu_side_attention_us,
    gpu_halves_us,
    gpu_side_attention_us,
)

GPU_STAGES = LINEAR, GPU_ATTENTION, PREFILL, REST = (
    "linear", "gpu_attention", "prefill_attention", "rest",
)  # fmt: skip
CPU_ATTENTION = "cpu_attention"
STAGES = (*GPU_STAGES, CPU_ATTENTION)
_BOUND = 2.0  # factors stay within [1 / _BOUND, _BOUND]
_CPU_BOUND = 4.0  # and the CPU's, which is measured by itself, within these
_GAIN = 0.1  # share of an iteration's error (its logarithm) that is taken in at once
_STEP = 1.5  # a single ratio counts as no more than this
_OUTLIER = 3.0  # an iteration that took so many times longer or shorter says nothing
_FORGET = 0.0003  # share of the CPU's factor (its logarithm) that an iteration without it forgets
_MEMORY = 0.2  # weight of the newest iteration in the CPU's mean load
_DOUBTFUL = 0.87  # from this load on the CPU may be what took longer
_FULL = 0.98  # from this load on it was
_DOUBT = 0.99  # what a ratio counts as then, in parts of itself


class CorrectedCostModel:
    """`base`, each stage's time multiplied by a bounded factor.

    The CPU's factor follows its own measurement: the time that its tasks were attended to, over
    what `base` says of tasks of that many rows and tokens. While it has none, a factor above 1
    falls back, by half in some 2,300 iterations: a policy that finds the CPU too slow to be used
    would not see that it is faster again.

    The other stages share an iteration's error: one that took r times as long as predicted moves
    each towards r, in proportion to its share of the predicted critical path: factor *= r ** (gain
    * share). Iterations that differ in their shares tell stages apart in the long run.

    Of two sub-batches only the slower side shows, and policies make both sides equally long: put
    down to the GPU, what such iterations take longer would let still more CPU decodes be hidden
    behind it, and so on to the bound. So it counts which share of the iterations the CPU attended,
    on the mean: from 0.87 on, factors rise no further than to 1 / 0.87 of what they were below
    that. Where it attended all the time, though the GPU was to take as long, the GPU may be
    faster than believed: its factors then fall slowly, until the GPU's time shows again.
    """

    def __init__(self, base: CostModel, gain: float = _GAIN, bound: float = _BOUND) -> None:
        self.num_layers = base.num_layers
        self.factors = dict.fromkeys(STAGES, 1.0)
        self._base = base
        self._gain = gain
        self._bound = bound
        self._cpu_load = 0.0  # mean share of time that the CPU attends, with two sub-batches
        self._sure = dict.fromkeys(GPU_STAGES, 1.0)  # factors while that was no doubtful one

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

    def observe(self, plan: StepPlan, measured_us: float, attended: CpuWork | None = None) -> None:
        """Takes in how long an iteration took, and what the CPU attended meanwhile, tasks of other
        iterations included (None: unknown). Without a prediction nothing is learned of the GPU."""
        cpu_us = self._observe_cpu(attended)
        predicted = plan.predicted_us
        if not predicted or not 1 / _OUTLIER < measured_us / predicted < _OUTLIER:
            return
        if not any(batch.rows for batch in plan.sub_batches):
            return  # it waited for parked cohorts
        ratio = min(max(measured_us / predicted, 1 / _STEP), _STEP)
        loads = [Load.of(batch.rows) for batch in plan.sub_batches]
        us = stage_times(self, loads, predicted)
        two = len(loads) > 1
        if two:
            if attended is None:
                cpu_us = self.num_layers * sum(cpu_side_attention_us(self, load) for load in loads)
            layers_us = measured_us - self.iteration_us(sum(load.completing for load in loads))
            self._cpu_load += _MEMORY * (min(_STEP, cpu_us / max(1.0, layers_us)) - self._cpu_load)
            ratio *= _DOUBT if self._cpu_load > _FULL else 1.0
        for stage in GPU_STAGES:
            share = min(1.0, us[stage] / predicted)
            factor = _within(self._bound, self.factors[stage] * ratio ** (self._gain * share))
            if two and self._cpu_load > _DOUBTFUL:
                factor = min(factor, self._sure[stage] / _DOUBTFUL)
                self._sure[stage] = min(factor, self._sure[stage])
            else:
                self._sure[stage] = factor
            self.factors[stage] = factor

    def _observe_cpu(self, attended: CpuWork | None) -> float:
        """Takes in what the CPU has done; returns the µs that it took, hand-offs included.

        Those are no part of what is measured, but of `base`: they take what a task takes whose rows
        read one token each. A task that is no more than twice that says nothing."""
        factor = self.factors[CPU_ATTENTION]
        if attended is None or attended.tasks <= 0:
            self.factors[CPU_ATTENTION] = min(factor, factor ** (1 - _FORGET))
            return 0.0
        rows, tokens = (round(each / attended.tasks) for each in (attended.rows, attended.tokens))
        whole = self._base.cpu_attention_us(tokens, rows)
        hand_off = self._base.cpu_attention_us(rows, rows)
        busy = 1e6 * attended.busy_s / attended.tasks
        if whole > 2 * hand_off and busy > 0:
            ratio = min(max(busy / (whole - hand_off) / factor, 1 / _STEP), _STEP)
            self.factors[CPU_ATTENTION] = _within(_CPU_BOUND, factor * ratio**self._gain)
        return (busy + hand_off) * attended.tasks


def _within(bound: float, factor: float) -> float:
    return min(max(factor, 1 / bound), bound)


def stage_times(cost: CostModel, loads: Sequence[Load], predicted_us: float) -> dict[str, float]:
    """µs of an iteration of these sub-batches by stage, as far as they lie on its critical path:
    where the CPU's attention takes longer than the GPU's work beside it, the CPU's counts and that
    work does not."""
    layers = cost.num_layers
    us = dict.fromkeys(STAGES, 0.0)
    first, second = loads[0], loads[1] if len(loads) > 1 else Load()
    attention = gpu_side_attention_us(cost, first)
    decode = cost.gpu_attention_us(first.gpu_tokens, first.gpu_requests)
    beside_first, beside_second = gpu_halves_us(cost, first, second)
    if len(loads) == 1 and first.cpu_requests:  # one batch: nothing hides the CPU
        us[CPU_ATTENTION] = layers * cpu_side_attention_us(cost, first)
    if len(loads) > 1 and cpu_side_attention_us(cost, second) > beside_first:
        us[CPU_ATTENTION] += layers * cpu_side_attention_us(cost, second)
    else:
        us[LINEAR] += layers * cost.linear_us(first.rows)
    if len(loads) > 1 and cpu_side_attention_us(cost, first) > beside_second:
        us[CPU_ATTENTION] += layers * cpu_side_attention_us(cost, first)
    else:
        us[LINEAR] += layers * cost.linear_us(second.rows)
        us[GPU_ATTENTION] += layers * decode
        us[PREFILL] += layers * (attention - decode)
    us[REST] = max(0.0, predicted_us - sum(us.values()))
    return us
