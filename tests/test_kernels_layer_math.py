"""linear, rms_norm, rope, silu_mul and argmax of the CPU backend against float64, on every
available instruction set, in all dtypes, odd sizes, strided inputs, several thread counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftapex import _kernels_cpu as kernels
from swiftapex.backends.cpu_ops import DTYPE_NUMBERS, CpuOps
from swiftapex.backends.reference import ReferenceOps

DTYPES = tuple(DTYPE_NUMBERS)
# Rounding of results and of what is rounded in between, relative to the operands' magnitude.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(params=kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels.set_isa_cap(request.param)
    yield request.param
    kernels.set_isa_cap("")


@pytest.fixture(scope="module", params=[1, 2, 5])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    pool = kernels.ThreadPool(request.param)
    yield CpuOps(pool)
    pool.close()


def strided(*shape: int, dtype: torch.dtype, extra: int = 3, scale: float = 1.0) -> Tensor:
    """Random values in rows that are `extra` elements apart; what lies between them is NaN."""
    rows = torch.full((*shape[:-1], shape[-1] + extra), torch.nan, dtype=dtype)
    rows[..., : shape[-1]] = torch.randn(shape) * scale
    return rows[..., : shape[-1]]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (actual.double() - expected).abs() / (expected.abs() + 1)
    assert not actual.isnan().any()
    assert error.max() < TOLERANCE[dtype], f"error {error.max():.2e}"


def linear_float64(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y = x.double() @ w.double().T
    if bias is not None:
        y += bias.double()
    return y if residual is None else y.to(x.dtype).double() + residual.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "inner", "out"),
    [(1, 64, 96), (1, 65, 7), (2, 31, 33), (3, 96, 50), (5, 33, 16), (16, 100, 130),
     (17, 64, 31), (33, 160, 47), (64, 72, 80), (4, 2100, 20), (18, 2100, 20)],
)  # fmt: skip
def test_linear(isa: str, ops: CpuOps, dtype: torch.dtype, n: int, inner: int, out: int) -> None:
    torch.manual_seed(n * inner + out)
    x = strided(n, inner, dtype=dtype)
    w = strided(out, inner, dtype=dtype, scale=inner**-0.5)
    bias, residual = torch.randn(out).to(dtype), strided(n, out, dtype=dtype)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        assert_close(ops.linear(x, w, b, r), linear_float64(x, w, b, r), dtype)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    inner=st.integers(1, 150),
    out=st.integers(1, 100),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(kernels.available_isas()),
)
def test_linear_any_shape(
    n: int, inner: int, out: int, threads: int, dtype: torch.dtype, name: str
) -> None:
    x, w = strided(n, inner, dtype=dtype), strided(out, inner, dtype=dtype, scale=inner**-0.5)
    pool = kernels.ThreadPool(threads)
    kernels.set_isa_cap(name)
    try:
        # Results are written into poisoned rows with gaps, which must stay as they are.
        y = torch.full((n, out + 5), torch.nan, dtype=dtype)
        kernels.linear(
            pool, DTYPE_NUMBERS[dtype], x.data_ptr(), w.data_ptr(), 0, 0, y.data_ptr(),
            n, inner, out, x.stride(0), w.stride(0), 0, y.stride(0),
        )  # fmt: skip
    finally:
        kernels.set_isa_cap("")
        pool.close()
    assert_close(y[:, :out], linear_float64(x, w, None, None), dtype)
    assert y[:, out:].isnan().all()


def test_many_rows_go_to_torch(ops: CpuOps) -> None:
    x, w, r = torch.randn(600, 40), torch.randn(50, 40), torch.randn(600, 50)
    assert_close(ops.linear(x, w, None, r), linear_float64(x, w, None, r), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 24, 64, 577, 4096])
def test_rms_norm(isa: str, ops: CpuOps, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    x, weight = strided(7, dim, dtype=dtype, scale=3.0), torch.randn(dim).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = exact.to(dtype).double() * weight.double()
    assert_close(ops.rms_norm(x, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads(isa: str, ops: CpuOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = strided(5, 9, 64, dtype=dtype, extra=0)[:, 2:7]
    weight = torch.randn(64).to(dtype)
    y = ops.rms_norm(heads, weight, 1e-6)
    assert y.is_contiguous()
    assert_close(y, ReferenceOps().rms_norm(heads, weight, 1e-6).double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 65])
def test_rms_norm_in_place(isa: str, ops: CpuOps, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    qkv, weight = torch.randn(5, 9, dim).to(dtype), torch.randn(dim).to(dtype)
    before, heads = qkv.clone(), qkv[:, 2:7]
    expected = ops.rms_norm(heads, weight, 1e-6)
    assert ops.rms_norm(heads, weight, 1e-6, out=heads) is heads
    assert torch.equal(heads, expected)
    assert torch.equal(qkv[:, [0, 1, 7, 8]], before[:, [0, 1, 7, 8]])
    with pytest.raises(ValueError, match="do not fit"):
        ops.rms_norm(heads, weight, 1e-6, out=qkv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 15, 512, 1029, 5000])
def test_argmax(isa: str, ops: CpuOps, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    x = strided(12, dim, dtype=dtype)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 9.0)):
        x[row, dim // 2] = value
        x[row + 4, [dim // 2, -1]] = value
    x[8] = -torch.inf
    x[9] = -3.0
    x[10] = -torch.inf
    x[10, dim // 3] = -5.0
    indices, invalid = ops.argmax(x)
    expected_indices, expected_invalid = ReferenceOps().argmax(x)
    assert torch.equal(indices, expected_indices)
    assert torch.equal(invalid, expected_invalid)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 32, 64, 80, 128])
@pytest.mark.parametrize("n", [1, 6, 300])
def test_rope(isa: str, ops: CpuOps, dtype: torch.dtype, dim: int, n: int) -> None:
    torch.manual_seed(dim + n)
    all_heads = torch.randn(n, 6, dim).to(dtype)
    before = all_heads.double()
    angles = torch.rand(n, dim // 2) * 100
    rotation = torch.cat((angles.cos(), angles.sin()), dim=-1)
    ops.rope(all_heads[:, 1:5], rotation)
    cos, sin = rotation.double()[:, None].chunk(2, dim=-1)
    a, b = before[:, 1:5].chunk(2, dim=-1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    assert_close(all_heads[:, 1:5], expected, dtype)
    assert torch.equal(all_heads[:, [0, 5]].double(), before[:, [0, 5]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "inner"), [(1, 1), (1, 1536), (3, 77), (40, 1000)])
def test_silu_mul(isa: str, ops: CpuOps, dtype: torch.dtype, n: int, inner: int) -> None:
    torch.manual_seed(n + inner)
    gate_up = strided(n, 2 * inner, dtype=dtype, scale=4.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (gate * gate.sigmoid()).to(dtype).double() * up
    assert_close(ops.silu_mul(gate_up), expected, dtype)


def test_silu_of_large_numbers(isa: str, ops: CpuOps) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30])
    y = ops.silu_mul(torch.cat((gate, torch.ones(7)))[None])
    torch.testing.assert_close(y[0], gate.clamp_min(0.0), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 20, 400])
def test_sequences_equal_their_parts(isa: str, ops: CpuOps, dtype: torch.dtype, n: int) -> None:
    torch.manual_seed(n)
    hidden, inner, width, head_dim = 72, 40, 24, 16
    x, o = strided(n, hidden, dtype=dtype), strided(n, width, dtype=dtype)
    proj = strided(hidden, width, dtype=dtype, scale=width**-0.5)
    proj_bias = torch.randn(hidden).to(dtype)
    rotation = torch.randn(n, head_dim)
    norm = torch.randn(hidden).to(dtype)
    gate_up = strided(2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = strided(hidden, inner, dtype=dtype, scale=inner**-0.5)
    up_bias, down_bias = torch.randn(2 * inner).to(dtype), torch.randn(hidden).to(dtype)
    for p, b, d in ((None, None, None), (proj_bias, up_bias, down_bias)):
        h = ops.linear(ops.rms_norm(x, norm, 1e-5), gate_up, b)
        assert torch.equal(ops.norm_linear(x, norm, 1e-5, gate_up, b), h)
        ops.rope(h.view(n, -1, head_dim)[:, :3], rotation)
        assert torch.equal(ops.norm_linear(x, norm, 1e-5, gate_up, b, rotation, 3), h)
        h = ops.linear(o, proj, p, residual=x)
        product = ops.silu_mul(ops.norm_linear(h, norm, 1e-5, gate_up, b))
        y = ops.linear(product, down, d, residual=h)
        assert torch.equal(ops.proj_ffn(o, proj, p, x, norm, 1e-5, gate_up, b, down, d), y)


def test_embedding(ops: CpuOps) -> None:
    weight = torch.randn(11, 5)
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 10]), weight), weight[[3, 0, 10]])
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([11]), weight)


def test_wrong_arguments_are_refused(ops: CpuOps) -> None:
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    norm, square, down = torch.randn(8), torch.randn(8, 8), torch.randn(8, 2)
    wrong = [
        lambda: ops.linear(x, w.bfloat16()),
        lambda: ops.linear(x.double(), w.double()),
        lambda: ops.linear(x[:, :6], w),
        lambda: ops.linear(x.T.contiguous().T, w),
        lambda: ops.linear(x, w.T.contiguous().T),
        lambda: ops.linear(x, w, norm),
        lambda: ops.linear(x, w, None, x),
        lambda: ops.linear(x.to("meta"), w),
        lambda: ops.rms_norm(x, norm[:7], 1e-5),
        lambda: ops.rms_norm(x.half(), norm, 1e-5),
        lambda: ops.rope(x.view(3, 2, 4), torch.randn(3, 8)),
        lambda: ops.rope(x.view(3, 2, 4), torch.randn(3, 4).double()),
        lambda: ops.norm_linear(x, norm[:7], 1e-5, w),
        lambda: ops.norm_linear(x, norm.half(), 1e-5, w),
        lambda: ops.norm_linear(x[:, :6], norm, 1e-5, w),
        lambda: ops.norm_linear(x, norm, 1e-5, w, None, torch.randn(3, 8), 1),
        lambda: ops.norm_linear(x, norm, 1e-5, w, None, torch.randn(2, 4), 1),
        lambda: ops.norm_linear(x, norm, 1e-5, w, None, torch.randn(3, 4).double(), 1),
        lambda: ops.proj_ffn(x, w, None, x, norm, 1e-5, w, None, down, None),
        lambda: ops.proj_ffn(x[:, :4], w.T.contiguous(), None, x, norm, 1e-5, w, None, w, None),
        lambda: ops.proj_ffn(x, square, None, x, norm, 1e-5, w, None, down.half(), None),
        lambda: ops.proj_ffn(x[:2], square, None, x, norm, 1e-5, w, None, down, None),
        lambda: ops.silu_mul(x[:, :7]),
        lambda: ops.silu_mul(x.int()),
        lambda: ops.argmax(x.double()),
        lambda: ops.argmax(x.T),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            call()
