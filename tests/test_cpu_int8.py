"""KV in int8 on the CPU: the quantiser, attention over what is stored, copies from and to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swiftapex import LLM, SamplingParams
from swiftapex import _kernels_cpu as kernels
from swiftapex.backends.cpu import CpuBackend, kv_row
from swiftapex.backends.cpu_lane import CopyLane, CpuLane
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.errors import ConfigError
from swiftapex.core.ops import AttentionBatch, AttentionShape

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels.set_isa_cap(request.param)
    yield request.param
    kernels.set_isa_cap("")


def quantized(x: Tensor) -> Tensor:
    """[..., block_size, head_dim] -> int8 [..., block_size, head_dim + 4]: rows, then scales."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    rows = (x.float() * inverse).round().to(torch.int8)
    scales = scale.contiguous().view(torch.int8)
    plane = torch.cat((rows.flatten(-2), scales.flatten(-2)), -1)
    return plane.view(*x.shape[:-1], x.shape[-1] + 4)


def dequantized(kv: Tensor) -> Tensor:
    """float64 [..., block_size, head_dim]."""
    block_size, head_dim = kv.shape[-2], kv.shape[-1] - 4
    plane = kv.flatten(-2)
    rows = plane[..., : block_size * head_dim].unflatten(-1, (block_size, head_dim))
    scales = plane[..., block_size * head_dim :].contiguous().view(torch.float32)
    return rows.double() * scales.double()[..., None]


def attend(
    contexts: list[int], shape: AttentionShape, dtype: torch.dtype, threads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """A decode step over random KV. Got and wanted outputs; the stored error of the new token."""
    g = torch.Generator().manual_seed(len(contexts) + shape.head_dim + shape.num_q_heads)
    rows, width = len(contexts), -(-max(contexts) // shape.block_size)
    size = (rows * width, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
    stored = torch.randn(size, generator=g) * torch.rand(size[:-1], generator=g)[..., None] * 3
    kv = quantized(stored)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(rows, heads, shape.head_dim, generator=g).to(dtype)
    table = torch.randperm(rows * width, generator=g).int().view(rows, width)
    want_kv, bs = dequantized(kv), shape.block_size
    q, k, v = qkv.split((shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads), 1)
    new = dequantized(quantized(torch.stack((k, v), 2)[:, :, :, None]))[:, :, :, 0]
    want = torch.zeros(rows, shape.num_q_heads, shape.head_dim, dtype=torch.float64)
    for row, context in enumerate(contexts):
        if context == 0:
            continue
        want_kv[table[row, (context - 1) // bs], :, :, (context - 1) % bs] = new[row]
        used = want_kv[table[row].long()].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context]
        keys, values = used.repeat_interleave(shape.num_q_heads // shape.num_kv_heads, 1)
        weights = (q[row, :, None].double() @ keys.mT * shape.scale).softmax(-1)
        want[row] = (weights @ values)[:, 0]
    lane = CpuLane(ThreadPlan(threads, (), "test"))
    lens = torch.tensor(contexts, dtype=torch.int32)
    got = lane.submit(0, kv, AttentionBatch(rows, (), table, lens, ()), shape, qkv).wait()
    lane.close()
    assert torch.equal(dequantized(kv), want_kv), "KV differs from one quantised token per row"
    return got.view_as(want), want, stored


def check(contexts: list[int], shape: AttentionShape, dtype: torch.dtype, threads: int = 2) -> None:
    got, want, _ = attend(contexts, shape, dtype, threads)
    rounding = {torch.float32: 0.0, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    error = (got.double() - want).abs().amax((1, 2))
    assert (error <= (2e-5 + rounding) * want.abs().amax((1, 2))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(isa: str, dtype: torch.dtype) -> None:
    check([1, 2, 31, 32, 33, 0, 77, 129], AttentionShape(8, 2, 64, 32), dtype)


@pytest.mark.parametrize("group", range(1, 18))
def test_groups(isa: str, group: int) -> None:
    check([5, 70], AttentionShape(2 * group, 2, 40, 16), torch.float32)


@pytest.mark.parametrize("head_dim", [8, 24, 32, 64, 80, 96, 128, 256])
def test_head_dims(isa: str, head_dim: int) -> None:
    check([3, 50], AttentionShape(4, 2, head_dim, 16), torch.float32, threads=1)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_split_rows(threads: int) -> None:
    check([3000, 17], AttentionShape(4, 1, 64, 32), torch.float32, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_quantize_and_back(isa: str, dtype: torch.dtype) -> None:
    copies = CopyLane()
    source = torch.randn(4, 2, 2, 16, 24).to(dtype)
    source[2, 1, 0, 3] = 0
    middle = torch.zeros(3, 2, 2, 16, kv_row(24, torch.int8), dtype=torch.int8)
    target = torch.zeros(5, 2, 2, 16, 24, dtype=dtype)
    copies.submit(source, [2, 0], middle, [1, 2])
    copies.submit(middle, [1, 2], target, [4, 0]).wait()
    assert torch.equal(middle[[1, 2]], quantized(source[[2, 0]])) and torch.all(middle[0] == 0)
    assert torch.equal(target[[4, 0]], dequantized(middle[[1, 2]]).to(dtype))
    with pytest.raises(ValueError, match="do not fit"):
        copies.submit(source, [0], middle[..., :24].contiguous(), [0])
    copies.close()


def test_refuses_what_the_native_kernel_does_not_take() -> None:
    backend = CpuBackend(ThreadPlan(1, (), "test"))
    lane = CpuLane(ThreadPlan(1, (), "test"))
    shape = AttentionShape(2, 1, 8, 16)
    kv = backend.allocate_kv(1, 2, shape, torch.int8)[0]
    assert kv.shape == (2, 1, 2, 16, 12)
    table, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="native"):
        backend.attend(kv, AttentionBatch(0, (3,), table, lens, (3,)), shape, torch.randn(3, 4, 8))
    odd = AttentionShape(2, 1, 8, 15)
    with pytest.raises(ValueError, match="native"):
        lane.submit(0, kv, AttentionBatch(1, (), table, lens, ()), odd, torch.randn(1, 4, 8))
    lane.close()
    backend.close()


def test_an_engine_keeps_its_cpu_side_in_int8() -> None:
    model = {"architecture": "smollm2-135m", "weights": "dummy", "num_layers": 2}
    sides = {"gpu": {"kv_tokens": 256}, "cpu": {"kv_tokens": 2048, "kv_dtype": "int8"}}
    prompts = [list(range(1, n)) for n in (5, 40, 70)]
    with LLM(model, dtype="float32", policy="fastdecode", **sides) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        assert [len(output.token_ids) for output in outputs] == [12, 12, 12]
    with pytest.raises(ConfigError, match="int8"):
        LLM(model, dtype="float32", policy="fastdecode", device="reference", **sides)
    for size in (8, 144):  # not in an iteration, when it is too late
        with pytest.raises(ConfigError, match=f"block_size: {size}, .* in int8"):
            LLM(model, dtype="float32", policy="fastdecode", block_size=size, **sides)
