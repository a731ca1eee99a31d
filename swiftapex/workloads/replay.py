"""Sends the requests of a workload to an engine at their arrival times, and keeps what came."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from swiftapex.config.schema import WindowConfig, WorkloadConfig
from swiftapex.core.errors import EngineError, RequestError
from swiftapex.core.records import BusyTimes, IterationRecord
from swiftapex.core.request import FinishReason, Request, SamplingParams
from swiftapex.workloads.build import WorkItem
from swiftapex.workloads.energy import EnergyMeter
from swiftapex.workloads.meter import BusySpan, RunMeter

_COMPLETED = (FinishReason.STOP.value, FinishReason.LENGTH.value)


class TextTokenizer(Protocol):
    def encode(self, text: str, chat: bool = False) -> Sequence[int]: ...


class Front(Protocol):
    """What requests are prepared for."""

    @property
    def tokenizer(self) -> TextTokenizer | None: ...
    @property
    def max_model_len(self) -> int: ...


class ServingEngine(Front, Protocol):
    """What a replay needs of an engine."""

    iterations: list[IterationRecord]

    @property
    def has_work(self) -> bool: ...
    def add_request(
        self, prompt: Sequence[int], sampling: SamplingParams, *, arrival_s: float | None
    ) -> int: ...
    def add_in_progress(
        self, prompt: Sequence[int], sampling: SamplingParams, num_generated: int
    ) -> Request: ...
    def request(self, request_id: int) -> Request: ...
    def step(self) -> list[Request]: ...
    def text(self, request: Request) -> str: ...
    def busy(self) -> BusyTimes: ...


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of one request. Times are seconds from the run's first arrival.

    `finish_reason` is stop or length (completed), error (failed, or refused: `error` says why), or
    unfinished (the run ended before it did).
    """

    index: int
    prompt: str | None  # None: token ids
    prompt_len: int
    arrival_s: float
    finish_reason: str
    output_ids: tuple[int, ...] = ()
    token_times_s: tuple[float, ...] = ()
    text: str = ""
    error: str | None = None
    num_preemptions: int = 0
    progress: int = 0  # of `output_ids`: made up before the run, without times
    max_tokens: int | None = None  # of output that it asked for
    truncated: bool | None = None  # prompt or output, to the model's length; None: not known

    @property
    def num_output(self) -> int:
        """Output tokens. Of another engine the ids may be unknown, and `output_ids` empty."""
        return self.progress + len(self.token_times_s)

    @property
    def completed(self) -> bool:
        return self.finish_reason in _COMPLETED

    @property
    def failed(self) -> bool:
        return self.finish_reason == FinishReason.ERROR.value


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run, as far as it came. `start_s`: time.perf_counter at the first arrival."""

    start_s: float
    outcomes: tuple[RequestOutcome, ...]  # all requests, in order
    iterations: tuple[IterationRecord, ...]
    interrupted: bool = False  # by Ctrl-C
    error: str | None = None  # the engine could not go on
    busy: BusySpan | None = None  # over the run, or over its window as far as it came


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; given to the `report` callback of `replay` after every iteration."""

    ended: int  # requests, failed ones included
    output_tokens: int


@dataclass
class Sent:
    """A request as it is sent, on its way: refused (`error`), or with the engine (`request`)."""

    item: WorkItem
    prompt_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    error: str | None = None
    request: Request | None = None
    truncated: bool = False  # prompt or output, to the model's length

    @property
    def num_generated(self) -> int:
        """Tokens that it has before the run: a share of what is left of its output."""
        return int(self.item.progress * self.sampling.max_tokens)


def replay(
    engine: ServingEngine,
    items: Sequence[WorkItem],
    workload: WorkloadConfig,
    report: Callable[[Progress], None] = lambda progress: None,
    energy: EnergyMeter | None = None,
) -> RunLog:
    """Runs `items` to their end, or to the end of the workload's window.

    Prompts are tokenized, and requests in progress put in place, before the first arrival, so that
    this does not disturb the times. An engine that fails and Ctrl-C end the run early; the log says
    so, and keeps what finished. `energy` (None: one without GPUs) is read beside the engine.
    """
    sent = [prepare(engine, item, workload) for item in items]
    first = len(engine.iterations)
    meter = RunMeter(engine, energy or EnergyMeter(0), workload.window, len(sent))
    interrupted, error = False, None
    for entry in sent:
        _resume(engine, entry)
    meter.start()
    try:
        _serve(engine, sent, workload.window, meter, report)
    except KeyboardInterrupt:
        interrupted = True
    except EngineError as engine_error:
        error = str(engine_error)
    busy, start_s = meter.span(), meter.start_s
    outcomes = tuple(_outcome(engine, entry, start_s) for entry in sent)
    return RunLog(start_s, outcomes, tuple(engine.iterations[first:]), interrupted, error, busy)


