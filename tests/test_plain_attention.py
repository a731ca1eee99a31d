"""The plain decode attention kernel, held to the same float64 reference as the tuned one."""

from __future__ import annotations

import pytest
import torch

from swiftapex import LLM, SamplingParams
from swiftapex import _kernels_cpu as kernels
from swiftapex.backends.cpu_lane import CpuLane
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.errors import ConfigError
from tests.lane_cases import make_case
from tests.test_cpu_attention import (
    DTYPES,
    Case,
    attend,
    bits,
    check,
    no_threads_left,  # noqa: F401  (a fixture)
    pool,
)

PLAIN = kernels.plain_decode_attention


@pytest.mark.parametrize("isa", kernels.available_isas())
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    kernels.set_isa_cap(isa)
    try:
        contexts = [1, 2, 31, 32, 33, 0, 77, 129]
        check(Case(6, 2, contexts, 40, dtype=dtype, kv_dtype=kv_dtype), 2, PLAIN)
    finally:
        kernels.set_isa_cap("")


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("head_dim", [8, 128, 248])
def test_shapes(group: int, head_dim: int) -> None:
    check(Case(2 * group, 2, [5, 300], head_dim, 16, seed=group), 3, PLAIN)


@pytest.mark.parametrize("logit", [6e4, -6e4])
def test_extreme_logits(logit: float) -> None:
    case = Case(4, 1, [100, 1, 37], 64, 16, kv_dtype=torch.float32, scale=1.0)
    q, k, _ = case.heads()
    q.fill_(0.0)[..., 0] = 1.0
    k[..., 0] = logit
    case.kv[:, :, 0, :, 0] = 0.0
    case.kv[case.table[0, 6].long(), :, 0, 4:] = torch.nan
    check(case, 2, PLAIN)


def test_bits_do_not_depend_on_the_threads() -> None:
    case = Case(8, 2, [700, 90, 0, 5], 64)
    first = case.run(1, PLAIN)
    assert all(torch.equal(bits(case.run(n, PLAIN)), bits(first)) for n in (2, 7, 40))


def test_empty_batches() -> None:
    assert Case(4, 2, []).run(3, PLAIN).shape == (0, 4, 64)
    assert torch.equal(Case(4, 2, [0, 0]).run(3, PLAIN), torch.zeros(2, 4, 64))


def test_refuses_what_it_cannot_do() -> None:
    case = Case(4, 2, [40, 9])
    q, k, v = case.heads()
    plan = kernels.DecodePlan(case.lens.data_ptr(), 2, 2, 32, 2)
    with pytest.raises(ValueError, match="threads"):
        attend(pool(1), plan, q, k, v, torch.empty(q.shape), case.kv, case.table, 1.0, PLAIN)
    with pytest.raises(ValueError, match="int8"):
        PLAIN(pool(2), plan, 0, 3, *(0,) * 6, *(0,) * 4, 2, 4, 64, 1.0)


def test_a_lane_runs_it() -> None:
    """The two kernels differ in rounding, so that the bits tell which one ran."""
    case = make_case([300, 17, 90])
    results = {}
    for kernel in ("tuned", "plain"):
        lane = CpuLane(ThreadPlan(2, (), "test"), kernel=kernel)  # type: ignore[arg-type]
        results[kernel] = case.submit(lane).wait().clone()
        lane.close()
    torch.testing.assert_close(results["plain"], case.expected(), rtol=1e-5, atol=1e-5)
    assert not torch.equal(results["plain"], results["tuned"])
    with pytest.raises(ValueError, match="'tuned' or 'plain'"):
        CpuLane(ThreadPlan(1, (), "test"), kernel="fast")  # type: ignore[arg-type]


def test_an_engine_generates_the_same_tokens_with_it() -> None:
    model = {"architecture": "smollm2-135m", "weights": "dummy", "num_layers": 2}
    prompts = [list(range(1, n)) for n in (5, 40, 70)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens = {}
    for kernel in ("tuned", "plain"):
        cpu = {"kv_tokens": 2048, "attention_kernel": kernel}
        with LLM(
            model, dtype="float32", policy="fastdecode", gpu={"kv_tokens": 256}, cpu=cpu
        ) as llm:
            tokens[kernel] = [out.token_ids for out in llm.generate(prompts, params)]
    assert tokens["plain"] == tokens["tuned"]
    with pytest.raises(ConfigError, match="attention_kernel"):
        LLM(model, dtype="float32", policy="fastdecode", device="reference", cpu=cpu)
