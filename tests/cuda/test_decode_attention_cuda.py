"""decode_attention on the GPU against float64 from the stored inputs. All KV beyond the contexts is
NaN, so is the output beforehand; block table entries past a context point nowhere."""

from __future__ import annotations

import itertools
import random as python_random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from gpu import (
    DTYPES,
    NUMBERS,
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
NOWHERE = 2**30
# Of a head's output, by norm: the output's rounding, and for the tensor cores the weights' too.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=[0, 80, 75], ids=["any", "cap80", "cap75"], autouse=True)
def capability_cap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every kernel that the GPU has: tensor memory accelerator, tensor cores alone, FMA."""
    kernels.set_capability_cap(request.param)
    yield
    kernels.set_capability_cap(0)


@dataclass
class Case:
    q: Tensor  # [n, q_heads, head_dim]
    kv: Tensor  # [blocks, kv_heads, 2, block_size, head_dim]
    block_table: Tensor  # [n, width]
    context_lens: Tensor  # [n]

    def run(
        self,
        num_ctas: int = 132,
        workspace: Tensor | None = None,
        plan: Tensor | None = None,
        is_planned: bool = False,
        out: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        n, q_heads, head_dim = self.q.shape
        _, kv_heads, _, block_size, _ = self.kv.shape
        if out is None:
            out = self.new_out()
        if workspace is None:
            workspace = new_workspace(self, num_ctas)
        kernels.decode_attention(
            NUMBERS[self.q.dtype], NUMBERS[self.kv.dtype], self.q.data_ptr(), self.kv.data_ptr(),
            self.block_table.data_ptr(), self.context_lens.data_ptr(), out.data_ptr(),
            workspace.data_ptr(), n, q_heads, kv_heads, head_dim, block_size,
            self.block_table.stride(0), self.q.stride(0), out.stride(0),
            head_dim**-0.5 if scale is None else scale, num_ctas,
            0 if plan is None else plan.data_ptr(), is_planned, stream(),
        )  # fmt: skip
        return out

    def new_out(self) -> Tensor:
        return strided(poisoned(*self.q.shape, dtype=self.q.dtype), 24)

    def expected(self) -> Tensor:
        n, q_heads, head_dim = self.q.shape
        kv_heads = self.kv.shape[1]
        out = torch.zeros(n, q_heads, head_dim, dtype=torch.float64, device="cuda")
        for row, context in enumerate(self.context_lens.tolist()):
            if context == 0:
                continue
            blocks = -(-context // self.kv.shape[3])
            kv = self.kv[self.block_table[row, :blocks].long()].double()
            k, v = (kv[:, :, i].transpose(0, 1).flatten(1, 2)[:, :context] for i in (0, 1))
            q = self.q[row].double().unflatten(0, (kv_heads, -1))
            weights = (q @ k.transpose(1, 2) * head_dim**-0.5).softmax(-1)
            out[row] = (weights @ v).flatten(0, 1)
        return out

    def check(self, num_ctas: int = 132, workspace: Tensor | None = None, slack: float = 1) -> None:
        """Of a call that finds out who computes what, and keeps it; one that is told so by what it
        kept, as those of later layers are, must give the same bits."""
        size = kernels.decode_attention_plan_bytes(num_ctas)
        plan = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
        out = self.run(num_ctas, workspace, plan)
        again = self.run(num_ctas, workspace, plan, is_planned=True)
        assert torch.equal(out.nan_to_num(), again.nan_to_num())
        actual, expected = out.double(), self.expected()
        error = (actual - expected).norm(dim=2) / (expected.norm(dim=2) + 1e-6)
        assert not error.isnan().any(), "an element was not written, or is NaN"
        limit = TOLERANCE[self.q.dtype] * slack
        assert error.max() <= limit, f"error {error.max():.2e}, tolerance {limit:.2e}"


def new_workspace(case: Case, num_ctas: int) -> Tensor:
    n, q_heads, head_dim = case.q.shape
    size = kernels.decode_attention_workspace(n, q_heads, case.kv.shape[1], head_dim, num_ctas)
    return torch.zeros(size, dtype=torch.uint8, device="cuda")


def make_case(
    contexts: list[int],
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 128,
    block_size: int = 16,
    scale: float = 1.0,
) -> Case:
    blocks_of = [-(-context // block_size) for context in contexts]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks)
    table = torch.full((len(contexts), max(blocks_of) + 1), NOWHERE, dtype=torch.int32)
    kv = random(num_blocks, kv_heads, 2, block_size, head_dim, dtype=kv_dtype or dtype)
    kv[:, :, 0] *= scale
    first = 0
    for row, (blocks, context) in enumerate(zip(blocks_of, contexts, strict=True)):
        table[row, :blocks] = order[first : first + blocks]
        if blocks:
            kv[int(table[row, blocks - 1]), :, :, context - (blocks - 1) * block_size :] = torch.nan
        first += blocks
    kv[order[first:].cuda()] = torch.nan
    q = strided(random(len(contexts), kv_heads * group, head_dim, dtype=dtype), 40)
    lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    return Case(q, kv, table.cuda(), lens)


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_every_group(dtype: torch.dtype, group: int) -> None:
    make_case([1, 17, 0, 300, 5], dtype, group=group).check()


@sanitize
@pytest.mark.parametrize(
    ("dtype", "group"), [(torch.bfloat16, 1), (torch.bfloat16, 8), (torch.float32, 4)], ids=str
)
def test_small_on_few_thread_blocks(dtype: torch.dtype, group: int) -> None:
    make_case([1, 17, 0, 150], dtype, group=group).check(num_ctas=5)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 96, 120, 128, 192, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 48, 24, 5, 1])
def test_small_head_dims_and_block_sizes(head_dim: int, block_size: int) -> None:
    choose = python_random.Random(head_dim * 1000 + block_size)
    for dtype in DTYPES:
        for kv_dtype in (dtype, choose.choice(DTYPES)):
            group, kv_heads = choose.choice([1, 3, 8, 12, 16]), choose.choice([1, 3])
            contexts = [choose.choice([0, 1, 31, 64, 129, 500]) for _ in range(4)]
            make_case(contexts, dtype, kv_dtype, kv_heads, group, head_dim, block_size).check()


@pytest.mark.parametrize("num_ctas", [1, 7, 8, 132, 264, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_of_very_different_lengths(dtype: torch.dtype, num_ctas: int) -> None:
    contexts = [0, 1, 2, 15, 16, 17, 31, 33, 0, 1000, 4097, 1, 0, 30011, 3]
    make_case(contexts, dtype).check(num_ctas)
    make_case([40000], dtype, kv_heads=1, group=8).check(num_ctas)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(dtype: torch.dtype) -> None:
    choose = python_random.Random(1)
    contexts = [choose.choice([0, 0, 1, 20, 37]) for _ in range(701)]
    make_case(contexts, dtype, group=2).check()
    make_case([0] * 40, dtype).check()
    make_case([0] * 40 + [5], dtype).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_large_logits(dtype: torch.dtype, scale: float) -> None:
    # A score's rounding in float32 grows with the score.
    make_case([1000, 77, 3000], dtype, scale=scale).check(slack=1 + scale / 2)


@pytest.mark.parametrize(
    ("dtype", "high", "step"),
    [(torch.float16, 65440, 32), (torch.bfloat16, 261120, 1024), (torch.float32, 65440, 32)],
    ids=str,
)
@pytest.mark.parametrize("rising", [False, True])
def test_huge_logits(dtype: torch.dtype, high: int, step: int, rising: bool) -> None:
    """Products that differ by nothing, or by more than weights have room for. float32 has 24 bits
    of them, so that no other dim may count."""
    case = make_case([1, 40, 300], dtype)
    case.q.zero_()
    case.q[..., 0] = high
    case.kv[:, :, 0] = 0
    for row, context in enumerate(case.context_lens.tolist()):
        for token in range(context):
            block = int(case.block_table[row, token // 16])
            lower = step * (99 - token // 3) if rising else 0
            assert high - lower == torch.tensor(high - lower, dtype=dtype)
            case.kv[block, :, 0, token % 16, 0] = high - lower
    case.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_inputs_same_bits(dtype: torch.dtype) -> None:
    case = make_case([5000, 3, 0, 777, 12345], dtype, kv_heads=3)
    other = make_case([100] * 30, dtype, group=16, head_dim=64)
    workspace = torch.cat([new_workspace(case, 264), new_workspace(other, 264)])
    first = case.run(264, workspace)
    for _ in range(20):
        other.run(200, workspace)  # leaves other partial results behind
        assert torch.equal(case.run(264, workspace), first)
    case.check(264, workspace)


@pytest.mark.parametrize(
    ("contexts", "group", "head_dim"),
    [
        *itertools.product(
            [[512] * 32, [2048] * 8, [16384], [9000, *[132] * 20]], [1, 4, 8], [128]
        ),
        *itertools.product([[16], [40, 0], [300] * 3], [1, 8], [64, 128, 256]),
    ],
    ids=str,
)
def test_layers_one_behind_another(contexts: list[int], group: int, head_dim: int) -> None:
    """Where nothing lies between the calls, those of later layers begin while the one before still
    runs, and read what the first has kept: the same bits as where each finds out by itself."""
    case = make_case(contexts, kv_heads=8, group=group, head_dim=head_dim)
    layers = [replace(case, kv=case.kv * (1 + i / 8)) for i in range(6)]
    layers[0].check()
    workspace = new_workspace(case, 132)
    expected = [layer.run(132, workspace) for layer in layers]
    plan = torch.empty(kernels.decode_attention_plan_bytes(132), dtype=torch.uint8, device="cuda")
    for _ in range(5):
        plan.fill_(0x7F)
        outs = [layer.new_out() for layer in layers]
        for i, (layer, out) in enumerate(zip(layers, outs, strict=True)):
            layer.run(132, workspace, plan, i > 0, out)
        for out, one in zip(outs, expected, strict=True):
            assert torch.equal(out, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_replay_with_other_contexts(dtype: torch.dtype) -> None:
    case = make_case([600, 512, 33, 2000], dtype, group=8)
    longest = case.context_lens.clone()
    workspace = new_workspace(case, 132)
    outs: list[Tensor] = []
    graph = captured(lambda: outs.append(case.run(132, workspace)))
    for contexts in ([600, 512, 33, 2000], [1, 0, 33, 1], [0, 0, 0, 0], [0, 0, 0, 1999]):
        case.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        assert (case.context_lens <= longest).all()
        outs[0].fill_(torch.nan)
        graph.replay()
        assert torch.equal(outs[0], case.run(132, workspace))
        case.check(132, workspace)


def test_bad_sizes_are_refused() -> None:
    case = make_case([5], group=17)
    with pytest.raises(ValueError, match="group"):
        case.run()
    with pytest.raises(ValueError, match="head_dim"):
        make_case([5], head_dim=12).run()
    for scale in (0.0, float("inf")):
        with pytest.raises(ValueError, match="scale"):
            make_case([5]).run(scale=scale)
    with pytest.raises(ValueError, match="num_ctas"):
        make_case([5]).run(5000, torch.zeros(1 << 20, dtype=torch.uint8, device="cuda"))
