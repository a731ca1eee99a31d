"""The best of all strategies, as the cost model predicts them for the present mix of requests."""

from __future__ import annotations

from collections.abc import Mapping

from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import Inequality, StepPlan
from swiftapex.core.request import Placement, Request
from swiftapex.cost_model import CostModel
from swiftapex.policies.base import Policy
from swiftapex.scheduler import steady
from swiftapex.scheduler.candidates import (
    ASYMMETRIC,
    GPU_ONLY,
    OVERLAP,
    one_batch_us,
    two_batches_us,
)
from swiftapex.scheduler.cohorts import check_cohorts
from swiftapex.scheduler.compose import add_gpu_decodes, main_batch, promote
from swiftapex.scheduler.cpu_tier import cohort_reserve, cohort_rows, cpu_decodes
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.overlap import overlap_plan
from swiftapex.scheduler.prefill import add_prefill, cut_chunks, gpu_first
from swiftapex.scheduler.split import add_split, split_for
from swiftapex.scheduler.state import SchedulerState

_EVERY = 8  # iterations between two comparisons: the mix changes slowly
_STAY = 1.05  # by how much another strategy must be better: to change takes some passes
_DOUBT = 0.08  # of what a strategy yields for which the CPU is not filled yet
_DRAINING = 0.95  # of the prompts asked for, where the CPU holds more than the strategy takes
_LEAST_CHUNK = 16  # tokens
_FILLS_GAPS = 0.1  # share of tokens by the CPU
_LEAST_BEYOND = 0.01  # share of the requests: of fewer nothing is gained
_WORDS = "tokens per ms in the long run: best with the CPU > GPU-only"


