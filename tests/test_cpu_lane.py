"""Attention beside the launching thread: results, order, threads, shutdown."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from swiftapex.backends.cpu_lane import CopyLane, CpuLane
from swiftapex.backends.reference import ReferenceBackend
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.ops import AttentionBatch, AttentionShape
from tests.lane_cases import DTYPES, ORDERS, SHAPE, Order, eventually, long_case, make_case, word


@pytest.fixture(params=ORDERS)
def lane(request: pytest.FixtureRequest) -> Iterator[CpuLane]:
    lane = CpuLane(ThreadPlan(2, (), "test"), request.param)
    yield lane
    lane.close()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(dtype: torch.dtype, kv_dtype: torch.dtype, num_threads: int) -> None:
    lane = CpuLane(ThreadPlan(num_threads, (), "test"))
    case = make_case([1, 16, 17, 300, 33], dtype=dtype, kv_dtype=kv_dtype)
    want_kv = case.kv.clone()
    want = ReferenceBackend().attend(want_kv, case.batch, SHAPE, case.qkv)
    got = case.submit(lane).wait()
    assert got.dtype is dtype
    assert torch.equal(case.kv, want_kv)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, atol=limit, rtol=limit)
    lane.close()


def test_shapes_without_a_native_kernel(lane: CpuLane) -> None:
    shape = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=12, block_size=4)
    case = make_case([3, 9], shape=shape)
    want = case.expected()
    ticket = case.submit(lane)
    assert ticket.ready()
    torch.testing.assert_close(ticket.wait(), want)
    with pytest.raises(RuntimeError):
        ticket.wait()
    with pytest.raises(ValueError, match="no native attention"):
        case.submit(lane, arrival=word())


def test_many_in_flight_from_several_threads(lane: CpuLane) -> None:
    errors: list[float] = []

    def work(seed: int) -> None:
        cases = [make_case([20 + 7 * i, 90], seed=100 * seed + i) for i in range(20)]
        wanted = [case.expected() for case in cases]
        tickets = [case.submit(lane, layer) for layer, case in enumerate(cases)]
        for ticket, want in reversed(list(zip(tickets, wanted, strict=True))):
            errors.append(float((ticket.wait() - want).abs().max()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 80 and max(errors) < 1e-5
    lengths = 4 * sum(20 + 7 * i + 90 for i in range(20))
    assert lane.work == (lane.busy_s, 80, 160, lengths) and lane.busy_s > 0


def test_one_plan_serves_the_layers_of_a_pass(lane: CpuLane) -> None:
    case = make_case([70, 20])
    layers = [case.kv.clone() for _ in range(5)]
    want = case.expected()
    tickets = [lane.submit(i, kv, case.batch, SHAPE, case.qkv) for i, kv in enumerate(layers)]
    for ticket in tickets:
        torch.testing.assert_close(ticket.wait(), want)
    longer = make_case([130, 5])
    torch.testing.assert_close(longer.submit(lane).wait(), longer.expected())


@pytest.mark.parametrize("order", ORDERS)
def test_order(order: Order) -> None:
    lane = CpuLane(ThreadPlan(1, (), "test"), order)
    first = long_case().submit(lane, 0)  # the others are there when it is done
    layers = [1, 4, 0, 4, 2]
    tickets = [make_case([40]).submit(lane, layer) for layer in layers]
    assert not first.ready()
    for ticket in (first, *tickets):
        ticket.wait()
    ran = sorted(range(len(layers)), key=lambda i: tickets[i].span()[0])
    assert ran == ([0, 1, 2, 3, 4] if order == "fifo" else [1, 3, 4, 0, 2])
    lane.close()


def test_python_runs_beside_attention(lane: CpuLane) -> None:
    """Neither submit nor wait holds the GIL or lasts as long as the attention."""
    case = long_case()
    steps, stop = itertools.count(), threading.Event()
    at = [0]

    def count() -> None:
        while not stop.wait(0.001):
            at[0] = next(steps)

    thread = threading.Thread(target=count)
    thread.start()
    submitted = time.perf_counter()
    ticket = case.submit(lane)
    returned, before = time.perf_counter(), at[0]
    assert not ticket.ready()
    ticket.wait()
    waited, after = time.perf_counter(), at[0]
    stop.set()
    thread.join()
    start, end = ticket.span()
    assert submitted < start < end < waited
    assert returned - submitted < (end - start) / 2
    assert after - before > 5


def test_errors_reach_the_waiter(lane: CpuLane) -> None:
    case = make_case([40, 40])
    narrow = case.batch.block_table[:, :1].contiguous()
    case.batch = AttentionBatch(2, (), narrow, case.batch.context_lens, ())
    ticket = case.submit(lane)
    with pytest.raises(ValueError, match="narrower"):
        ticket.wait()
    chunk = AttentionBatch(0, (2,), case.batch.block_table, case.batch.context_lens, (2,))
    with pytest.raises(ValueError, match="decodes only"):
        lane.submit(0, case.kv, chunk, SHAPE, case.qkv)
    with pytest.raises(ValueError, match="do not fit"):
        lane.submit(0, case.kv, case.batch, SHAPE, case.qkv[:, :3])
    with pytest.raises(ValueError, match="order"):
        CpuLane(ThreadPlan(1, (), "test"), "lifo")  # type: ignore[arg-type]


def test_waiting_costs_little(lane: CpuLane) -> None:
    """CPU seconds per second of all threads of this process."""

    def cost() -> float:
        time.sleep(0.02)
        start, cpu = time.perf_counter(), time.process_time()
        time.sleep(0.4)
        return (time.process_time() - cpu) / (time.perf_counter() - start)

    copies = CopyLane()
    make_case([40]).submit(lane).wait()
    assert cost() < 0.05, "nothing is queued"
    arrival = word()
    ticket = make_case([40]).submit(lane, arrival=arrival)
    assert cost() < 0.2, "data are late"
    arrival.fill_(1)
    ticket.wait()
    copies.close()


def test_close_in_flight(lane: CpuLane) -> None:
    running, late = long_case(), make_case([40])
    first = running.submit(lane)
    eventually(lambda: lane.busy_s >= 0 and not first.ready())
    time.sleep(0.005)
    others = [late.submit(lane, arrival=word()), make_case([40]).submit(lane)]
    lane.close()
    lane.close()
    assert first.wait().isfinite().all()
    for ticket in others:
        assert ticket.ready()
        with pytest.raises(RuntimeError, match="closed before"):
            ticket.wait()
    with pytest.raises(RuntimeError, match="closed"):
        late.submit(lane)


def test_lane_dropped_in_flight() -> None:
    lane = CpuLane(ThreadPlan(2, (), "test"))
    tickets = [long_case(8).submit(lane), make_case([40]).submit(lane, arrival=word())]
    del lane
    gc.collect()
    assert all(ticket.ready() for ticket in tickets)
