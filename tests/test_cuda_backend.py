"""The CUDA backend's own logic without a GPU: hand-off, slots, rotation, copies. Kernels and device
are tested in tests/cuda."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import swiftapex.figures.kernels as figure_kernels
import swiftapex.worker.worker as worker_module
from swiftapex import SamplingParams
from swiftapex.backends.cuda_segments import CudaSegments, Work
from swiftapex.backends.reference import ReferenceOps
from swiftapex.backends.threads import cpu_threads
from swiftapex.core.ops import AttentionBatch, AttentionShape
from swiftapex.figures.spec import KernelConfig
from swiftapex.model.config import named_architecture
from swiftapex.model.dummy import dummy_weights
from swiftapex.model.stages import Stages
from tests.cuda_double import cuda_modules, maker
from tests.hybrid import STRATEGIES, Pools, Tally, run_schedule, small_engine, strategy

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cuda_on_host() -> Iterator[None]:
    with cuda_modules() as modules:
        segments = functools.partial(CudaSegments, recorder=lambda work: work)
        make = maker(modules, segments=segments)
        with (
            mock.patch.object(worker_module, "make_backends", make),
            mock.patch.object(figure_kernels, "make_backends", make),
            mock.patch.object(torch.cuda, "_sleep"),
        ):
            yield


@pytest.mark.usefixtures("cuda_on_host")
@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_equal_the_oracles(name: str) -> None:
    tally = Tally()
    for seed in range(3):
        policy, args = strategy(name, seed)
        run_schedule("gqa-3", policy, args, seed, tally, late=False, device="cuda")
    assert tally.cpu_tokens > 0 and not tally.forgiven


@pytest.mark.usefixtures("cuda_on_host")
def test_tokens_are_seen_while_the_next_pass_is_launched() -> None:
    """By asynchronous overlap, which waits there for the device to come near."""
    pools = Pools(gpu=6, cpu=64, block_size=16, rows=8, chunk=24)
    policy, args = strategy("async_overlap", 0)
    engine = small_engine("mha", pools, policy, args, late=None, device="cuda")
    executor: Any = engine._executor
    execute, seen, fetched = executor.execute, [], []

    def execute_and_note(plan: Any) -> Any:
        result = execute(plan)

        def fetch() -> Any:
            tokens = result.fetch()
            if tokens.by_request:
                fetched.append(time.perf_counter())
                seen.append(tokens.done_s)
            return tokens

        return dataclasses.replace(result, fetch=fetch)

    executor.execute = execute_and_note
    for i in range(12):
        engine.add([5, 6, 7 + i], SamplingParams(max_tokens=12, ignore_eos=True))
    while engine.has_work:
        engine.step()
    engine.close()
    pairs = [(early, late) for early, late in zip(seen, fetched, strict=True) if early is not None]
    assert pairs and all(early < late for early, late in pairs)


@pytest.mark.usefixtures("cuda_on_host")
@pytest.mark.parametrize("measure", ["attention", "attention_parts", "linear"])
def test_kernels_of_a_figure_are_measured(measure: Any) -> None:
    config = KernelConfig(
        measure=measure,
        dtype="float32",
        batches=(2,),
        q_heads=4,
        kv_heads=2,
        head_dim=32,
        context=40,
        pool_mib=1,
        architecture="tiny",
        seconds=0.01,
    )
    points = list(figure_kernels.measure_kernels(config))
    xs = {"attention": [2, 2], "linear": [2], "attention_parts": ["all, fused"] * 2}
    xs["attention_parts"] += ["QK", "softmax", "PV"] * 2
    assert [point.x for point in points] == xs[measure]
    assert all(number > 0 for point in points for number in point.values.values())


def test_bytes_between_the_sides_are_counted() -> None:
    with cuda_modules() as modules:
        device = torch.device("cpu")
        copies = modules["cuda_lane"].CudaCopies(device)
        on_gpu, on_host = torch.zeros(4, 2, 2, 16, 32), torch.zeros(4, 2, 2, 16, 32)
        modules["cuda"].torch.cuda.cudart().cudaHostRegister(on_gpu.data_ptr(), on_gpu.nbytes, 0)
        copies.submit(on_gpu, (0, 2), on_host, (1, 3))
        assert copies.link_bytes == 2 * (2 * 2 * 16 * 32) * 4
        lane = modules["cuda_lane"].CudaCpuLane(cpu_threads(1), device)
        shape = AttentionShape(4, 2, 32, 16)
        table, lens = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
        table[:, 0] = torch.arange(3)
        batch = AttentionBatch(3, (), table, lens, ())
        lane.submit(0, on_host, batch, shape, torch.ones(3, 8, 32)).wait()
        assert lane.link_bytes == 3 * (8 * 32 + 4 * 32) * 4  # Q, K, V there, O back
        lane.close()


def test_backends_of_one_time_have_streams_of_their_own_and_leave_them_to_later_ones() -> None:
    """cuBLAS keeps a workspace for every stream for good."""
    with cuda_modules() as modules:
        make = modules["cuda"].CudaBackend
        first, second = make(), make()
        streams = {id(first.stream), id(second.stream)}
        assert len(streams) == 2
        first.close()
        second.close()
        assert {id(make().stream), id(make().stream)} == streams
        assert id(make().stream) not in streams


def test_segments_of_two_batches_at_once_do_not_share_tensors() -> None:
    """Random sizes of two batches, whose rows change between layers, against the plain stages."""
    torch.manual_seed(0)
    config = named_architecture("tiny", num_layers=5)
    plain = Stages(config, dummy_weights(config, torch.float32), ReferenceOps(), rotates=False)
    recorded: list[int] = []

    def recorder(work: Work) -> Work:
        recorded.append(1)
        return lambda: work()

    segments = CudaSegments(plain, lambda: False, recorder)
    width = config.num_q_heads * config.head_dim
    rotation = torch.zeros(0)
    for sizes in [(3, 3), (3, 4), (7, 3), (70, 3), (3, 3), (7, 7)]:
        walks = [(segments.walk_stages(plain), torch.randn(n, config.hidden_size)) for n in sizes]
        expected = [x.clone() for _, x in walks]
        xs = [x for _, x in walks]
        for layer in range(config.num_layers):
            for i, (stages, _) in enumerate(walks):
                if layer == 3 and len(xs[i]) > 4:  # a cohort parks
                    xs[i], expected[i] = xs[i][:4], expected[i][:4]
                qkv = stages.pre_attn(layer, xs[i], rotation)
                torch.testing.assert_close(qkv, plain.pre_attn(layer, expected[i], rotation))
            for i, (stages, _) in enumerate(walks):
                o = torch.randn(len(xs[i]), width)
                xs[i] = stages.post_attn(layer, o, xs[i])
                expected[i] = plain.post_attn(layer, o, expected[i])
        for x, right in zip(xs, expected, strict=True):
            torch.testing.assert_close(x, right)
    assert recorded
