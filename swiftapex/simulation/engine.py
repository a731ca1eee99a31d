"""An engine in simulated time: real policies and their rules, on a `SimulatedMachine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swiftapex.core.errors import EngineError, RequestError
from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.core.plugins import misreturned
from swiftapex.core.records import BusyTimes, IterationRecord
from swiftapex.core.request import CPU, FinishReason, Request, SamplingParams
from swiftapex.cost_model import CostModel
from swiftapex.engine.admission import check_progress, fit_sampling, start_in_progress
from swiftapex.engine.stats import EngineStats, book_progress, count, record_launch
from swiftapex.engine.watch import Watch
from swiftapex.kv.block_manager import BlockManager
from swiftapex.kv.sizing import KVSizes
from swiftapex.policies import make_policy
from swiftapex.scheduler.draft import Limits
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.state import SchedulerState
from swiftapex.simulation.machine import Outcome, SimulatedMachine


class SimulatedEngine:
    """What measurements use of an `Engine`. Nothing is random, and planning takes no time; the
    tokens of an iteration are known before the next one is planned. `clock` tells seconds.

    The policy plans with `cost`, and the machine takes what `cost` says.
    """

    def __init__(
        self,
        policy: str,
        policy_args: Mapping[str, Any] | None,
        cost: CostModel,
        sizes: KVSizes,
        block_size: int,
        max_batch_size: int,
        max_tokens_in_batch: int,
        max_model_len: int,
    ) -> None:
        self._policy = make_policy(policy, policy_args)
        self._cost = cost
        self._max_model_len = max_model_len
        self._blocks = BlockManager(sizes.num_blocks, block_size)
        self._queue = RequestQueue()
        limits = Limits(max_batch_size, max_tokens_in_batch, sizes.staging_blocks)
        self._state = SchedulerState(self._queue, self._blocks, limits)
        self._machine = SimulatedMachine(cost, block_size)
        self._watch = Watch(cost.num_layers)
        self.iterations: list[IterationRecord] = []
        self.most_on_cpu = 0  # requests, at the end of an iteration
        self._live: dict[int, Request] = {}
        self._next_id = self._num_iterations = self._cpu_decoded_tokens = 0
        self._now_s = self._cpu_busy_s = 0.0

    def clock(self) -> float:
        return self._now_s

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, prompt: Sequence[int], sampling: SamplingParams) -> Request:
        """Queues a request. RequestError where it could never run."""
        uses_cpu, length = self._policy.uses_cpu, len(prompt)
        sampling = fit_sampling(
            sampling, length, self._max_model_len, self._state, uses_cpu=uses_cpu
        )
        request = Request(self._next_id, tuple(prompt), sampling, self._now_s)
        self._next_id += 1
        self._live[request.request_id] = request
        self._queue.add(request)
        return request

    def add_in_progress(
        self, prompt: Sequence[int], sampling: SamplingParams, num_generated: int
    ) -> Request:
        """As `Engine.add_in_progress`: a request that has generated so many tokens."""
        num_generated = num_generated or 1
        check_progress(num_generated, sampling, len(prompt), self._max_model_len)
        request = self.add(prompt, sampling)
        try:
            start_in_progress(request, self._state, num_generated, token_id=0)
        except RequestError:
            self._end(request, FinishReason.ABORT)
            raise
        return request

    def step(self) -> StepPlan:
        """One iteration. EngineError where nothing runs though requests are there, or where many
        iterations in a row bring nothing."""
        state, start_s = self._state, self._now_s
        preempted = state.num_preemptions
        was_in_flight = state.anything_in_flight
        plan = self._policy.plan(state, self._cost)
        wrong = misreturned(self._policy, "plan", plan, StepPlan, "state.step_plan")
        if wrong:
            raise EngineError(wrong)
        preempted = state.num_preemptions - preempted
        if plan.is_empty and not (was_in_flight or preempted):
            raise EngineError(f"requests are there, and nothing runs: {self.stats()}")
        outcome = self._machine.execute(plan)
        _, on_cpu = book_progress(self._live, plan, outcome.completing)
        self._cpu_decoded_tokens += on_cpu
        state.settle(plan, outcome.in_flight)
        self._now_s += 1e-6 * outcome.us
        self._cpu_busy_s += outcome.cpu_work.busy_s
        for request_id in outcome.completing:
            request = self._live[request_id]
            request.output_ids.append(0)
            if len(request.output_ids) >= request.sampling.max_tokens:
                self._end(request, FinishReason.LENGTH)
        result = StepResult(tuple(outcome.completing), outcome.in_flight)
        self._record(plan, outcome, result, start_s, preempted, on_cpu)
        still = self._watch.standstill(plan, result, self.has_work)
        if still is not None:
            raise EngineError(still)
        return plan

    def stats(self) -> EngineStats:
        return count(self._queue, self._state, self._blocks, self._cpu_decoded_tokens)

    def busy(self) -> BusyTimes:
        return BusyTimes(None, self._cpu_busy_s)

    def _record(
        self,
        plan: StepPlan,
        outcome: Outcome,
        result: StepResult,
        start_s: float,
        preempted: int,
        cpu_decodes: int,
    ) -> None:
        record = record_launch(
            self._state,
            plan,
            result,
            index=self._num_iterations,
            start_s=start_s,
            schedule_us=0.0,
            cpu_decodes=cpu_decodes,
            preemptions=preempted,
        )
        self._num_iterations += 1
        self.most_on_cpu = max(self.most_on_cpu, self._state.running_on(CPU))
        cpu_us = 1e6 * outcome.cpu_work.busy_s
        self.iterations.append(replace(record, duration_us=outcome.us, cpu_attention_us=cpu_us))

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._state.finish(request)
        request.finish_reason = reason
        del self._live[request.request_id]