class ModelBased(Policy):
    """Predicts what GPU-only, asymmetric pipelining and asynchronous overlap would yield if they
    went on with the present mix of prompts and decodes (`scheduler/steady.py`), and takes the best.

    `cohorts`: as for `apex`. `margin`: by what share a strategy with the CPU must beat GPU-only:
    what predictions get wrong must not cost anything where the CPU has little to give. Only the
    requests that the GPU does not hold count for that. A strategy that takes more requests on the
    CPU than there are must also make up for their prompts, which put off the tokens of all requests
    that are known by then: the CPU is not filled for the sake of a few short ones. No prompt is
    sent to the CPU while GPU-only is best.
    """

    uses_cpu = True

    def __init__(self, cohorts: int | None = None, margin: float = 0.02) -> None:
        check_cohorts(cohorts)
        if not 0 <= margin <= 1:
            raise ConfigError(f"margin: expected a share from 0 to 1, got {margin}")
        self.cohorts = cohorts
        self.margin = margin
        self._strategy = GPU_ONLY
        self._yields: dict[str, steady.Steady] = {}
        self._us: dict[str, float] = {}  # of these, for the record
        self._sides: Inequality | None = None
        self._gpu_decodes = 0  # that those count on

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        if state.iteration % _EVERY == 0 or not self._yields:
            self._compare(state, cost_model)
        overdue = len(state.overdue(state.idle_on_cpu)) if state.num_idle else 0
        returning = self._strategy == ASYMMETRIC and state.num_in_flight > 0
        overlaps = self._strategy == OVERLAP or (returning and overdue)
        rows = cohort_rows(state, self.cohorts) if overlaps and state.num_idle else 0
        first = main_batch(state, cohort_reserve(state, rows) if rows else 0)
        add_gpu_decodes(state, first, demote=True)
        promote(state, first)
        add_prefill(state, first, gpu_first(state, self._cpu_full, keep_busy=False))

        us, sides = self._us, self._sides
        if rows or returning or (overlaps and state.num_in_flight):
            keep = self._chunk(OVERLAP, state) if first.chunks else None
            return overlap_plan(state, cost_model, first, rows, OVERLAP, us, sides, keep)
        if self._strategy == ASYMMETRIC or overdue or not first.num_rows:
            plan = self._two_batches(state, cost_model, first, overdue)
            if plan is not None:
                return plan
        alone = one_batch_us(state, cost_model, first.load)
        return state.step_plan(GPU_ONLY, [first], (), alone, us, sides)

    def _two_batches(
        self,
        state: SchedulerState,
        cost: CostModel,
        first: BatchDraft,
        overdue: int,
    ) -> StepPlan | None:
        """None where the split takes no CPU decode in."""
        if self._strategy == ASYMMETRIC and first.chunks:
            cut_chunks(state, first, first.chunks, self._chunk(ASYMMETRIC, state))
        # As many as the comparison found best, hidden or not: else the GPU gets more prompts than
        # the CPU finishes, or waits for fewer than it could take.
        wanted = self._yields[ASYMMETRIC].taken if self._strategy == ASYMMETRIC else 0
        second, waiting = state.new_batch(), cpu_decodes(state)
        split = split_for(state, cost, first, second, waiting, forced=overdue, wanted=wanted)
        if not split.count:
            return None
        add_split(state, (first, second), waiting, split)
        predicted = two_batches_us(state, cost, first.load, second.load)
        us, sides = self._us, self._sides
        return state.step_plan(ASYMMETRIC, [first, second], (), predicted, us, sides)

    def _compare(self, state: SchedulerState, cost: CostModel) -> None:
        """Chooses the strategy for the next iterations, each with the number of requests on the CPU
        that is worth most: of those that are there, all that it could get, and some between."""
        mix = steady.Mix.of(state)
        self._gpu_decodes = mix.gpu_decodes
        self._yields = found = {GPU_ONLY: steady.gpu_only(cost, mix)}
        if mix.cpu_decodes:
            found[ASYMMETRIC] = steady.asymmetric(cost, mix)
            found[OVERLAP] = steady.overlap(cost, mix, self.cohorts)
        self._strategy = self.best(found, mix.beyond_gpu)
        self._us = {name: each.us for name, each in found.items() if each.rate}
        rates = {name: 1e3 * each.rate for name, each in found.items()}
        alone = rates.pop(GPU_ONLY)
        self._sides = Inequality(_WORDS, max(rates.values()), alone) if rates and alone else None

    def best(self, found: Mapping[str, steady.Steady], beyond_gpu: float = 1.0) -> str:
        """The strategy for the next iterations. Only the requests that the GPU does not hold, a
        share `beyond_gpu` of all, gain by the CPU: those on the GPU go on there either way."""

        def likely(name: str) -> float:
            each = found[name]
            stay = _STAY if name == self._strategy else 1.0
            return each.worth * (1 - _DOUBT * (1 - each.there)) * stay

        with_cpu = max((name for name in found if name != GPU_ONLY), key=likely, default=GPU_ONLY)
        stay = 1.0 if self._strategy == GPU_ONLY else _STAY
        alone = self._alone(found[GPU_ONLY], found[with_cpu])
        alone *= 1 + self.margin / max(beyond_gpu, _LEAST_BEYOND)
        return with_cpu if found[with_cpu].worth * stay > alone else GPU_ONLY

    @staticmethod
    def _alone(gpu: steady.Steady, with_cpu: steady.Steady) -> float:
        """What GPU-only is worth in a comparison. That it waits for prompts counts as far as the
        CPU has requests enough whose prompts fill these gaps."""
        share = 1 - gpu.tokens / with_cpu.tokens if with_cpu.tokens else 1.0
        gaps = max(0.0, gpu.at_hand - gpu.worth)
        return gpu.worth + gaps * max(0.0, 1 - share / _FILLS_GAPS)

    def _chunk(self, strategy: str, state: SchedulerState) -> int:
        """Tokens of prefill in an iteration: as many as its tokens ask for, and up to twice as many
        while the CPU holds fewer requests than the strategy takes, a little fewer while it holds
        more, as there is no hurry to drain it. Where the GPU is full with fewer decodes than were
        counted on, what those that are missing ask for would only pile up on the CPU. All there are
        where it takes every CPU decode and no request waits: prompts spread over many iterations
        would then hide nothing, and their requests are missing meanwhile."""
        found, on_cpu = self._yields[strategy], state.running_on(Placement.CPU)
        if found.taken >= on_cpu > 0 and not state.queue.num_waiting:
            return state.limits.max_tokens_in_batch
        share = on_cpu / max(1, found.on_cpu)
        chunk = found.chunk * max(_DRAINING, 2 - share)
        queue, missing = state.queue, self._gpu_decodes - state.running_on(Placement.GPU)
        waits = missing > 0 and queue.num_waiting
        if waits and not state.can_start(queue.first_waiting, Placement.GPU):
            chunk -= min(1.0, share) * missing * queue.prompt_share()
        return max(_LEAST_CHUNK, int(chunk))

    def _cpu_full(self, batch: BatchDraft, request: Request) -> bool:
        return self._strategy == GPU_ONLY
