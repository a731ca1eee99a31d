"""Ranks as Ray actors with a GPU each: NCCL, as many ranks as there are GPUs (one is enough)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("ranks on GPUs need an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("ray")

from swiftapex.executor.ray_ranks import RayRanks
from tests.hybrid import STRATEGIES, Tally, run_schedule, strategy

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[RayRanks]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} ranks need as many GPUs")
    started = RayRanks(request.param, "cuda")
    yield started
    started.close()


@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_are_those_of_transformers(ranks: RayRanks, name: str) -> None:
    tally = Tally()
    for seed in range(3):
        args = strategy(name, seed)
        run_schedule("gqa-8", *args, seed, tally, late=False, device="cuda", ranks=ranks)
    assert tally.cpu_tokens > 0 and not tally.forgiven
