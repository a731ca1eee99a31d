"""Tokens that a pass completes: sampled on the device, brought to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftapex.attention import BoundBatch, joined
from swiftapex.core.ops import Backend, Download
from swiftapex.core.plan import StepResult, Tokens
from swiftapex.model.sampling import Argmax, sample
from swiftapex.worker.request_table import RequestTable

_INVALID = -1  # in the place of a token
_NOT_FINITE = "the model's logits are not finite: numbers overflowed in this dtype"


@dataclass(slots=True)
class _Arrival:
    """Tokens on their way to the host."""

    tokens: Download
    seen_s: float | None = None  # that they were there


class Completion:
    """`logits`: x [rows, hidden] after the last layer -> [rows, vocab]."""

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        argmax: Argmax,
        table: RequestTable,
        backend: Backend,
    ) -> None:
        self._logits = logits
        self._argmax = argmax
        self._table = table
        self._backend = backend
        self._newest: _Arrival | None = None

    def complete(self, results: Sequence[tuple[BoundBatch, Tensor]]) -> StepResult:
        """Samples one token per completing row, from x [tokens, hidden] after the last layer."""
        pairs = [(batch, x) for batch, x in results if batch.completing]
        if not pairs:
            return self._without_tokens() if results else StepResult()
        request_ids = [r for batch, _ in pairs for r in batch.completing]
        indices = [i for batch, _ in pairs for i in batch.token_indices]
        logits = self._logits(joined([_last_rows(batch, x) for batch, x in pairs]))
        params = [self._table[request_id].sampling for request_id in request_ids]
        sampled = sample(logits, params, indices, self._argmax)
        slots = joined([batch.token_slots for batch, _ in pairs])
        self._table.last_tokens[slots] = sampled.token_ids
        sent = sampled.token_ids.masked_fill(sampled.invalid, _INVALID)
        arrival = self._newest = _Arrival(self._backend.download(sent))

        def fetch() -> Tokens:
            tokens = dict(zip(request_ids, arrival.tokens.wait().tolist(), strict=True))
            bad = [request_id for request_id, token in tokens.items() if token == _INVALID]
            for request_id in bad:
                del tokens[request_id]
            return Tokens(tokens, dict.fromkeys(bad, _NOT_FINITE), arrival.seen_s)

        return StepResult(tuple(request_ids), fetch=fetch)

    def _without_tokens(self) -> StepResult:
        """Of a pass of chunks alone, none of which is a prompt's last one: its end is waited for
        like that of others."""
        nothing = self._table.last_tokens[:0]
        arrival = self._newest = _Arrival(self._backend.download(nothing))

        def fetch() -> Tokens:
            arrival.tokens.wait()
            return Tokens(done_s=arrival.seen_s)

        return StepResult(fetch=fetch)

    def look(self) -> None:
        """Notes when the newest tokens came, while the next pass is being launched: they are
        fetched after that, which may be most of a pass later."""
        arrival = self._newest
        if arrival is not None and arrival.seen_s is None and arrival.tokens.is_here():
            arrival.seen_s = time.perf_counter()


def _last_rows(batch: BoundBatch, x: Tensor) -> Tensor:
    """Of x [tokens, hidden]: all of them where each token is a request's last one."""
    return x if len(batch.completing) == batch.num_tokens else x[batch.last_rows]
