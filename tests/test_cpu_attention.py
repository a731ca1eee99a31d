"""Paged decode attention on the CPU against float64 over the same stored KV."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftapex import _kernels_cpu as kernels

Kernel = Callable[..., None]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ISAS = kernels.available_isas()
THREADS = (1, 2, 7, 17)
MAP_PRIVATE_UNRESERVED = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE, which Python lacks


POOLS: dict[int, kernels.ThreadPool] = {}


def pool(num_threads: int) -> kernels.ThreadPool:
    """One per size for the whole file: most tests are shorter than starting threads."""
    if num_threads not in POOLS:
        POOLS[num_threads] = kernels.ThreadPool(num_threads)
    return POOLS[num_threads]


@pytest.fixture(scope="module", autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    for each in POOLS.values():
        each.close()
    POOLS.clear()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels.set_isa_cap(request.param)
    yield request.param
    kernels.set_isa_cap("")


@dataclass
class Case:
    """A decode batch with random KV in scattered blocks; unused KV and the output hold NaN."""

    q_heads: int
    kv_heads: int
    contexts: list[int]
    head_dim: int = 64
    block_size: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float16
    seed: int = 0
    scale: float | None = None
    qkv: Tensor = field(init=False)
    kv: Tensor = field(init=False)
    table: Tensor = field(init=False)
    lens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        rows = len(self.contexts)
        blocks = [-(-context // self.block_size) for context in self.contexts]
        heads = self.q_heads + 2 * self.kv_heads
        self.scale = self.head_dim**-0.5 if self.scale is None else self.scale
        self.lens = torch.tensor(self.contexts, dtype=torch.int32)
        self.qkv = torch.randn(rows, heads, self.head_dim, generator=g).to(self.dtype)
        shape = (sum(blocks) + 3, self.kv_heads, 2, self.block_size, self.head_dim)
        self.kv = torch.full(shape, torch.nan, dtype=self.kv_dtype)
        ids = torch.randperm(shape[0], generator=g).int()
        self.table = torch.full((rows, max(blocks, default=0) + 1), -(2**30), dtype=torch.int32)
        for row, n in enumerate(blocks):
            self.table[row, :n] = ids[sum(blocks[:row]) :][:n]
            positions = torch.arange(n * self.block_size).view(n, 1, 1, self.block_size, 1)
            stored = torch.randn(n, *shape[1:], generator=g)
            stored.masked_fill_(positions >= self.contexts[row] - 1, torch.nan)
            self.kv[self.table[row, :n].long()] = stored.to(self.kv_dtype)

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.split((self.q_heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def run(self, num_threads: int, kernel: Kernel = kernels.paged_decode_attention) -> Tensor:
        q, k, v = self.heads()
        rows = len(self.contexts)
        out = torch.full((rows, self.q_heads, self.head_dim), torch.nan, dtype=self.dtype)
        plan = kernels.DecodePlan(
            self.lens.data_ptr(), rows, self.kv_heads, self.block_size, num_threads
        )
        attend(pool(num_threads), plan, q, k, v, out, self.kv, self.table, self.scale, kernel)
        return out

    def appended(self) -> Tensor:
        """`kv` as it must be after the call."""
        _, k, v = self.heads()
        kv = self.kv.clone()
        for row, context in enumerate(self.contexts):
            if context > 0:
                block = self.table[row, (context - 1) // self.block_size]
                kv[block, :, 0, (context - 1) % self.block_size] = k[row].to(self.kv_dtype)
                kv[block, :, 1, (context - 1) % self.block_size] = v[row].to(self.kv_dtype)
        return kv

    def reference(self) -> Tensor:
        """float64, over the KV that the call must leave behind."""
        q, kv = self.heads()[0].double(), self.appended()
        out = torch.zeros_like(q)
        for row, context in enumerate(self.contexts):
            used = kv[self.table[row, : -(-context // self.block_size)].long()].double()
            k, v = used.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context]
            group = self.q_heads // self.kv_heads
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            weights = (q[row, :, None] @ k.mT * self.scale).softmax(-1)
            if context > 0:
                out[row] = (weights @ v)[:, 0]
        return out


def attend(
    threads: kernels.ThreadPool,
    plan: kernels.DecodePlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kv: Tensor,
    table: Tensor,
    scale: float,
    kernel: Kernel = kernels.paged_decode_attention,
) -> None:
    kernel(
        threads,
        plan,
        DTYPES.index(q.dtype),
        DTYPES.index(kv.dtype),
        *(x.data_ptr() for x in (q, k, v, out, kv, table)),
        *(x.stride(0) for x in (q, k, v, out, table)),
        q.shape[1],
        q.shape[2],
        scale,
    )


def limit(case: Case) -> float:
    """Error over a row's largest value; the output's own rounding comes on top."""
    rounding = {torch.float32: 0.0, torch.float16: 5e-4, torch.bfloat16: 4e-3}[case.dtype]
    return (1e-5 if case.kv_dtype is torch.float32 else 1e-3) + rounding


def bits(x: Tensor) -> Tensor:
    """NaN equals itself this way."""
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def check(case: Case, num_threads: int, kernel: Kernel = kernels.paged_decode_attention) -> None:
    want, want_kv = case.reference(), case.appended()
    got = case.run(num_threads, kernel)
    assert torch.equal(bits(case.kv), bits(want_kv)), "KV differs from one appended token per row"
    assert torch.isfinite(got).all()
    error = (got.double() - want).abs().amax((1, 2))
    largest = want.abs().amax((1, 2))
    assert (error <= limit(case) * largest).all(), f"{(error / largest).max():.2e}"


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    contexts = [1, 2, 31, 32, 33, 0, 77, 129]
    check(Case(8, 2, contexts, dtype=dtype, kv_dtype=kv_dtype), num_threads=2)


@pytest.mark.parametrize("group", range(1, 18))
def test_groups(isa: str, group: int) -> None:
    for kv_dtype in DTYPES:
        check(Case(group * 2, 2, [5, 70], 40, kv_dtype=kv_dtype, seed=group), num_threads=2)


@pytest.mark.parametrize("head_dim", [8, 32, 40, 48, 56, 64, 72, 80, 96, 120, 128, 192, 248, 256])
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_head_dims(isa: str, head_dim: int, kv_dtype: torch.dtype) -> None:
    check(Case(4, 2, [3, 50], head_dim, 16, kv_dtype=kv_dtype, seed=head_dim), num_threads=1)


@pytest.mark.parametrize("head_dim", [8, 40, 128, 256])
@pytest.mark.parametrize("group", range(1, 17))
def test_bfloat16_throughout(isa: str, group: int, head_dim: int) -> None:
    """Activations in bfloat16 have logits of their own in some instruction sets."""
    dtype = torch.bfloat16
    case = Case(group * 2, 2, [1, 7, 33, 70], head_dim, dtype=dtype, kv_dtype=dtype, seed=group)
    check(case, num_threads=2)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_block_sizes(isa: str, block_size: int) -> None:
    contexts = [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5]
    check(Case(6, 2, contexts, block_size=block_size, kv_dtype=torch.bfloat16), num_threads=2)


@pytest.mark.parametrize("num_threads", [*THREADS, 40])
@pytest.mark.parametrize(
    "heads", [(8, 8), (6, 2), (8, 2), (5, 1), (28, 4), (48, 8), (12, 2), (8, 1)]
)
def test_threads(heads: tuple[int, int], num_threads: int) -> None:
    """Odd head counts, more threads than there is work for, rows cut into several pieces."""
    check(Case(*heads, [300, 1, 17, 0, 256, 133, 64], 32, 16), num_threads)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_one_long_row(num_threads: int, kv_heads: int) -> None:
    check(Case(4 * kv_heads, kv_heads, [3000], 64, seed=kv_heads), num_threads)


def test_same_bits_every_time(isa: str) -> None:
    case = Case(8, 2, [700, 90, 2000, 5], 64)
    for num_threads in THREADS:
        first = case.run(num_threads)
        assert all(torch.equal(bits(case.run(num_threads)), bits(first)) for _ in range(3))


def test_a_plan_serves_every_layer() -> None:
    cases = [Case(8, 2, [700, 90, 2000, 5], 64, seed=seed) for seed in range(3)]
    lens = cases[0].lens
    plan = kernels.DecodePlan(lens.data_ptr(), len(lens), 2, 32, 7)
    for case in cases:
        q, k, v = case.heads()
        out = torch.full(q.shape, torch.nan)
        attend(pool(7), plan, q, k, v, out, case.kv, case.table, case.scale)
        assert (out - case.reference()).abs().max() < 1e-3


@pytest.mark.parametrize("contexts", [[300, 1, 0, 45, 130] * 4, [512], [1300]])
@pytest.mark.parametrize("num_threads", [2, 7])
def test_pieces_taken_over_give_the_same_bits(num_threads: int, contexts: list[int]) -> None:
    """Calls of one plan, more pieces than threads, also where that takes cuts within a row whose
    results are merged; the last pool's threads sleep when it begins."""
    case = Case(8, 4, contexts, 64)
    q, k, v = case.heads()
    plan = kernels.DecodePlan(case.lens.data_ptr(), len(case.lens), 4, 32, num_threads)
    assert plan.num_pieces >= 2 * num_threads
    first = case.run(num_threads)
    assert (first - case.reference()).abs().max() < 1e-3
    sleepy = kernels.ThreadPool(num_threads, spin_us=0)
    for each in [pool(num_threads)] * 20 + [sleepy] * 20:
        out = torch.full(q.shape, torch.nan)
        attend(each, plan, q, k, v, out, case.kv, case.table, case.scale)
        assert torch.equal(bits(out), bits(first))
    sleepy.close()


