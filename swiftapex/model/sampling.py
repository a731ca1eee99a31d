"""From logits to tokens. A token depends on its row's logits, the request's parameters, its seed
and the token's index only: never on the batch around it, the device or what was drawn before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swiftapex.core.request import SamplingParams
from swiftapex.sending import send

# `Ops.argmax`: [n, vocab] -> first index of each row's largest logit; whether that is not finite.
Argmax = Callable[[Tensor], tuple[Tensor, Tensor]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROWS_AT_ONCE = 32  # bounds the float64 temporaries: 32 rows of a 128k vocabulary are 33 MB each


class Sampled(NamedTuple):
    token_ids: Tensor  # [n] int64; 0 where invalid
    invalid: Tensor  # [n] bool: the row's largest logit is NaN or infinite, so no token exists


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    token_indices: Sequence[int],
    argmax: Argmax,
) -> Sampled:
    """logits [n, vocab] of any float type; row i is sampled under params[i], as that request's
    output token number token_indices[i].

    Temperature 0: the argmax, the lowest id among equals. Else one uniform number picks from the
    cumulative probabilities of the kept tokens, by rising id, in float64. Kept are the top_k
    tokens of largest logit (among equals the lower ids), and of those the fewest, largest first,
    whose probability reaches top_p.
    """
    token_ids, invalid = argmax(logits)
    random_rows = [i for i, p in enumerate(params) if p.temperature > 0]
    for begin in range(0, len(random_rows), _ROWS_AT_ONCE):
        rows = random_rows[begin : begin + _ROWS_AT_ONCE]
        index = send(rows, logits.device)
        numbers = [uniform(params[i].seed, token_indices[i]) for i in rows]
        token_ids[index] = _draw(logits[index], [params[i] for i in rows], numbers)
    return Sampled(token_ids.masked_fill_(invalid, 0), invalid)


def uniform(seed: int | None, token_index: int) -> float:
    """The number in [0, 1) of a request's token: splitmix64 over (seed, index), 53 bits."""
    state = _mix((seed or 0) & _MASK)
    return (_mix((state + (token_index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    """The output function of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64 bits."""
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _draw(logits: Tensor, params: list[SamplingParams], numbers: list[float]) -> Tensor:
    """logits [k, vocab], all rows with temperature > 0; numbers: one per row, uniform in [0, 1)
    -> token ids [k] int64."""
    # The largest logit is taken off first: tiny temperatures then cannot overflow.
    scaled = logits.double() - logits.amax(dim=-1, keepdim=True).double()
    weights = (scaled / _column([p.temperature for p in params], logits)).exp()
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:  # sorting is slow, so only the rows that need it
        index = send(cut, logits.device)
        weights[index] = _cut(logits[index], weights[index], [params[i] for i in cut])
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The first token whose cumulative weight exceeds the target. Rounding must not step past the
    # last token with weight.
    chosen = (cumulative <= _column(numbers, logits) * total).sum(dim=-1)
    return torch.minimum(chosen, (cumulative < total).sum(dim=-1))


def _cut(logits: Tensor, weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """logits and weights [k, vocab] -> weights, 0 for what top_k and top_p leave out."""
    vocab = weights.shape[1]
    ids = logits.argsort(dim=-1, descending=True, stable=True)
    falling = weights.gather(1, ids)
    top_k = _column([p.top_k or vocab for p in params], weights)
    falling.masked_fill_(torch.arange(vocab, device=weights.device) >= top_k, 0.0)
    cumulative = falling.cumsum(dim=-1)
    limit = _column([p.top_p for p in params], weights) * cumulative[:, -1:]
    # A token stays while those before it have not reached the limit: the first always does.
    falling.masked_fill_(cumulative - falling >= limit, 0.0)
    return torch.zeros_like(weights).scatter_(1, ids, falling)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[k, 1] float64 on the device of `like`."""
    return send(values, like.device, torch.float64)[:, None]