def prepare(engine: Front, item: WorkItem, workload: WorkloadConfig) -> Sent:
    """Tokenizes a prompt and applies the workload's policy for what exceeds the model's length.

    truncate: the output is cut to leave one token of prompt, then the prompt's beginning is cut.
    """
    prompt = item.prompt
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            return Sent(item, error="this model has no tokenizer; expected prompts of token ids")
        prompt = tuple(engine.tokenizer.encode(prompt, chat=item.chat))
    limit, output_len = engine.max_model_len, item.sampling.max_tokens
    if len(prompt) + output_len <= limit:
        return Sent(item, prompt, item.sampling)
    if workload.over_length == "reject":
        return Sent(
            item,
            prompt,
            error=f"{len(prompt)} prompt tokens and {output_len} output tokens exceed "
            f"max_model_len {limit} (over_length: reject)",
        )
    output_len = min(output_len, limit - 1)
    prompt = prompt[-(limit - output_len) :]
    return Sent(item, prompt, replace(item.sampling, max_tokens=output_len), truncated=True)


def _resume(engine: ServingEngine, entry: Sent) -> None:
    """Puts a request in progress in place. One that does not fit beside the others, or not at all,
    is sent as a new one."""
    if entry.num_generated and entry.error is None:
        with contextlib.suppress(RequestError):
            entry.request = engine.add_in_progress(
                entry.prompt_ids, entry.sampling, entry.num_generated
            )


def _serve(
    engine: ServingEngine,
    sent: Sequence[Sent],
    window: WindowConfig | None,
    meter: RunMeter,
    report: Callable[[Progress], None],
) -> None:
    limit_s = math.inf
    if window is not None and window.measure_s is not None:
        limit_s = window.warmup_s + window.measure_s
    pending = deque(entry for entry in sent if entry.error is None and entry.request is None)
    ended, tokens = sum(entry.error is not None for entry in sent), 0
    while pending or engine.has_work:
        now_s = time.perf_counter() - meter.start_s
        if now_s >= limit_s:
            return
        meter.look(now_s, ended)
        while pending and pending[0].item.arrival_s <= now_s:
            entry = pending.popleft()
            _send(engine, entry, meter.start_s)
            ended += entry.error is not None
        if engine.has_work:
            changed = engine.step()
            ended += sum(request.finish_reason is not None for request in changed)
            tokens += sum(request.error is None for request in changed)
        elif pending:
            time.sleep(max(0.0, min(pending[0].item.arrival_s, limit_s) - now_s))
        report(Progress(ended, tokens))


def _send(engine: ServingEngine, entry: Sent, start_s: float) -> None:
    arrival_s = start_s + entry.item.arrival_s
    try:
        request_id = engine.add_request(entry.prompt_ids, entry.sampling, arrival_s=arrival_s)
        entry.request = engine.request(request_id)
    except RequestError as error:
        entry.error = str(error)


def _outcome(engine: ServingEngine, entry: Sent, start_s: float) -> RequestOutcome:
    item, request = entry.item, entry.request
    prompt = item.prompt if isinstance(item.prompt, str) else None
    prompt_len = len(entry.prompt_ids or item.prompt) if prompt is None else len(entry.prompt_ids)
    reason = FinishReason.ERROR.value if entry.error is not None else "unfinished"
    outcome = RequestOutcome(
        item.index,
        prompt,
        prompt_len,
        item.arrival_s,
        reason,
        error=entry.error,
        max_tokens=entry.sampling.max_tokens,
        truncated=entry.truncated,
    )
    if request is None:
        return outcome
    return replace(
        outcome,
        finish_reason=request.finish_reason.value if request.finish_reason else "unfinished",
        output_ids=tuple(request.output_ids),
        token_times_s=tuple(time_s - start_s for time_s in request.token_times_s),
        text=engine.text(request),
        error=request.error,
        num_preemptions=request.num_preemptions,
        progress=len(request.output_ids) - len(request.token_times_s),
    )
