"""What another engine answered to a request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swiftapex.config.explain import shorten
from swiftapex.core.request import FinishReason

_WHOLE = (FinishReason.STOP.value, FinishReason.LENGTH.value)
_MOST_ID = 2**31 - 1  # ids are hashed as int32


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A request as it is sent. `length_forced`: exactly `max_tokens` are to be generated."""

    index: int
    arrival_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    length_forced: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds from the run's first arrival. `finish_reason`: stop or length; error (then
    `error` says why); unfinished. `output_ids` is empty where the engine does not tell ids."""

    finish_reason: str
    token_times_s: tuple[float, ...] = ()
    output_ids: tuple[int, ...] = ()
    text: str = ""
    error: str | None = None


def failed(reason: str) -> Answer:
    """The answer to a request that got none that can be used."""
    return Answer("error", error=reason)


def checked(
    request: PeerRequest,
    finish_reason: Any,
    token_times_s: Sequence[Any],
    output_ids: Sequence[Any],
    text: Any,
) -> Answer:
    """A whole answer, of values as the other engine told them; or an error that names the request
    and what is wrong first. Nothing of such an answer is kept: it would count in rates."""
    wrong = next(_faults(request, finish_reason, token_times_s, output_ids, text), None)
    if wrong is not None:
        return failed(f"request {request.index}: {wrong}")
    return Answer(finish_reason, tuple(map(float, token_times_s)), tuple(output_ids), text)


def _faults(
    request: PeerRequest, reason: Any, times: Sequence[Any], ids: Sequence[Any], text: Any
) -> Iterator[str]:
    if reason not in _WHOLE:
        yield f"finish_reason: {shorten(reason)}: expected {' or '.join(_WHOLE)}"
    if not isinstance(times, list | tuple) or not all(map(_is_time, times)):
        yield f"token_times_s: {shorten(times)}: expected a list of finite seconds"
        return
    if not times:
        yield "token_times_s: empty: expected the time of one token at least"
        return
    if times[0] < request.arrival_s:
        yield f"token_times_s: {times[0]:g} s is before the arrival at {request.arrival_s:g} s"
    for sooner, later in itertools.pairwise(times):
        if later < sooner:
            yield f"token_times_s: {later:g} s comes behind {sooner:g} s: expected ascending times"
    if not isinstance(ids, list | tuple) or not all(map(_is_id, ids)):
        yield f"output_ids: {shorten(ids)}: expected a list of token ids"
    elif ids and len(ids) != len(times):
        yield f"output_ids: {len(ids)} ids for {len(times)} token_times_s"
    count = len(times)
    if request.length_forced and count != request.max_tokens:
        yield (
            f"token_times_s: {count} tokens came, {request.max_tokens} were asked for: see "
            "peer.extra"
        )
    if not isinstance(text, str):
        yield f"text: {shorten(text)}: expected a text"


def _is_time(value: Any) -> bool:
    try:
        return _is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_ID
