"""`LLM`: the engine as a library. Blocking, streaming and asynchronous use over one `Engine`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from swiftapex.config.load import parse_section
from swiftapex.config.schema import EngineConfig, ModelSection
from swiftapex.core.errors import RequestError
from swiftapex.core.request import FinishReason, Request, SamplingParams
from swiftapex.engine.engine import Engine
from swiftapex.engine.stats import EngineStats

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class OutputMetrics:
    """Times in ms. None where too few tokens came: ttft needs one, tpot two."""

    ttft_ms: float | None  # from arrival to first token
    tpot_ms: float | None  # (last - first token) / (tokens - 1)
    e2e_ms: float | None  # from arrival to last token
    preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: int  # -1 where the request was refused
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str  # "" where the model has no tokenizer
    finish_reason: str  # stop, length, abort or error
    metrics: OutputMetrics
    error: str | None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What came since the last chunk. The last one has a finish_reason, and may be empty."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None


class LLM:
    """A model, its KV cache and a policy.

    model: a checkpoint folder, a .gguf file, `package:NAME`, or a mapping with the keys of the
    YAML's `model` section. Other keyword arguments are the keys of the YAML's `engine` section.
    ConfigError or ModelLoadError where something is wrong with them. Use it as a context manager,
    or call `close()`.
    """

    def __init__(
        self,
        model: str | Mapping[str, Any],
        *,
        dtype: str = "auto",
        policy: str = "gpu_only",
        policy_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        **engine: Any,
    ) -> None:
        source = {"path": model} if isinstance(model, str) else dict(model)
        source.setdefault("dtype", dtype)
        self._engine = Engine(
            parse_section(ModelSection, source, "model"),
            parse_section(EngineConfig, engine, "engine"),
            policy=policy,
            policy_args=policy_args,
            seed=seed,
            keep_iterations=False,
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> list[RequestOutput]:
        """Runs all prompts to their end; one output per prompt, in order.

        prompts: one or several, each text or token ids. sampling: one for all, or one per prompt.
        A prompt that is refused gives an output with finish_reason "error"; the others go on.
        Ctrl-C during an iteration ends all open requests and the engine, which can only be closed.
        """
        several = _as_prompts(prompts)
        params = SamplingParams() if sampling is None else sampling
        if isinstance(params, SamplingParams):
            params = [params] * len(several)
        if len(params) != len(several):
            raise ValueError(f"{len(several)} prompts, but {len(params)} sampling parameters")
        outputs: dict[int, RequestOutput] = {}
        requests: dict[int, Request] = {}
        try:
            for index, (prompt, one) in enumerate(zip(several, params, strict=True)):
                try:
                    requests[index] = self._engine.add(prompt, one, chat=chat)
                except RequestError as error:
                    outputs[index] = _refused(str(error))
            while any(request.finish_reason is None for request in requests.values()):
                self._engine.step()
        except BaseException:
            for request in requests.values():
                self._engine.abort(request.request_id)
            raise
        for index, request in requests.items():
            outputs[index] = self._output(request)
        return [outputs[index] for index in range(len(several))]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, chat: bool = False
    ) -> Iterator[StreamChunk]:
        """Yields chunks as tokens come. RequestError where the prompt is refused.

        Several streams may run at once, from several threads: whoever wants tokens runs the next
        iteration for all. Closing the iterator early aborts the request.
        """
        engine = self._engine
        params = SamplingParams() if sampling is None else sampling
        request = engine.add(prompt, params, chat=chat, stream=True)
        request_id, seen = request.request_id, 0
        text = engine.text_stream(request_id)
        try:
            while True:
                reason = request.finish_reason  # read first: tokens that come later wait their turn
                new = tuple(request.output_ids[seen:])
                seen += len(new)
                if new or reason is not None:
                    chunk = text.take() if text is not None else ""
                    yield StreamChunk(request_id, chunk, new, _word(reason), request.error)
                if reason is not None:
                    return
                engine.step_for(request, seen)
        finally:
            engine.abort(request_id)
            engine.forget(request_id)

    async def astream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, chat: bool = False
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for asyncio: iterations run in threads, the event loop stays free.

        Cancelling the task aborts the request once the iteration under way has ended.
        """
        chunks = self.stream(prompt, sampling, chat=chat)
        loop, one_at_a_time = asyncio.get_running_loop(), threading.Lock()

        def advance() -> StreamChunk | None:
            with one_at_a_time:
                return next(chunks, None)

        def close() -> None:
            with one_at_a_time:  # however often the task is cancelled, after `advance`
                chunks.close()  # type: ignore[attr-defined]

        try:
            while True:  # not in a task, which the loop's end would cancel while its thread goes on
                chunk = await asyncio.shield(loop.run_in_executor(None, advance))
                if chunk is None:
                    return
                yield chunk
        finally:
            await asyncio.shield(loop.run_in_executor(None, close))

    def abort(self, request_id: int) -> None:
        """Ends a request in whatever state it is."""
        self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        """Blocks, requests and counters at this moment."""
        return self._engine.stats()

    def close(self) -> None:
        """Frees weights, KV and threads. May be called twice."""
        self._engine.close()

    def _output(self, request: Request) -> RequestOutput:
        text = self._engine.text(request)
        self._engine.forget(request.request_id)
        return RequestOutput(
            request.request_id,
            request.prompt_ids,
            tuple(request.output_ids),
            text,
            _word(request.finish_reason) or "",
            _metrics(request),
            request.error,
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text, or one list of token ids, is one prompt."""
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [cast(Prompt, prompts)] if one else list(cast(Sequence[Prompt], prompts))


def _word(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def _refused(error: str) -> RequestOutput:
    return RequestOutput(-1, (), (), "", "error", OutputMetrics(None, None, None, 0), error)


def _metrics(request: Request) -> OutputMetrics:
    times = [(t - request.arrival_s) * 1e3 for t in request.token_times_s]
    return OutputMetrics(
        ttft_ms=times[0] if times else None,
        tpot_ms=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        e2e_ms=times[-1] if times else None,
        preemptions=request.num_preemptions,
    )
