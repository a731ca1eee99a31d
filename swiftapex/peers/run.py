"""A run of another engine: the same requests at the same times, told in the same records."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException

from swiftapex.config.load import RunPlan
from swiftapex.core.errors import EngineError
from swiftapex.core.records import BusyTimes
from swiftapex.engine.checks import max_model_len
from swiftapex.model.source import open_model
from swiftapex.peers.answer import Answer, PeerRequest
from swiftapex.peers.command import serve_by_command, server
from swiftapex.peers.openai_server import OpenAIServer
from swiftapex.report.files import RunResult
from swiftapex.workloads.build import build_workload
from swiftapex.workloads.energy import energy_meter
from swiftapex.workloads.meter import RunMeter
from swiftapex.workloads.replay import RequestOutcome, RunLog, Sent, TextTokenizer, prepare

_LOOK_S = 0.02  # between looks at a server's progress
_THREADS = 1024  # requests in flight at a server at most


@dataclass(frozen=True)
class _Front:
    tokenizer: TextTokenizer | None
    max_model_len: int


class _NotMeasured:
    def busy(self) -> BusyTimes:
        return BusyTimes(None, None)


@dataclass
class _Served:
    """Answers by request, as far as they came."""

    answers: dict[int, Answer] = field(default_factory=dict)
    interrupted: bool = False
    error: str | None = None


def measure_peer(plan: RunPlan) -> RunResult:
    """Prompts are tokenized here, with the experiment's model, so that all engines get the same
    ids. EngineError where the peer does not start or cannot be reached."""
    peer = plan.peer
    assert peer is not None
    sent = _prepared(plan)
    requests = [_request(entry, plan) for entry in sent if entry.error is None]
    window = plan.workload.window
    meter = RunMeter(_NotMeasured(), energy_meter(plan.engine), window, len(sent))
    if peer.url is None:
        assert peer.command is not None
        meter.start()
        answers = serve_by_command(peer.command, requests, peer.timeout_s)
        served = _Served(dict(zip([r.index for r in requests], answers, strict=True)))
        busy = None  # start and end of the command are not those of the run
    else:
        client = OpenAIServer(peer)
        with contextlib.ExitStack() as stack:
            if peer.command is not None:
                stack.enter_context(server(peer.command, client.is_ready, peer.start_s))
            limit_s = math.inf
            if window is not None and window.measure_s is not None:
                limit_s = window.warmup_s + window.measure_s
            served = _serve(client, requests, limit_s, meter)
        busy = meter.span()
    outcomes = tuple(_outcome(entry, served.answers) for entry in sent)
    log = RunLog(meter.start_s, outcomes, (), served.interrupted, served.error, busy)
    return RunResult(plan, log, 0, 0)


def _prepared(plan: RunPlan) -> list[Sent]:
    source = open_model(plan.model)
    front = _Front(source.tokenizer(), max_model_len(plan.engine, source.config.max_length))
    items = build_workload(plan.workload, plan.seed, source.config.vocab_size)
    return [prepare(front, item, plan.workload) for item in items]


def _request(entry: Sent, plan: RunPlan) -> PeerRequest:
    sampling = entry.sampling
    return PeerRequest(
        entry.item.index,
        entry.item.arrival_s,
        entry.prompt_ids,
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.seed or 0,
        plan.workload.forces_length,
    )


def _serve(
    client: OpenAIServer, requests: Sequence[PeerRequest], limit_s: float, meter: RunMeter
) -> _Served:
    """Sends each request at its time, from a thread of its own, until all are answered or the
    window ends."""
    try:
        model = client.model()
    except (OSError, HTTPException) as error:
        raise EngineError(f"the server cannot be reached: {error}") from error
    pool = ThreadPoolExecutor(max(1, min(len(requests), _THREADS)))
    served = _Served()
    pending = sorted(requests, key=lambda request: request.arrival_s)[::-1]
    open_calls: dict[Future[Answer], PeerRequest] = {}
    meter.start()
    try:
        while pending or open_calls:
            now_s = time.perf_counter() - meter.start_s
            if now_s >= limit_s:
                break
            meter.look(now_s, len(served.answers))
            while pending and pending[-1].arrival_s <= now_s:
                request = pending.pop()
                call = pool.submit(client.complete, request, model, meter.start_s)
                open_calls[call] = request
            for call in [call for call in open_calls if call.done()]:
                served.answers[open_calls.pop(call).index] = call.result()
            next_s = pending[-1].arrival_s - now_s if pending else _LOOK_S
            time.sleep(max(0.0, min(next_s, _LOOK_S)))
    except KeyboardInterrupt:
        served.interrupted = True
    finally:
        client.close()
        pool.shutdown(wait=True, cancel_futures=True)
    for call, request in open_calls.items():
        if not call.cancelled():
            served.answers[request.index] = call.result()
    return served


def _outcome(entry: Sent, answers: dict[int, Answer]) -> RequestOutcome:
    item = entry.item
    prompt = item.prompt if isinstance(item.prompt, str) else None
    outcome = RequestOutcome(
        item.index, prompt, len(entry.prompt_ids), item.arrival_s, "error", error=entry.error
    )
    if entry.error is not None:
        return outcome
    answer = answers.get(item.index, Answer("unfinished"))
    return replace(
        outcome,
        max_tokens=entry.sampling.max_tokens,
        truncated=entry.truncated,
        finish_reason=answer.finish_reason,
        output_ids=answer.output_ids,
        token_times_s=answer.token_times_s,
        text=answer.text,
        error=answer.error,
    )
