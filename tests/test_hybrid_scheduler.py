"""All policies without a model, on any pools: every request ends, nothing leaks, none starves."""

from __future__ import annotations

import random

import pytest
from harness import CPU, GPU, STAGING, ConstantCostModel, Harness
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from swiftapex.core.errors import RequestError
from swiftapex.core.request import RequestState, SamplingParams
from swiftapex.engine.admission import fit_sampling

POLICIES: dict[str, tuple[str, dict[str, object]]] = {
    "gpu_only": ("gpu_only", {}),
    "neo": ("neo", {}),
    "apex": ("apex", {}),
    "apex-0": ("apex", {"min_cpu_gpu_ratio": 0, "cohorts": 3}),
    "apex-no-overlap": ("apex", {"overlap": False, "min_cpu_gpu_ratio": 0}),
    "apex-no-model": ("apex", {"analytic_model": False}),
    "model_based": ("model_based", {}),
    "rho": ("rho", {"threshold": 0.1}),
    "fastdecode": ("fastdecode", {}),
    "sequential": ("fixed:sequential", {"use_cpu": True}),
    "asymmetric": ("fixed:asymmetric", {}),
    "symmetric": ("fixed:symmetric", {}),
    "async_overlap": ("fixed:async_overlap", {}),
    "async_overlap-2": ("fixed:async_overlap", {"cohorts": 2}),
}


def run_random(seed: int, name: str) -> Harness:
    """Arrivals and aborts at random under random limits, then everything drains."""
    rng = random.Random(seed)
    policy, args = POLICIES[name]
    size = rng.choice((1, 3, 16))
    longest = rng.choice((12, 60))  # tokens of the longest request
    need = -(-longest // size)  # blocks of it
    pools = (0, rng.randint(1, need), rng.randint(need, 3 * need), rng.randint(need, 9 * need))
    harness = Harness(
        rng.choice(pools),
        size,
        rng.randint(1, 12),
        rng.randint(1, 64),
        policy=policy,
        policy_args=args,
        cpu_blocks=rng.choice(pools),
        staging_blocks=rng.choice((0, need, rng.randint(1, need), rng.randint(need, 3 * need))),
        max_skipped=rng.choice((1, 5, 64)),
        cost=random_costs(rng),
        seed=seed,
    )
    lengths = [rng.randint(1, longest - 1) for _ in range(rng.randint(1, 24))]
    arrivals = [(prompt, rng.randint(1, longest - prompt)) for prompt in lengths]
    aborts = rng.choice((0.0, 0.1))
    while arrivals:
        for _ in range(rng.choice((0, 0, 1, 4))):
            if arrivals:
                harness.add(*arrivals.pop())
        if rng.random() < aborts and harness.live:
            parked = [i for i in harness.live if harness.live[i].in_flight]
            harness.abort(rng.choice(parked or list(harness.live)))
        harness.step()
    harness.drain()
    return harness


def random_costs(rng: random.Random) -> ConstantCostModel:
    return ConstantCostModel(
        num_layers=rng.choice((1, 4, 32)),
        linear_row=rng.choice((0.0, 1.0)),
        gpu_token=rng.choice((0.01, 1.0)),
        prefill_token=rng.choice((0.0, 2.0)),
        cpu_token=rng.choice((0.01, 0.1, 1.0, 30.0)),
        cpu_fixed=rng.choice((0.0, 50.0)),
    )


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_whatever_the_pools(name: str, scheduler_seeds: int) -> None:
    """`pytest --scheduler-seeds 10000` for all of them."""
    for seed in range(scheduler_seeds):
        try:
            run_random(seed, name)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


class HybridMachine(RuleBasedStateMachine):
    """Arrivals and aborts in any order on small pools; hypothesis finds the shortest failure."""

    def __init__(self) -> None:
        super().__init__()
        self.harness: Harness | None = None

    @precondition(lambda self: self.harness is None)
    @rule(
        name=st.sampled_from(sorted(POLICIES)),
        blocks=st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)),
        block_size=st.sampled_from((1, 4)),
        rows=st.integers(1, 6),
        tokens=st.integers(1, 20),
        cpu_token=st.sampled_from((0.01, 1.0, 30.0)),
        seed=st.integers(0, 99),
    )
    def build(
        self,
        name: str,
        blocks: tuple[int, int, int],
        block_size: int,
        rows: int,
        tokens: int,
        cpu_token: float,
        seed: int,
    ) -> None:
        policy, args = POLICIES[name]
        gpu, cpu, staging = blocks
        self.harness = Harness(
            gpu, block_size, rows, tokens, policy=policy, policy_args=args, cpu_blocks=cpu,
            staging_blocks=staging, max_skipped=3, cost=ConstantCostModel(cpu_token=cpu_token),
            seed=seed,
        )  # fmt: skip

    @precondition(lambda self: self.harness is not None)
    @rule(prompt_len=st.integers(1, 30), max_tokens=st.integers(1, 20))
    def add(self, prompt_len: int, max_tokens: int) -> None:
        self.harness.add(prompt_len, max_tokens)

    @precondition(lambda self: self.harness is not None and self.harness.live)
    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        live = sorted(self.harness.live)
        self.harness.abort(live[index % len(live)])

    @precondition(lambda self: self.harness is not None)
    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    def teardown(self) -> None:
        if self.harness is not None:
            self.harness.drain()


TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("name", POLICIES)
def test_oversized_requests_are_refused_with_the_numbers_and_harm_no_other(name: str) -> None:
    """Pool of 50 blocks of 16 and no CPU: 1,002 + 50 tokens need 66 blocks."""
    policy, args = POLICIES[name]
    harness = Harness(50, 16, 256, 2048, policy=policy, policy_args=args)
    for _ in range(10):
        assert harness.add(10, 50) is not None
    harness.drain()
    for _ in range(5):
        with pytest.raises(RequestError, match=r"need 66 KV blocks of 16 tokens, 50 exist"):
            fit_sampling(SamplingParams(max_tokens=50), 1002, 10_000, harness.state)
    assert harness.add(10, 50) is not None
    harness.drain()
    for _ in range(10):
        assert harness.add(10, 50) is not None
    harness.drain()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("pools", [(1000, 0), (1000, 1000), (4000, 1000), (64, 4000)])
def test_a_request_completes_whatever_the_ratio_of_the_pools(
    name: str, pools: tuple[int, int]
) -> None:
    policy, args = POLICIES[name]
    gpu, cpu = pools
    harness = Harness(
        gpu, 16, 256, 2048, policy=policy, policy_args=args, cpu_blocks=cpu, staging_blocks=16
    )
    assert harness.add(100, 20) is not None
    harness.drain(200)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "gpu_only"])
def test_a_full_gpu_sends_requests_to_the_cpu_and_all_finish(name: str) -> None:
    """125 requests of 440 + 950 tokens (a tenth of that here), a GPU pool for 25 % of their KV, a
    CPU pool for 400 %."""
    policy, args = POLICIES[name]
    need = 125 * -(-139 // 16)
    cost = ConstantCostModel(num_layers=32, cpu_token=0.01)
    harness = Harness(
        need // 4, 16, 64, 512, policy=policy, policy_args=args, cpu_blocks=4 * need,
        staging_blocks=9, cost=cost,
    )  # fmt: skip
    harness.state.check_integrity = lambda: None  # type: ignore[method-assign]  # 1,125 blocks
    for _ in range(125):
        assert harness.add(44, 95) is not None
    harness.drain()
    assert harness.cpu_tokens > 0


@pytest.mark.parametrize("name", POLICIES)
def test_aborting_everything_in_any_state_leaves_both_pools_free(name: str) -> None:
    policy, args = POLICIES[name]
    for steps in range(25):
        harness = Harness(
            9, 4, 8, 32, policy=policy, policy_args=args, cpu_blocks=14, staging_blocks=9,
            cost=ConstantCostModel(cpu_token=0.01), seed=steps,
        )  # fmt: skip
        for _ in range(8):
            harness.add(9, 20)
        for _ in range(steps):
            harness.step()
        for request_id in list(harness.live):
            harness.abort(request_id)
        harness.drain()
        harness.add(9, 20)
        harness.drain()


def test_aborts_meet_requests_in_flight_preempted_staging_and_on_the_cpu() -> None:
    """The states that the test above has to reach for its result to mean something."""
    seen = set()
    for steps in range(25):
        harness = Harness(
            9, 4, 8, 8, policy="fixed:async_overlap", cpu_blocks=14, staging_blocks=9,
            cost=ConstantCostModel(cpu_token=0.01), seed=steps,
        )  # fmt: skip
        for _ in range(8):
            harness.add(9, 20)
        for _ in range(steps):
            harness.step()
        for request in harness.live.values():
            seen.add("in flight" if request.in_flight else request.placement)
            seen.add("preempted" if request.num_preemptions else request.state)
    assert {"in flight", "preempted", STAGING, CPU, GPU, RequestState.WAITING} <= seen


def test_a_cpu_request_that_never_pays_is_served_once_it_is_overdue() -> None:
    """T_ca of one decode is far longer than a pass, so that neither NEO nor APEX would pick it."""
    for name in ("neo", "apex", "async_overlap", "asymmetric", "symmetric"):
        policy, args = POLICIES[name]
        harness = Harness(
            20, 4, 8, 32, policy=policy, policy_args=args, cpu_blocks=40, staging_blocks=20,
            max_skipped=6, cost=ConstantCostModel(cpu_token=1000.0),
        )  # fmt: skip
        for _ in range(8):
            harness.add(9, 60)
        for _ in range(40):
            harness.step()
        assert harness.cpu_tokens > 0, name
        harness.drain()


def test_a_request_prefilled_through_the_staging_area_decodes_on_the_cpu() -> None:
    harness = Harness(
        0, 4, 8, 5, policy="apex", cpu_blocks=10, staging_blocks=4, cost=ConstantCostModel()
    )
    request = harness.add(12, 4)
    assert request is not None
    for computed in (5, 10):
        harness.step()
        assert (request.placement, request.num_computed) == (STAGING, computed)
    harness.step()
    assert request.placement is CPU and request.is_decoding
    harness.drain()
