"""The CUDA backend's own logic without a GPU: hand-off, slots, rotation, copies. Kernels and device
are tested in tests/cuda."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import swiftapex.worker.worker as worker_module
from swiftapex.backends import Backends
from swiftapex.backends.threads import cpu_threads
from tests.cuda_double import cuda_modules
from tests.hybrid import STRATEGIES, Tally, run_schedule, strategy

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cuda_on_host() -> Iterator[None]:
    with cuda_modules() as modules:

        def make(engine: Any, with_cpu_side: bool) -> Backends:
            gpu = modules["cuda"].CudaBackend()
            lane = copies = None
            if with_cpu_side:
                lane = modules["cuda_lane"].CudaCpuLane(cpu_threads(1), gpu.device)
                copies = modules["cuda_lane"].CudaCopies(gpu.device)
            return Backends(
                gpu=gpu,
                cpu_attention=lane,
                copies=copies,
                clock=modules["cuda_clock"].CudaClock(),
                progress=modules["cuda_clock"].CudaProgress(),
                active=gpu.active,
                finish=gpu.stream.synchronize,
            )

        with mock.patch.object(worker_module, "make_backends", make):
            yield


@pytest.mark.usefixtures("cuda_on_host")
@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_equal_the_oracles(name: str) -> None:
    tally = Tally()
    for seed in range(3):
        policy, args = strategy(name, seed)
        run_schedule("gqa-3", policy, args, seed, tally, late=False, device="cuda")
    assert tally.cpu_tokens > 0 and not tally.forgiven
