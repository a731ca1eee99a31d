"""Which requests are acceptable. One bad request is refused alone, with the numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from swiftapex.core.errors import RequestError
from swiftapex.core.request import SIDES, Request, SamplingParams
from swiftapex.scheduler.state import SchedulerState


def check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as a tuple. RequestError for an empty prompt or an id outside the vocabulary."""
    if not prompt_ids:
        raise RequestError("the prompt is empty: it needs at least one token")
    for position, token_id in enumerate(prompt_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"prompt token {position} is {token_id!r}, not an integer id")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt token {position} is {token_id}, outside the vocabulary of {vocab_size}"
            )
    return tuple(prompt_ids)


def check_progress(
    num_generated: int, sampling: SamplingParams, prompt_len: int, max_model_len: int
) -> None:
    """RequestError unless a request that begins with `num_generated` tokens has some to generate,
    all of them within the model's length. `sampling`: as it was asked for."""
    if not 1 <= num_generated < sampling.max_tokens:
        raise RequestError(
            f"a request in progress has generated 1 to max_tokens - 1 tokens, got {num_generated} "
            f"with max_tokens {sampling.max_tokens}"
        )
    if prompt_len + sampling.max_tokens > max_model_len:
        raise RequestError(
            f"{prompt_len} prompt tokens and {sampling.max_tokens} output tokens of a request in "
            f"progress exceed max_model_len {max_model_len}"
        )


def start_in_progress(
    request: Request, state: SchedulerState, num_generated: int, token_id: int
) -> None:
    """Starts a request that waits as if it had generated `num_generated` tokens, each of them
    `token_id`: on the GPU while it fits there, else on the CPU. RequestError where neither has
    room, or where others wait before it."""
    request.output_ids.extend([token_id] * num_generated)
    request.num_computed = request.num_tokens - 1
    for side in SIDES if state.queue.num_waiting == 1 else ():
        if state.can_start(request, side):
            state.start(request, side)
            return
    raise RequestError(f"no KV blocks are left for a request of {request.num_tokens} tokens")


def fit_sampling(
    sampling: SamplingParams,
    prompt_len: int,
    max_model_len: int,
    state: SchedulerState,
    *,
    uses_cpu: bool = True,
) -> SamplingParams:
    """`sampling` with max_tokens cut to the model's length.

    RequestError where the prompt leaves no room for a token, or where prompt and output could
    never lie in one side's KV cache, even alone: the GPU's, where the policy leaves the CPU out
    (`uses_cpu`). The last token's K and V are never stored.
    """
    sampling.check()
    room = max_model_len - prompt_len
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_len} tokens; with max_model_len {max_model_len} "
            f"at most {max_model_len - 1} leave room for one new token"
        )
    max_tokens = min(sampling.max_tokens, room)
    needed = state.blocks.blocks_for(prompt_len + max_tokens - 1)
    if needed > state.most_blocks(uses_cpu):
        raise RequestError(
            f"the request can never fit: {prompt_len} prompt tokens and up to {max_tokens} new "
            f"ones need {needed} KV blocks of {state.blocks.block_size} tokens, "
            f"{state.capacity_words(uses_cpu)}"
        )
    return dataclasses.replace(sampling, max_tokens=max_tokens)
