"""An engine without a model, for tests of what surrounds engines: each step, one token for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from swiftapex.core.errors import EngineError, RequestError
from swiftapex.core.records import BusyTimes, IterationRecord
from swiftapex.core.request import FinishReason, Request, SamplingParams

EOS = 2


class WordTokenizer:
    """A token per word; a chat template adds two."""

    def encode(self, text: str, chat: bool = False) -> list[int]:
        ids = [3 + len(word) for word in text.split()]
        return [1, *ids, 1] if chat else ids


class FakeEngine:
    """Tokens depend on the request alone. `at_step(engine, index)` runs before each iteration, and
    may raise; `fail_prompts`: requests with this first id end with an error after two tokens."""

    def __init__(
        self,
        max_model_len: int = 1000,
        vocab_size: int = 100,
        at_step: Callable[[FakeEngine, int], None] = lambda engine, index: None,
        fail_first_id: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.tokenizer: WordTokenizer | None = WordTokenizer()
        self.max_model_len = max_model_len
        self.model_config = SimpleNamespace(vocab_size=vocab_size)
        self.iterations: list[IterationRecord] = []
        self.notes: tuple[str, ...] = ()
        self.gpu_bound: str | None = None
        self.closed = False
        self.added: list[Request] = []
        self._at_step = at_step
        self._fail_first_id = fail_first_id
        self._step_s = step_s

    @property
    def _open(self) -> list[Request]:
        return [request for request in self.added if request.finish_reason is None]

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def add_request(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        arrival_s: float | None = None,
    ) -> int:
        sampling.check()
        if not prompt or max(prompt) >= self.model_config.vocab_size:
            raise RequestError(f"token {max(prompt, default=None)} is outside the vocabulary")
        assert arrival_s is not None
        self.added.append(Request(len(self.added), tuple(prompt), sampling, arrival_s))
        return len(self.added) - 1

    def request(self, request_id: int) -> Request:
        return self.added[request_id]

    def step(self) -> list[Request]:
        index = len(self.iterations)
        self._at_step(self, index)
        start = time.perf_counter()
        time.sleep(self._step_s)
        changed = self._open
        for request in changed:
            self._add_token(request)
        now = time.perf_counter()
        self.iterations.append(
            IterationRecord(
                index, start, max(1.0, (now - start) * 1e6), 1.0, "sequential", 0, len(changed), 0,
                len(changed), 0, len(self._open), 0, 0, 10, 20, 0,
            )
        )  # fmt: skip
        return changed

    def text(self, request: Request) -> str:
        return " ".join(map(str, request.output_ids))

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(gpu_blocks_total=64, cpu_blocks_total=128)

    def busy(self) -> BusyTimes:
        """A quarter of a second per iteration on the GPU side; no CPU side."""
        return BusyTimes(0.25 * len(self.iterations), None)

    def close(self) -> None:
        self.closed = True

    def fail(self, reason: str) -> None:
        """As the engine does when an iteration fails: every open request ends, then it raises."""
        for request in self._open:
            request.finish_reason, request.error = FinishReason.ERROR, reason
        raise EngineError(reason)

    def _add_token(self, request: Request) -> None:
        count = len(request.output_ids)
        if request.prompt_ids[0] == self._fail_first_id and count == 2:
            request.finish_reason, request.error = FinishReason.ERROR, "NaN in the logits"
            return
        token_id = 3 + (sum(request.prompt_ids) + 7 * count) % 90
        request.output_ids.append(token_id)
        request.token_times_s.append(time.perf_counter())
        if count + 1 == request.sampling.max_tokens:
            request.finish_reason = FinishReason.LENGTH
