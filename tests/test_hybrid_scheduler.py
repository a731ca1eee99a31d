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
    harness = Harness(
        rng.choice((0, rng.randint(1, 12), rng.randint(1, 60))),
        rng.choice((1, 3, 16)),
        rng.randint(1, 12),
        rng.randint(1, 64),
        policy=policy,
        policy_args=args,
        cpu_blocks=rng.choice((0, rng.randint(1, 12), rng.randint(1, 120))),
        staging_blocks=rng.choice((0, rng.randint(1, 12), 60)),
        max_skipped=rng.choice((1, 5, 64)),
        cost=ConstantCostModel(
            num_layers=rng.choice((1, 4, 32)),
            linear_row=rng.choice((0.0, 1.0)),
            gpu_token=rng.choice((0.01, 1.0)),
            prefill_token=rng.choice((0.0, 2.0)),
            cpu_token=rng.choice((0.01, 1.0, 30.0)),
            cpu_fixed=rng.choice((0.0, 50.0)),
        ),
        seed=seed,
    )
    arrivals = [(rng.randint(1, 50), rng.randint(1, 25)) for _ in range(rng.randint(1, 16))]
    while arrivals:
        for _ in range(rng.choice((0, 0, 1, 4))):
            if arrivals:
                harness.add(*arrivals.pop())
        if rng.random() < 0.1 and harness.live:
            harness.abort(rng.choice(list(harness.live)))
        harness.step()
    harness.drain()
    return harness


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_whatever_the_pools(name: str, request: pytest.FixtureRequest) -> None:
    seeds = 60
    for seed in range(seeds):
        try:
            run_random(seed, name)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
