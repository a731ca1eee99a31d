"""The CUDA kernels but attention (test_decode_attention_cuda.py) against float64: all dtypes, odd
sizes, strided inputs, fresh random data, poisoned outputs, captured graphs."""

from __future__ import annotations

import random as python_random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu import (
    DTYPES,
    NUMBERS,
    TOLERANCE,
    assert_close,
    captured,
    kernels,
    poisoned,
    random,
    sanitize,
    stream,
    strided,
)
from torch import Tensor

pytestmark = pytest.mark.gpu
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, pin_memory=True)


def some_sanitized(count: int, chosen: Sequence[int]) -> list[Any]:
    """Seeds 0 .. count - 1, of which scripts/sanitize_cuda.sh runs the chosen ones."""
    return [pytest.param(n, marks=sanitize) if n in chosen else n for n in range(count)]


@pytest.fixture
def counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@each_dtype
@pytest.mark.parametrize(
    ("n", "heads", "dim", "extra"),
    [(1, 1, 1, 0), pytest.param(3, 1, 4096, 0, marks=sanitize), (5, 1, 4097, 3), (2, 1, 513, 0),
     (7, 1, 11008, 8), pytest.param(9, 5, 64, 24, marks=sanitize), (3, 8, 128, 0), (4, 3, 33, 5),
     (70001, 1, 8, 0)],
)  # fmt: skip
def test_small_rms_norm(dtype: torch.dtype, n: int, heads: int, dim: int, extra: int) -> None:
    x = strided(random(n, heads, dim, dtype=dtype, scale=3.0), extra)
    weight = random(dim, dtype=dtype)
    out = strided(poisoned(n, heads, dim, dtype=dtype), 2 * extra)
    expected = norm(x, weight, 1e-5)
    for y in (out, x):  # in place last
        kernels.rms_norm(
            NUMBERS[dtype], x.data_ptr(), weight.data_ptr(), y.data_ptr(), n, heads, dim,
            x.stride(0), x.stride(1), y.stride(0), y.stride(1), 1e-5, stream(),
        )  # fmt: skip
        assert_close(y, expected, TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize(
    ("n", "dim", "extra"),
    [(1, 7, 0), (6, 4096, 0), pytest.param(3, 130, 4, marks=sanitize), (4, 5120, 8)],
)
def test_small_add_rms_norm(dtype: torch.dtype, n: int, dim: int, extra: int) -> None:
    x = strided(random(n, dim, dtype=dtype), extra)
    residual = strided(random(n, dim, dtype=dtype, scale=4.0), extra)
    weight = random(dim, dtype=dtype)
    total, y = poisoned(n, dim, dtype=dtype), poisoned(n, dim, dtype=dtype)
    kernels.add_rms_norm(
        NUMBERS[dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), total.data_ptr(),
        y.data_ptr(), n, dim, x.stride(0), residual.stride(0), dim, dim, 1e-6, stream(),
    )  # fmt: skip
    assert torch.equal(total, x + residual)
    assert_close(y, norm(total, weight, 1e-6), TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize(
    ("n", "inner", "extra"),
    [(1, 1, 0), (4, 11008, 0), pytest.param(5, 333, 1, marks=sanitize), (3, 64, 8)],
)
def test_small_silu_mul(dtype: torch.dtype, n: int, inner: int, extra: int) -> None:
    gate_up = strided(random(n, 2 * inner, dtype=dtype, scale=4.0), extra)
    gate_up[0, 0] = -100.0
    y = strided(poisoned(n, inner, dtype=dtype), extra)
    kernels.silu_mul(
        NUMBERS[dtype], gate_up.data_ptr(), y.data_ptr(), n, inner, gate_up.stride(0), y.stride(0),
        stream(),
    )  # fmt: skip
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(y, gate * gate.sigmoid() * up, TOLERANCE[dtype])


@pytest.mark.parametrize("seed", some_sanitized(24, (4, 16, 20)))  # both rotate and append
def test_small_rope_append(seed: int) -> None:
    choose = python_random.Random(seed)
    dtype, kv_dtype = choose.choice(DTYPES), choose.choice(DTYPES)
    n, kv_heads = choose.choice([1, 5, 33]), choose.choice([1, 3, 8])
    q_heads, head_dim = kv_heads * choose.choice([1, 4]), choose.choice([2, 18, 64, 96, 128])
    block_size, num_blocks = choose.choice([1, 7, 16, 64]), 40
    rotates, appends = choose.choice([(True, True), (True, False), (False, True)])
    qkv = strided(
        random(n, q_heads + 2 * kv_heads, head_dim, dtype=dtype), choose.choice([0, 8, 3])
    )
    angles = torch.rand(n, head_dim // 2, device="cuda") * 6
    rotation = torch.cat([angles.cos(), angles.sin()], dim=1)
    slots = torch.randperm(num_blocks * block_size, device="cuda")[:n]
    slots[::3] = -1
    kv = poisoned(num_blocks, kv_heads, 2, block_size, head_dim, dtype=kv_dtype)

    expected = qkv.double().clone()
    if rotates:
        first, second = expected[:, : q_heads + kv_heads].chunk(2, dim=2)
        cos, sin = rotation.double()[:, None].chunk(2, dim=2)
        expected[:, : q_heads + kv_heads] = torch.cat(
            [first * cos - second * sin, second * cos + first * sin], dim=2
        )
    kernels.rope_append(
        NUMBERS[dtype], NUMBERS[kv_dtype], qkv.data_ptr(), rotation.data_ptr() if rotates else 0,
        slots.data_ptr() if appends else 0, kv.data_ptr(), n, q_heads, kv_heads, head_dim,
        qkv.stride(0), block_size, stream(),
    )  # fmt: skip
    assert_close(qkv, expected, TOLERANCE[dtype])
    expected_kv = poisoned(*kv.shape, dtype=kv_dtype)
    for row, slot in enumerate(slots.tolist() if appends else []):
        if slot >= 0:
            of_row = qkv[row, q_heads:].unflatten(0, (2, kv_heads)).transpose(0, 1)
            expected_kv[slot // block_size, :, :, slot % block_size] = of_row.to(kv_dtype)
    assert torch.equal(kv.nan_to_num(nan=7.0), expected_kv.nan_to_num(nan=7.0))


@each_dtype
@pytest.mark.parametrize(
    ("n", "dim", "extra"),
    [(1, 1, 0), (3, 32000, 0), pytest.param(9, 997, 1, marks=sanitize), (2, 151936, 8)],
)
def test_small_argmax(dtype: torch.dtype, n: int, dim: int, extra: int) -> None:
    x = strided(random(n, dim, dtype=dtype), extra)
    indices = torch.full((n,), -1, device="cuda")
    invalid = torch.ones(n, dtype=torch.bool, device="cuda")

    def run() -> tuple[list[int], list[bool]]:
        kernels.argmax(
            NUMBERS[dtype], x.data_ptr(), indices.data_ptr(), invalid.data_ptr(), n, dim,
            x.stride(0), stream(),
        )  # fmt: skip
        return indices.tolist(), invalid.tolist()

    # torch does not promise the first of equal elements.
    first = (x == x.amax(1, keepdim=True)).to(torch.uint8).argmax(1).tolist()
    assert run() == (first, [False] * n)
    if dim < 100:
        return
    x[0] = -1.0
    x[0, 90], x[0, 7], x[0, 8] = 0.0, -0.0, 0.0
    assert run()[0][0] == 7
    for bad in (float("nan"), float("inf")):
        x[0, dim - 1] = bad
        assert (run()[0][0], run()[1][0]) == (0, True)
    x[0, dim - 1] = float("-inf")
    assert (run()[0][0], run()[1][0]) == (7, False)
    x[0] = float("-inf")
    assert (run()[0][0], run()[1][0]) == (0, True)


@each_dtype
@pytest.mark.parametrize("dim", [1, pytest.param(99, marks=sanitize), 4096])
def test_small_embedding(dtype: torch.dtype, dim: int) -> None:
    table = random(50, dim, dtype=dtype)
    token_ids = torch.randint(50, (77,), device="cuda")
    y = poisoned(77, dim, dtype=dtype)
    kernels.embedding(
        NUMBERS[dtype], token_ids.data_ptr(), table.data_ptr(), y.data_ptr(), 77, dim, stream()
    )
    assert torch.equal(y, table[token_ids])


@pytest.mark.parametrize(
    ("n", "row_bytes", "extra"),
    [(1, 1, 0), (8, 12288, 0), (5, 36, 4), (3, 4096, 16), (300, 777, 1)],
)
@pytest.mark.parametrize("in_graph", [pytest.param(False, marks=sanitize), True])
def test_small_rows_to_the_host_and_back(
    counter: Tensor, in_graph: bool, n: int, row_bytes: int, extra: int
) -> None:
    device = torch.randint(256, (n, row_bytes + extra), dtype=torch.uint8, device="cuda")
    host, word = pinned(n, row_bytes + 2 * extra, dtype=torch.uint8), pinned(1, dtype=torch.int32)
    back = torch.zeros_like(device)

    def gather() -> None:
        kernels.gather_rows(
            device.data_ptr(), host.data_ptr(), n, row_bytes, device.stride(0), host.stride(0),
            word.data_ptr(), counter.data_ptr(), stream(),
        )  # fmt: skip

    def scatter() -> None:
        kernels.scatter_rows(
            host.data_ptr(), back.data_ptr(), n, row_bytes, host.stride(0), back.stride(0),
            word.data_ptr(), counter.data_ptr(), stream(),
        )  # fmt: skip

    if in_graph:
        gather, scatter = captured(gather).replay, captured(scatter).replay
    for _ in range(2):
        host.zero_(), back.zero_(), device.random_(0, 255)
        gather()
        deadline = time.monotonic() + 20
        while word.item() == 0:  # the word alone says that the rows are there
            assert time.monotonic() < deadline
        assert torch.equal(host[:, :row_bytes], device[:, :row_bytes].cpu())
        assert not host[:, row_bytes:].any()
        scatter()
        torch.cuda.synchronize()
        assert word.item() == 0
        assert torch.equal(back[:, :row_bytes], device[:, :row_bytes])
        assert not back[:, row_bytes:].any() and counter.item() == 0


@pytest.mark.parametrize("seed", some_sanitized(16, (0, 9)))
def test_small_copy_blocks(counter: Tensor, seed: int) -> None:
    choose = python_random.Random(seed)
    src_dtype, dst_dtype = choose.choice(DTYPES), choose.choice(DTYPES)
    elements, pairs = choose.choice([1, 77, 2048, 16384, 20000]), choose.choice([0, 1, 7, 30])
    src, dst = random(40, elements, dtype=src_dtype), poisoned(40, elements, dtype=dst_dtype)
    if choose.random() < 0.5:
        src = src.cpu().pin_memory()
    if choose.random() < 0.5:
        dst = dst.cpu().pin_memory()
    src_ids, dst_ids = torch.randperm(40)[:pairs], torch.randperm(40)[:pairs]
    on_device = src_ids.cuda(), dst_ids.cuda()
    word = pinned(1, dtype=torch.int32)
    kernels.copy_blocks(
        NUMBERS[src_dtype], NUMBERS[dst_dtype], src.data_ptr(), dst.data_ptr(),
        on_device[0].data_ptr(), on_device[1].data_ptr(), pairs, elements,
        choose.choice([1, 4, 500]), word.data_ptr(), counter.data_ptr(), stream(),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert word.item() == 1 and counter.item() == 0
    expected = torch.full((40, elements), float("nan"), dtype=dst_dtype)
    expected[dst_ids] = src.cpu()[src_ids].to(dst_dtype)
    assert torch.equal(dst.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("seed", some_sanitized(8, (5,)))
def test_small_transfer_blocks(seed: int) -> None:
    choose = python_random.Random(seed)
    size, pairs = choose.choice([1, 77, 4096, 300_000]), choose.choice([0, 1, 7, 30])
    src = torch.randint(0, 255, (40, size), dtype=torch.uint8, device="cuda")
    dst = torch.full((40, size), 255, dtype=torch.uint8, device="cuda")
    if seed % 2:
        src = src.cpu().pin_memory()
    if seed % 4 > 1:
        dst = dst.cpu().pin_memory()
    src_ids, dst_ids = torch.randperm(40)[:pairs], torch.randperm(40)[:pairs]
    expected = torch.full((40, size), 255, dtype=torch.uint8)
    expected[dst_ids] = src.cpu()[src_ids]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    kernels.transfer_blocks(
        src.data_ptr(), dst.data_ptr(), src_ids.tolist(), dst_ids.tolist(), size, side.cuda_stream
    )
    side.synchronize()
    assert torch.equal(dst.cpu(), expected)
    for bad in [([0], []), ([-1], [0])]:
        with pytest.raises(ValueError, match="transfer_blocks"):
            kernels.transfer_blocks(src.data_ptr(), dst.data_ptr(), *bad, size, side.cuda_stream)


@pytest.mark.parametrize("suffix", ["", "_kernel"])
def test_words_order_a_captured_graph_and_the_host(suffix: str) -> None:
    wait, write = getattr(kernels, "wait_word" + suffix), getattr(kernels, "write_word" + suffix)
    go, done = pinned(1, dtype=torch.int32), pinned(1, dtype=torch.int32)
    x = torch.zeros(1000, device="cuda")

    def work() -> None:
        wait(go.data_ptr(), 1, stream())
        x.add_(1.0)
        write(go.data_ptr(), 0, stream())
        write(done.data_ptr(), 5, stream())

    graph = captured(work)
    for replay in range(1, 4):
        done.zero_()
        graph.replay()
        threading.Timer(0.02, lambda: go.fill_(1)).start()
        assert done.item() == 0
        deadline = time.monotonic() + 20
        while done.item() != 5:
            assert time.monotonic() < deadline
        assert go.item() == 0
        assert (x == replay).all()


def test_read_stream_adds_all() -> None:
    data = torch.rand(1_000_004, device="cuda")
    out = poisoned(7, dtype=torch.float32)
    kernels.read_stream(data.data_ptr(), data.numel() * 4, out.data_ptr(), 7, stream())
    assert_close(out.sum()[None], data.double().sum()[None], 1e-5)


def test_bad_sizes_are_refused() -> None:
    x = torch.zeros(64, device="cuda").data_ptr()
    with pytest.raises(ValueError, match="rms_norm"):
        kernels.rms_norm(0, x, x, x, 2, 1, 8, 4, 8, 8, 8, 1e-5, stream())
    with pytest.raises(ValueError, match="dtype 3"):
        kernels.silu_mul(3, x, x, 1, 4, 8, 4, stream())
    with pytest.raises(ValueError, match="counter"):
        kernels.gather_rows(x, x, 1, 4, 4, 4, x, 0, stream())
    with pytest.raises(ValueError, match="address"):
        kernels.wait_word(x + 1, 0, stream())