@pytest.mark.parametrize("logit", [6e4, -6e4, 0.0])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits(isa: str, logit: float, spread: bool, dtype: torch.dtype) -> None:
    """All logits equal to `logit`, or one of them 6e4 above the rest: no infinity, no NaN."""
    case = Case(4, 1, [100, 1, 37], 64, 16, dtype, dtype, scale=1.0)
    q, k, _ = case.heads()
    q.fill_(0.0)[..., 0] = 1.0
    k[..., 0] = logit
    case.kv[:, :, 0, :, 0] = logit - (6e4 if spread else 0.0)
    case.kv[case.table[0, 6].long(), :, 0, 4:] = torch.nan
    check(case, num_threads=2)


@pytest.mark.parametrize("dtypes", [DTYPES[:2], DTYPES[1::-1], DTYPES[::2], DTYPES[2:] * 2])
@pytest.mark.parametrize("scale", [1e-6, 0.3, 3.0])
def test_tokens_of_no_weight_and_other_scales(
    isa: str, dtypes: tuple[torch.dtype, torch.dtype], scale: float
) -> None:
    """Logits of minus infinity, and infinity in rows of a block that hold no token yet."""
    for group in (1, 2, 4, 7, 8):
        case = Case(group, 1, [100, 1, 37, 16], 72, 16, *dtypes, seed=group, scale=scale)
        case.kv[case.kv.isnan()] = torch.inf
        q, _, _ = case.heads()
        q.abs_().clamp_(min=0.1)
        for position in (0, 3, 17, 35):
            rows = [0, 2] if position > 15 else [0, 2, 3]
            blocks = case.table[rows, position // 16].long()
            case.kv[blocks, 0, 0, position % 16, position] = -torch.inf
        check(case, num_threads=2)


def test_offsets_beyond_32_bits(isa: str) -> None:
    """Blocks whose first element lies beyond 2^31, in memory that is mapped but never touched."""
    kv_heads, head_dim, block_size, num_blocks = 32, 128, 16, 64_000
    block_bytes = kv_heads * 2 * block_size * head_dim * 2
    memory = mmap.mmap(-1, num_blocks * block_bytes, flags=MAP_PRIVATE_UNRESERVED)
    kv = torch.from_numpy(np.frombuffer(memory, dtype=np.float16)).view(
        num_blocks, kv_heads, 2, block_size, head_dim
    )
    small = Case(kv_heads, kv_heads, [20], head_dim, block_size)
    kv[[63_999, 40_001]] = small.kv[small.table[0, :2].long()]
    want = small.reference()
    small.kv, small.table = kv, torch.tensor([[63_999, 40_001]], dtype=torch.int32)
    assert (small.run(2) - want).abs().max() < 1e-3
    assert torch.equal(kv[40_001, :, 0, 3], small.heads()[1][0].half())


def test_strides_of_padded_rows() -> None:
    case = Case(6, 3, [40, 9], 48)
    want = case.reference()
    padded = torch.full((2, 12 * 48 + 20), torch.nan)
    padded[:, 10:-10] = case.qkv.flatten(1)
    rows = padded[:, 10:-10]
    q, k, v = (
        rows[:, begin * 48 : end * 48].unflatten(1, (-1, 48))
        for begin, end in ((0, 6), (6, 9), (9, 12))
    )
    out = torch.full((2, 7, 48), torch.nan)
    plan = kernels.DecodePlan(case.lens.data_ptr(), 2, 3, 32, 2)
    attend(pool(2), plan, q, k, v, out[:, :6], case.kv, case.table, case.scale)
    assert (out[:, :6] - want).abs().max() < 1e-3
    assert out[:, 6].isnan().all()


def test_empty_batches() -> None:
    assert Case(4, 2, []).run(3).shape == (0, 4, 64)
    assert torch.equal(Case(4, 2, [0, 0]).run(3), torch.zeros(2, 4, 64))


def test_refuses_what_it_cannot_do() -> None:
    case = Case(4, 2, [40, 9])
    q, k, v = case.heads()
    out = torch.empty(q.shape)
    plan = kernels.DecodePlan(case.lens.data_ptr(), 2, 2, 32, 2)
    with pytest.raises(ValueError, match="threads"):
        attend(pool(1), plan, q, k, v, out, case.kv, case.table, 1.0)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        attend(pool(2), plan, q[:, :3], k, v, out, case.kv, case.table, 1.0)
    with pytest.raises(ValueError, match="head_dim"):
        attend(pool(2), plan, q[..., :60], k, v, out, case.kv, case.table, 1.0)
    with pytest.raises(ValueError, match="narrower"):
        attend(pool(2), plan, q, k, v, out, case.kv, case.table[:, :1].contiguous(), 1.0)
    with pytest.raises(ValueError, match="scale"):
        attend(pool(2), plan, q, k, v, out, case.kv, case.table, 0.0)
    lens = torch.tensor([-1], dtype=torch.int32)
    with pytest.raises(ValueError, match="negative"):
        kernels.DecodePlan(lens.data_ptr(), 1, 2, 32, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    group=st.integers(1, 17),
    kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 20).map(lambda n: 8 * n),
    block_size=st.sampled_from([16, 32, 64]),
    contexts=st.lists(st.integers(0, 150), max_size=6),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(DTYPES),
    num_threads=st.sampled_from(THREADS),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 99),
)
def test_random_shapes(
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    contexts: list[int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_threads: int,
    isa: str,
    seed: int,
) -> None:
    kernels.set_isa_cap(isa)
    try:
        case = Case(
            group * kv_heads, kv_heads, contexts, head_dim, block_size, dtype, kv_dtype, seed
        )
        check(case, num_threads)
    finally:
        kernels.set_isa_cap("")
