"""The engine: requests in, iterations, tokens out."""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swiftapex.config.schema import EngineConfig, ModelSection
from swiftapex.core.errors import ConfigError, EngineError, RequestError
from swiftapex.core.plan import CpuWork, StepPlan, StepResult
from swiftapex.core.plugins import misreturned
from swiftapex.core.records import BusyTimes, IterationRecord
from swiftapex.core.request import FinishReason, Request, RequestState, SamplingParams
from swiftapex.core.trace import TraceRecorder
from swiftapex.cost_model import CostModel
from swiftapex.costs.correction import CorrectedCostModel
from swiftapex.engine.admission import (
    check_progress,
    check_prompt,
    fit_sampling,
    start_in_progress,
)
from swiftapex.engine.checks import check_supported, max_model_len
from swiftapex.engine.costs import ProfiledEngine
from swiftapex.engine.gpu_bound import GpuBound
from swiftapex.engine.stats import EngineStats, book_progress, count, record_launch
from swiftapex.engine.text import TextStream
from swiftapex.engine.watch import Watch
from swiftapex.executor import ExecutorFactory, make_executor
from swiftapex.kv.block_manager import BlockManager
from swiftapex.kv.sizing import check_host_room, kv_sizes, measures_gpu_kv
from swiftapex.model.source import open_model
from swiftapex.policies import make_policy
from swiftapex.profiler.memory import fit_gpu_kv
from swiftapex.scheduler.draft import Limits
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.state import SchedulerState

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    result: StepResult
    record: IterationRecord


