"""From logits to tokens. A token depends on its row's logits, the request's parameters, its seed
and the token's index only: never on the batch around it, the device or what was drawn before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swiftapex.core.request import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROWS_AT_ONCE = 32  # bounds the float64 temporaries: 32 rows of a 128k vocabulary are 33 MB each


class Sampled(NamedTuple):
    token_ids: Tensor  # [n] int64; 0 where invalid
    invalid: Tensor  # [n] bool: the row's largest logit is NaN or infinite, so no token exists


def sample(
    logits: Tensor, params: Sequence[SamplingParams], token_indices: Sequence[int]
) -> Sampled:
    """logits [n, vocab] of any float type; row i is sampled under params[i], as that request's
    output token number token_indices[i].

    Temperature 0: the argmax, the lowest id among equals. Else the row's tokens are ordered by
    falling logit (equals: by rising id), cut to top_k, then to the shortest prefix whose
    probability reaches top_p, and one uniform number picks from the cumulative sum, in float64.
    """
    largest, token_ids = logits.max(dim=-1)
    invalid = ~torch.isfinite(largest)
    random_rows = [i for i, p in enumerate(params) if p.temperature > 0]
    for begin in range(0, len(random_rows), _ROWS_AT_ONCE):
        rows = random_rows[begin : begin + _ROWS_AT_ONCE]
        index = torch.tensor(rows, device=logits.device)
        token_ids[index] = _draw(
            logits[index], [params[i] for i in rows], [token_indices[i] for i in rows]
        )
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


def _draw(logits: Tensor, params: list[SamplingParams], token_indices: list[int]) -> Tensor:
    """logits [k, vocab], all rows with temperature > 0 -> token ids [k] int64."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    vocab = logits.shape[1]
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    # The largest logit is taken off first: tiny temperatures then cannot overflow.
    scaled = (ordered.double() - ordered[:, :1].double()) / column([p.temperature for p in params])
    weights = scaled.exp()
    if any(p.top_k for p in params):
        top_k = column([p.top_k or vocab for p in params])
        weights = weights.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    if any(p.top_p < 1 for p in params):
        limit = column([p.top_p for p in params]) * total
        kept = (cumulative - weights < limit).sum(dim=-1, keepdim=True).clamp_min(1)
        total = cumulative.gather(1, kept - 1)
    target = column([uniform(p.seed, i) for p, i in zip(params, token_indices, strict=True)])
    # First token whose cumulative weight exceeds the target; rounding must not step past the last
    # token with weight.
    chosen = (cumulative <= target * total).sum(dim=-1, keepdim=True)
    last = (cumulative < total).sum(dim=-1, keepdim=True)
    return ids.gather(1, torch.minimum(chosen, last)).squeeze(1)
