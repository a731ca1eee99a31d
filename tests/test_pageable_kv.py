"""KV in host memory that cannot be pinned: what was pinned is undone, and copies go through a piece
of pinned memory. On the stand-in for a GPU, with the real native copy lane."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import swiftapex.worker.worker as worker_module
from swiftapex.core.ops import AttentionShape
from tests.cuda_double import RuntimeDouble, cuda_modules, maker
from tests.hybrid import STRATEGIES, Pools, Tally, run_schedule, small_engine, strategy

pytestmark = pytest.mark.timeout(120)
SHAPE = AttentionShape(num_q_heads=2, num_kv_heads=2, head_dim=32, block_size=16)
BLOCK_BYTES = 2 * 2 * 16 * 32 * 4  # of one layer in float32


@pytest.fixture
def modules() -> Iterator[dict[str, Any]]:
    with cuda_modules() as found, mock.patch.object(worker_module, "make_backends", maker(found)):
        yield found


def runtime(modules: dict[str, Any]) -> RuntimeDouble:
    return modules["cuda"].torch.cuda.cudart()


@pytest.mark.parametrize("failing", [None, 0, 3, 6])
def test_pieces_are_all_pinned_or_none(
    modules: dict[str, Any], failing: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(modules).failing = failing
    with mock.patch.object(modules["cuda"], "_REGISTER_BYTES", 3 * BLOCK_BYTES):
        backend = modules["cuda"].CudaBackend()
        kv = backend.allocate_host_kv(2, 10, SHAPE, torch.float32)
    assert kv.shape == (2, 10, 2, 2, 16, 32) and not kv.any()
    pinned = runtime(modules).pinned
    if failing is None:
        assert sum(pinned.values()) == kv.nbytes and len(pinned) == 7
        assert not backend.notes and not caplog.records
    else:
        assert not pinned and not kv.is_pinned()
        (note,) = backend.notes
        assert [record.message for record in caplog.records] == [note]
        assert "pageable" in note and "CUDA error 2" in note and "ulimit -l" in note
    backend.close()
    assert not pinned


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("host_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounce_blocks", [1, 2.5, 100])
def test_blocks_go_through_a_bounded_piece(
    modules: dict[str, Any], to_host: bool, host_dtype: torch.dtype, bounce_blocks: float
) -> None:
    backend = modules["cuda"].CudaBackend()
    runtime(modules).failing = 0
    host = backend.allocate_host_kv(1, 12, SHAPE, host_dtype)[0]
    device = backend.allocate_kv(1, 9, SHAPE, torch.float32)[0]
    assert host.is_cpu and not device.is_cpu
    host.copy_(torch.randn(host.shape)), device.copy_(torch.randn(device.shape))
    here, there = [8, 0, 3, 5, 1, 7, 2], [2, 11, 0, 4, 9, 5, 7]
    source, target = (device, host) if to_host else (host, device)
    sources, targets = (here, there) if to_host else (there, here)
    expected = target.clone()
    expected[targets] = source[sources].to(target.dtype)
    transfers = []
    real = modules["cuda_bounce"].kernels.transfer_blocks

    def transfer(src: int, dst: int, *rest: Any) -> None:
        transfers.append(rest)
        real(src, dst, *rest)

    with (
        mock.patch.object(modules["cuda_bounce"], "BOUNCE_BYTES", int(bounce_blocks * BLOCK_BYTES)),
        mock.patch.object(modules["cuda_bounce"].kernels, "transfer_blocks", transfer),
    ):
        copies = modules["cuda_lane"].CudaCopies(backend.device)
        for _ in range(3):  # words and memory are used again
            copies.submit(source, sources, target, targets).wait()
    assert torch.equal(target, expected)
    assert copies.link_bytes == 3 * 7 * host[0].nbytes
    per_copy = -(-7 // int(bounce_blocks))
    assert len(transfers) == 3 * per_copy
    assert all(len(rest[0]) <= bounce_blocks for rest in transfers)
    copies.close()
    backend.close()


@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_equal_the_oracles(modules: dict[str, Any], name: str) -> None:
    tally = Tally()
    moved = []
    real = modules["cuda_bounce"].Bounce.copy

    def copy(self: Any, *args: Any) -> None:
        moved.append(args)
        real(self, *args)

    with (
        mock.patch.object(modules["cuda"], "_register", lambda piece: 2),
        mock.patch.object(modules["cuda_bounce"], "BOUNCE_BYTES", 2 * BLOCK_BYTES),
        mock.patch.object(modules["cuda_bounce"].Bounce, "copy", copy),
    ):
        for seed in range(3):
            policy, args = strategy(name, seed)
            run_schedule("gqa-3", policy, args, seed, tally, late=False, device="cuda")
    assert moved and tally.cpu_tokens > 0 and not tally.forgiven


def test_an_engine_notes_it(modules: dict[str, Any]) -> None:
    pools = Pools(gpu=6, cpu=12, block_size=16, rows=4, chunk=16)
    engines = []
    for failing in (None, 0):
        runtime(modules).failing = failing
        engines.append(small_engine("mha", pools, "neo", {}, None, device="cuda"))
    assert not engines[0].notes and "pageable" in engines[1].notes[0]
    for engine in engines:
        engine.close()
    assert not runtime(modules).pinned


def test_a_failure_of_the_lane_is_raised(
    modules: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    backend = modules["cuda"].CudaBackend()
    runtime(modules).failing = 0
    with caplog.at_level(logging.CRITICAL):
        host = backend.allocate_host_kv(1, 3, SHAPE, torch.float32)[0]
    device = backend.allocate_kv(1, 3, SHAPE, torch.float32)[0]
    copies = modules["cuda_lane"].CudaCopies(backend.device)
    copies.submit(device, [0], host, [7])  # no such block
    with pytest.raises(IndexError):
        copies.submit(device, [0], host, [1])
    copies.close()
    backend.close()
