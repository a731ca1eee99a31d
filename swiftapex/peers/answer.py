"""What another engine answered to a request."""

from __future__ import annotations

from dataclasses import dataclass


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


def checked(request: PeerRequest, answer: Answer) -> Answer:
    """The answer, or an error where it has another number of tokens than was asked for."""
    count = len(answer.token_times_s)
    if answer.error is not None or not request.length_forced or count == request.max_tokens:
        return answer
    return Answer(
        "error", error=f"{count} tokens came, {request.max_tokens} were asked for: see peer.extra"
    )