class Engine:
    """One model under one policy. All methods may be called from any thread, one at a time inside.

    `step()` runs one iteration; nothing runs between calls, so that an idle engine costs nothing.
    """

    def __init__(
        self,
        model: ModelSection,
        engine: EngineConfig,
        *,
        policy: str = "gpu_only",
        policy_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        trace: TraceRecorder | None = None,
        keep_iterations: bool = True,
        make_executor: ExecutorFactory = make_executor,
    ) -> None:
        check_supported(engine)
        self._policy = make_policy(policy, policy_args)
        source = open_model(model)
        self.model_config = source.config
        self.tokenizer = source.tokenizer()
        self.max_model_len = max_model_len(engine, source.config.max_length)
        self.iterations: list[IterationRecord] = []
        self.num_iterations = 0
        self._keep_iterations = keep_iterations
        self._seed = seed
        self._trace = trace
        self._lock = threading.RLock()
        self._has_cpu_side = uses_cpu = self._policy.uses_cpu
        sizes = kv_sizes(source.config, source.dtype, engine, self.max_model_len, uses_cpu)
        check_host_room(source.config, source.dtype, engine, sizes)
        self._executor = make_executor(model, source, engine, sizes, self.max_model_len, trace)
        self._memory_notes = self._executor.notes
        if measures_gpu_kv(engine):
            sizes, note = self._closing_on_error(
                lambda: fit_gpu_kv(
                    self._executor, source.config, source.dtype, engine, sizes, self.max_model_len
                )
            )
            self._memory_notes += (note,)
        self._blocks = BlockManager(sizes.num_blocks, engine.block_size)
        self._queue = RequestQueue()
        limits = Limits(engine.max_batch_size, engine.max_tokens_in_batch, sizes.staging_blocks)
        self._state = SchedulerState(self._queue, self._blocks, limits)
        self._gpu_bound = GpuBound(self._state, source.config.num_layers)
        self.profiled = ProfiledEngine(
            source.config, source.dtype, engine, sizes, self.max_model_len, self._executor
        )
        self._cost_model, self._profile_notes = self._make_cost_model(uses_cpu)
        self._live: dict[int, Request] = {}
        self._streams: dict[int, TextStream] = {}
        self._next_id = 0
        self._watch = Watch(source.config.num_layers)
        self._cpu_decoded_tokens = 0
        self._launched: _Launched | None = None  # an iteration whose tokens are still to come
        self._changed: list[Request] = []  # by iterations that nobody asked for
        self._last_end_s = 0.0
        self._cpu_work: CpuWork | None = None  # of the CPU side until then
        self._touched = False  # whether KV that nobody has written has memory of its own
        self._dead: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What users should know of how memory was had, and of the profile that is planned with."""
        return self._memory_notes + self._profile_notes

    @property
    def gpu_bound(self) -> str | None:
        """Why requests could not start on the CPU, though the policy uses it; None: all could."""
        return self._gpu_bound.words()

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add_request(self, *args: Any, **kwargs: Any) -> int:
        """As `add`, but returns the request's id."""
        return self.add(*args, **kwargs).request_id

    def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        chat: bool = False,
        arrival_s: float | None = None,
        stream: bool = False,
    ) -> Request:
        """Queues a request and returns it.

        prompt: text, or token ids. chat: wrap text in the model's chat template. stream: keep the
        text as it grows, for `text_stream`. RequestError where the request is not acceptable.
        """
        with self._lock:
            self._check_alive()
            prompt_ids = check_prompt(self.encode(prompt, chat), self.model_config.vocab_size)
            sampling = fit_sampling(
                sampling,
                len(prompt_ids),
                self.max_model_len,
                self._state,
                uses_cpu=self._policy.uses_cpu,
            )
            if sampling.stop and self.tokenizer is None:
                raise RequestError("stop strings need a tokenizer, and this model has none")
            request_id, self._next_id = self._next_id, self._next_id + 1
            if sampling.seed is None:
                sampling = dataclasses.replace(sampling, seed=self._seed * 1_000_003 + request_id)
            arrival_s = time.perf_counter() if arrival_s is None else arrival_s
            request = Request(request_id, prompt_ids, sampling, arrival_s)
            self._live[request_id] = request
            self._queue.add(request)
            if self._policy.uses_cpu:
                self._gpu_bound.note(request)
            if self.tokenizer is not None and (stream or sampling.stop):
                self._streams[request_id] = TextStream(self.tokenizer, sampling.stop)
            return request

    def add_in_progress(
        self, prompt: Sequence[int], sampling: SamplingParams, num_generated: int
    ) -> Request:
        """A request that has generated `num_generated` tokens already, so that a measurement begins
        in the steady state: its blocks hold whatever lies in them, its tokens so far are made up.
        On the GPU while it fits there, else on the CPU. RequestError where neither has room, or
        where `num_generated` (0 counts as 1) leaves nothing to generate within the lengths."""
        num_generated = num_generated or 1
        check_progress(num_generated, sampling, len(prompt), self.max_model_len)
        with self._lock:
            if not self._touched:
                self._executor.touch_kv()
                self._touched = True
            request = self.add(prompt, sampling)
            try:
                start_in_progress(request, self._state, num_generated, self._blocks.block_size)
            except RequestError:
                self._end(request, FinishReason.ABORT)
                raise
            return request

    def encode(self, prompt: str | Sequence[int], chat: bool = False) -> Sequence[int]:
        """Token ids of a text (ids are returned as they are)."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt, chat=chat)

    def request(self, request_id: int) -> Request:
        """A request that has not ended yet."""
        return self._live[request_id]

    def abort(self, request_id: int) -> None:
        """Ends a request in whatever state it is; one that has ended already is left alone.

        What it has in flight keeps its blocks until that has come back.
        """
        with self._lock:
            self._changed += self._collect()
            if request_id in self._live:
                self._end(self._live[request_id], FinishReason.ABORT)
            self._drain()

    def step(self) -> list[Request]:
        """Launches an iteration and waits for one: on a device that works beside the host, for the
        one before, so that the device never waits for plans. Returns the requests that gained a
        token or ended in it.

        EngineError where no progress is possible, or where the workers failed: then every open
        request ends with that error, and the engine can only be closed.
        """
        with self._lock:
            self._check_alive()
            changed = self._changed + self._iterate_or_break()
            self._changed = []
            self._drain()
            return changed

    def reuse(self, policy: str, policy_args: Mapping[str, Any] | None = None) -> None:
        """Aborts what is open and goes on under another policy, as a new engine would, with the
        weights and the KV memory that are there. ConfigError where only one of the two policies
        uses a CPU side: an engine without one has more of the GPU's blocks."""
        uses_cpu = make_policy(policy, policy_args).uses_cpu
        with self._lock:
            self._check_alive()
            if uses_cpu != self._has_cpu_side:
                raise ConfigError(
                    f"policy {policy}: this engine has another KV cache than it needs"
                )
            self._collect()
            for request in list(self._live.values()):
                self._end(request, FinishReason.ABORT)
            self._drain()
            self._changed = []
            self._queue.forget_ended()
            self._gpu_bound = GpuBound(self._state, self.model_config.num_layers)
            self.use_policy(policy, policy_args)
            self._cost_model, self._profile_notes = self._make_cost_model(uses_cpu)

    def step_for(self, request: Request, seen: int) -> None:
        """Runs one iteration, unless the request has ended or has more than `seen` tokens by then
        because another thread ran one."""
        with self._lock:
            if request.finish_reason is None and len(request.output_ids) == seen:
                self.step()

    def text(self, request: Request) -> str:
        """Text of a request's output so far, cut at a stop string; "" without tokenizer."""
        stream = self._streams.get(request.request_id)
        if stream is not None:
            return stream.text
        if self.tokenizer is None:
            return ""
        ids = request.output_ids
        stopped = request.finish_reason is FinishReason.STOP
        return self.tokenizer.decode(ids[:-1] if stopped else ids)  # as streams: no stop token

    def text_stream(self, request_id: int) -> TextStream | None:
        """The growing text of a request that was added with `stream` or stop strings."""
        return self._streams.get(request_id)

    def forget(self, request_id: int) -> None:
        """Drops the text that was kept for a request that has ended."""
        if request_id not in self._live:
            self._streams.pop(request_id, None)

    def use_policy(self, policy: str, policy_args: Mapping[str, Any] | None = None) -> None:
        """Another policy from the next iteration on. ConfigError where it wants a CPU side that
        this engine was made without, or leaves out the one that open requests need."""
        chosen = make_policy(policy, policy_args)
        if chosen.uses_cpu and not self._has_cpu_side:
            raise ConfigError(f"policy {policy!r} needs a CPU side, and this engine has none")
        with self._lock:
            bound = sum(self._state.needs_cpu(request) for request in self._live.values())
            if bound and not chosen.uses_cpu:
                raise ConfigError(
                    f"policy {policy!r} leaves the CPU out, where {bound} of {len(self._live)} "
                    "open requests have their KV or have to go"
                )
            self._policy = chosen

    def stats(self) -> EngineStats:
        with self._lock:
            return count(self._queue, self._state, self._blocks, self._cpu_decoded_tokens)

    def busy(self) -> BusyTimes:
        """Seconds of computing so far on each side."""
        return self._executor.busy()

    def close(self) -> None:
        """Aborts what is open and frees weights, KV and threads. May be called twice."""
        with self._lock:
            self._launched = None
            for request in list(self._live.values()):
                self._end(request, FinishReason.ABORT)
            if self._dead != "closed":
                self._dead = "closed"
                self._executor.close()

    def _make_cost_model(self, uses_cpu: bool) -> tuple[CostModel, tuple[str, ...]]:
        """May measure, which takes a while."""
        return self._closing_on_error(lambda: self.profiled.cost_model(uses_cpu))

    def _closing_on_error(self, make: Callable[[], Made]) -> Made:
        """An engine that cannot be had leaves nothing behind."""
        try:
            return make()
        except BaseException:
            self._executor.close()
            raise

    def _iterate(self) -> list[Request]:
        if len(self._queue) == 0 and not self._state.anything_in_flight:
            return self._collect()  # the last requests' tokens are on their way
        if self._trace is not None:
            self._trace.begin_iteration(self.num_iterations)
        start = time.perf_counter()
        preemptions, cpu_tokens = self._state.num_preemptions, self._cpu_decoded_tokens
        plan = self._policy.plan(self._state, self._cost_model)
        planned = time.perf_counter()
        self._end_if(misreturned(self._policy, "plan", plan, StepPlan, "state.step_plan"))
        result = self._execute(plan)
        self._end_if(self._watch.forgotten(plan, result, self._live))
        self._book(plan, result)
        preemptions = self._state.num_preemptions - preemptions
        cpu_tokens = self._cpu_decoded_tokens - cpu_tokens
        record = record_launch(
            self._state,
            plan,
            result,
            index=self.num_iterations,
            start_s=start,
            schedule_us=(planned - start) * 1e6,
            cpu_decodes=cpu_tokens,
            preemptions=preemptions,
        )
        if self._trace is not None:
            self._trace.tag(plan.pipeline)
            waiting = self._queue.num_waiting
            self._trace.span("scheduler", "plan", start, planned, waiting=waiting)
        self.num_iterations += 1
        still = self._watch.standstill(plan, result, bool(self._live))
        self._end_if(still and f"{still}; {self._whereabouts()}")
        changed = self._collect()
        self._launched = _Launched(plan, result, record)
        return changed if self._executor.runs_ahead else self._collect()

    def _drain(self) -> None:
        """Once no request is left, brings back what aborted ones still have in flight, since nobody
        else would run iterations for that: an engine without work owns no blocks."""
        while not self._live and self._dead is None and self._state.anything_in_flight:
            self._iterate_or_break()
        if not self._live and self._dead is None:
            self._collect()  # nothing: its requests have ended

    def _iterate_or_break(self) -> list[Request]:
        """An iteration that was left half-way, by an error or by Ctrl-C, leaves workers and books
        at odds: nothing that came of it may be used, so the engine ends there."""
        try:
            return self._iterate()
        except BaseException as error:
            if self._dead is None:
                self._fail(f"broken: interrupted by {type(error).__name__}")
            raise

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineError(f"the engine is {self._dead}")

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._executor.execute(plan)
        except Exception as error:
            self._fail(f"broken: {type(error).__name__}: {error}")
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            raise EngineError(f"an iteration failed: {what}") from error

    def _end_if(self, problem: str | None) -> None:
        """Raises EngineError where there is one, after which the engine can only be closed."""
        if problem is not None:
            self._fail(f"broken: {problem}")
            raise EngineError(problem)

    def _fail(self, reason: str) -> None:
        self._dead = reason
        for request in list(self._live.values()):
            self._end(request, FinishReason.ERROR, f"the engine is {reason}")

    def _book(self, plan: StepPlan, result: StepResult) -> None:
        """Books what is certain once an iteration is launched: what it computes and moves, which
        requests complete a token, and which of those reach their length with it."""
        completing, on_cpu = book_progress(self._live, plan, result.completing)
        self._cpu_decoded_tokens += on_cpu
        self._state.settle(plan, result.in_flight)
        for request in completing:
            request.num_pending += 1
            if request.num_generated >= request.sampling.max_tokens:
                self._state.finish(request)

    def _collect(self) -> list[Request]:
        """Waits for the tokens of the iteration that was launched last, if they are still to come,
        and hands them out. A request that has ended in the meantime gets none."""
        launched, self._launched = self._launched, None
        if launched is None:
            return []
        try:
            tokens = launched.result.fetch()
        except Exception as error:
            self._fail(f"broken: {type(error).__name__}: {error}")
            raise EngineError(f"an iteration failed: {type(error).__name__}: {error}") from error
        self._end_if(self._watch.without_token(launched.plan, launched.result, tokens))
        now = time.perf_counter()
        end = now if tokens.done_s is None else tokens.done_s
        begin = max(launched.record.start_s, self._last_end_s)
        duration_us = (end - begin) * 1e6
        before, self._cpu_work = self._cpu_work, tokens.cpu_work
        attended = tokens.cpu_work and before and tokens.cpu_work.since(before)
        if isinstance(self._cost_model, CorrectedCostModel):
            self._cost_model.observe(launched.plan, duration_us, attended)
        if self._keep_iterations:
            self.iterations.append(
                dataclasses.replace(
                    launched.record,
                    start_s=begin,
                    duration_us=duration_us,
                    cpu_attention_us=attended and 1e6 * attended.busy_s,
                )
            )
        self._last_end_s = end
        changed = []
        for request_id, token_id in tokens.by_request.items():
            request = self._live.get(request_id)
            if request is None:
                continue
            request.output_ids.append(token_id)
            request.num_pending -= 1
            request.token_times_s.append(now)
            changed.append(request)
            reason = self._ended_by(request)
            if reason is not None:
                self._end(request, reason)
        for request_id, why in tokens.failures.items():
            if request_id in self._live:
                changed.append(self._live[request_id])
                self._end(self._live[request_id], FinishReason.ERROR, why)
        return changed

    def _ended_by(self, request: Request) -> FinishReason | None:
        """Whether the newest token ends the request."""
        sampling, token_id = request.sampling, request.output_ids[-1]
        eos = not sampling.ignore_eos and token_id in self.model_config.eos_token_ids
        if eos or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        stream = self._streams.get(request.request_id)
        if stream is not None and stream.push(token_id):
            return FinishReason.STOP
        if len(request.output_ids) >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.state is not RequestState.FINISHED:
            self._state.finish(request)
        request.finish_reason, request.error, request.num_pending = reason, error, 0
        del self._live[request.request_id]
        stream = self._streams.get(request.request_id)
        if stream is not None:
            stream.end()

    def _whereabouts(self) -> str:
        """Of blocks and of the first requests."""
        heads = [
            f"request {r.request_id}: {r.state.value}, {r.num_tokens} tokens, "
            f"{r.num_computed} computed, {len(self._blocks.owned(r.request_id))} blocks"
            for r in list(self._live.values())[:8]
        ]
        return "; ".join((str(self.stats()), *heads))
