"""prefill_attention on the GPU against float64 from the stored inputs. KV beyond the context is
NaN, and so is the output beforehand."""

from __future__ import annotations

import random as python_random

import pytest
import torch
from gpu import DTYPES, poisoned, random, strided

from swiftapex.backends.prefill_attention import prefill_attention
from swiftapex.backends.reference import causal_attention, gather, split_heads
from swiftapex.core.ops import AttentionShape

pytestmark = pytest.mark.gpu
# Largest error over the largest value of a row: the output's rounding, and the weights'; in float32
# that of sums in another order (TF32 would be off by 1e-3).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(24))
def test_attends_causally_behind_any_prefix(seed: int, dtype: torch.dtype) -> None:
    choose = python_random.Random(seed)
    kv_heads, group = choose.choice([1, 2, 5]), choose.choice([1, 2, 3, 4, 7, 8, 16])
    head_dim, block_size = choose.choice([32, 64, 80, 96, 128, 256]), choose.choice([5, 16, 32])
    n = choose.choice([1, 2, 17, 100, 300])
    context = n + choose.choice([0, 1, 31, 64, 700])
    shape = AttentionShape(kv_heads * group, kv_heads, head_dim, block_size)
    used = -(-context // block_size)
    kv = random(used + 9, kv_heads, 2, block_size, head_dim, dtype=dtype)
    blocks = torch.randperm(used + 9, device="cuda")[:used].to(torch.int32)
    kv[blocks[-1].long(), :, :, context - (used - 1) * block_size :] = float("nan")
    qkv = strided(random(n, (group + 2) * kv_heads, head_dim, dtype=dtype), 16)
    out = strided(poisoned(n, kv_heads * group, head_dim, dtype=dtype), 24).flatten(1)

    prefill_attention(kv, blocks, context, shape, qkv, out)

    keys, values = gather(kv.double(), blocks, context)
    q, _, _ = split_heads(qkv.double(), shape)
    expected = causal_attention(q, keys, values, shape.scale)
    error = (out.double().view_as(expected) - expected).abs().amax(-1)
    assert (error <= TOLERANCE[dtype] * expected.abs().amax(-1)).all()
