"""All policies without a model, on any pools: every request ends, nothing leaks, none starves."""

from __future__ import annotations

import random

import pytest
from harness import ConstantCostModel, Harness

POLICIES: dict[str, tuple[str, dict[str, object]]] = {
    "gpu_only": ("gpu_only", {}),
    "neo": ("neo", {}),
    "apex": ("apex", {}),
    "apex-0": ("apex", {"min_cpu_gpu_ratio": 0, "cohorts": 3}),
    "fastdecode": ("fastdecode", {}),
    "sequential": ("fixed:sequential", {"use_cpu": True}),
    "asymmetric": ("fixed:asymmetric", {}),
    "symmetric": ("fixed:symmetric", {}),
    "async_overlap": ("fixed:async_overlap", {}),
    "async_overlap-1": ("fixed:async_overlap", {"cohorts": 1}),
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
            harness.abort(rng.choice(list(harness.live)))
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
def test_every_request_ends_whatever_the_pools(name: str, request: pytest.FixtureRequest) -> None:
    seeds = 60
    for seed in range(seeds):
        try:
            run_random(seed, name)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
