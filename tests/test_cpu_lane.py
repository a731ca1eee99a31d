"""Attention and copies beside the launching thread: results, order, words, threads, shutdown."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from swiftapex.backends.cpu_lane import CopyLane, CpuLane, LaneTicket
from swiftapex.backends.reference import ReferenceBackend
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.ops import AttentionBatch, AttentionShape

Order = Literal["fifo", "deepest_first"]
ORDERS: tuple[Order, ...] = ("fifo", "deepest_first")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=32, block_size=16)


@dataclass
class Case:
    kv: Tensor
    batch: AttentionBatch
    qkv: Tensor
    shape: AttentionShape = SHAPE

    def submit(self, lane: CpuLane, layer: int = 0, **words: Tensor) -> LaneTicket[Tensor]:
        return lane.submit(layer, self.kv, self.batch, self.shape, self.qkv, **words)

    def expected(self) -> Tensor:
        """O and, in `kv`, the appended K and V; computed on a copy."""
        kv = self.kv.clone()
        return ReferenceBackend().attend(kv, self.batch, self.shape, self.qkv)


def make_case(
    contexts: list[int],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    shape: AttentionShape = SHAPE,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    rows, width = len(contexts), -(-max(contexts) // shape.block_size)
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    size = (rows * width + 2, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
    kv = torch.randn(size, generator=g).to(kv_dtype)
    table = torch.randperm(rows * width + 2, generator=g)[: rows * width].int().view(rows, width)
    lens = torch.tensor(contexts, dtype=torch.int32)
    qkv = torch.randn(rows, heads, shape.head_dim, generator=g).to(dtype)
    return Case(kv, AttentionBatch(rows, (), table, lens), qkv, shape)


def long_case(rows: int = 96) -> Case:
    """Some 100 ms of work on little memory: rows share all blocks but their last one."""
    shape = AttentionShape(num_q_heads=16, num_kv_heads=4, head_dim=64, block_size=16)
    case = make_case([4000], shape=shape)
    tail = torch.randn(rows, *case.kv.shape[1:])
    first = case.kv.shape[0]
    table = case.batch.block_table.repeat(rows, 1)
    table[:, -1] = torch.arange(first, first + rows, dtype=torch.int32)
    lens = case.batch.context_lens.repeat(rows)
    return Case(
        torch.cat((case.kv, tail)),
        AttentionBatch(rows, (), table, lens),
        case.qkv.repeat(rows, 1, 1),
        shape,
    )


def word() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0002)


@pytest.fixture(params=ORDERS)
def lane(request: pytest.FixtureRequest) -> Iterator[CpuLane]:
    lane = CpuLane(ThreadPlan(2, (), "test"), request.param)
    yield lane
    lane.close()


@pytest.fixture
def copies() -> Iterator[CopyLane]:
    copies = CopyLane()
    yield copies
    copies.close()


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
    assert lane.busy_s > 0


def test_one_plan_serves_the_layers_of_a_pass(lane: CpuLane) -> None:
    case = make_case([70, 20])
    layers = [case.kv.clone() for _ in range(5)]
    want = case.expected()
    tickets = [lane.submit(i, kv, case.batch, SHAPE, case.qkv) for i, kv in enumerate(layers)]
    for ticket in tickets:
        torch.testing.assert_close(ticket.wait(), want)
    longer = make_case([130, 5])
    torch.testing.assert_close(longer.submit(lane).wait(), longer.expected())


def test_ready_out_of_order(lane: CpuLane) -> None:
    arrivals = [word() for _ in range(4)]
    cases = [make_case([30], seed=i) for i in range(4)]
    pairs = zip(cases, arrivals, strict=True)
    tickets = [case.submit(lane, 1, arrival=arrival) for case, arrival in pairs]
    for i in (2, 0, 3, 1):
        assert not tickets[i].ready()
        arrivals[i].fill_(1)
        eventually(tickets[i].ready)
        assert arrivals[i] == 0
    for ticket, case in zip(tickets, cases, strict=True):
        torch.testing.assert_close(ticket.wait(), case.expected())


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


def test_late_data_are_overtaken(lane: CpuLane) -> None:
    late, case = word(), make_case([40])
    ticket = case.submit(lane, 9, arrival=late)
    for _ in range(3):
        make_case([40]).submit(lane, 0).wait()
    assert not ticket.ready()
    late.fill_(1)
    torch.testing.assert_close(ticket.wait(), case.expected())


def test_copies_are_never_overtaken(copies: CopyLane) -> None:
    late = word()
    blocks = torch.arange(4.0).view(4, 1, 1, 1, 1).repeat(1, 2, 2, 16, 8)
    first = copies.submit(blocks, [0], blocks, [1], arrival=late)
    second = copies.submit(blocks, [1], blocks, [2])
    time.sleep(0.01)
    assert not first.ready() and not second.ready()
    late.fill_(1)
    second.wait()
    assert first.ready() and torch.all(blocks[:3] == 0) and torch.all(blocks[3] == 3)


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


def test_words_of_the_caller(lane: CpuLane) -> None:
    case = make_case([40])
    arrival, done = word(), word()
    for _ in range(3):
        ticket = case.submit(lane, arrival=arrival, done=done)
        assert (int(arrival), int(done)) == (0, 0)
        arrival.fill_(1)
        eventually(lambda: int(done) == 1)
        assert ticket.ready() and arrival == 0
        ticket.wait()
        assert done == 0 and not ticket.ready()
    with pytest.raises(ValueError, match="one int32"):
        case.submit(lane, done=torch.zeros(2, dtype=torch.int32))


def test_result_is_taken_once(lane: CpuLane) -> None:
    arrival = word()
    ticket = make_case([40]).submit(lane, arrival=arrival)
    with pytest.raises(RuntimeError, match="has not run"):
        ticket.span()
    arrival.fill_(1)
    ticket.wait()
    with pytest.raises(RuntimeError, match="taken before"):
        ticket.wait()


def test_errors_reach_the_waiter(lane: CpuLane) -> None:
    case = make_case([40, 40])
    narrow = case.batch.block_table[:, :1].contiguous()
    case.batch = AttentionBatch(2, (), narrow, case.batch.context_lens)
    ticket = case.submit(lane)
    with pytest.raises(ValueError, match="narrower"):
        ticket.wait()
    chunk = AttentionBatch(0, (2,), case.batch.block_table, case.batch.context_lens)
    with pytest.raises(ValueError, match="decodes only"):
        lane.submit(0, case.kv, chunk, SHAPE, case.qkv)
    with pytest.raises(ValueError, match="do not fit"):
        lane.submit(0, case.kv, case.batch, SHAPE, case.qkv[:, :3])
    with pytest.raises(ValueError, match="order"):
        CpuLane(ThreadPlan(1, (), "test"), "lifo")  # type: ignore[arg-type]


def test_a_signal_ends_a_wait(lane: CpuLane) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise InterruptedError

    previous = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    ticket = make_case([40]).submit(lane, arrival=word())
    timer.start()
    try:
        with pytest.raises(InterruptedError):
            ticket.wait()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_waiting_costs_little(lane: CpuLane, copies: CopyLane) -> None:
    """CPU seconds per second of all threads of this process."""

    def cost() -> float:
        time.sleep(0.02)
        start, cpu = time.perf_counter(), time.process_time()
        time.sleep(0.4)
        return (time.process_time() - cpu) / (time.perf_counter() - start)

    make_case([40]).submit(lane).wait()
    assert cost() < 0.05, "nothing is queued"
    arrival = word()
    ticket = make_case([40]).submit(lane, arrival=arrival)
    assert cost() < 0.2, "data are late"
    arrival.fill_(1)
    ticket.wait()


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


def test_memory_outlives_a_dropped_ticket(lane: CpuLane) -> None:
    arrival = word()
    case = make_case([40])
    qkv = weakref.ref(case.qkv)
    case.submit(lane, arrival=arrival)
    del case
    gc.collect()
    assert qkv() is not None
    arrival.fill_(1)
    eventually(lambda: int(arrival) == 0)
    eventually(lambda: make_case([20]).submit(lane).wait() is not None and qkv() is None)


def test_lane_dropped_in_flight() -> None:
    lane = CpuLane(ThreadPlan(2, (), "test"))
    tickets = [long_case(8).submit(lane), make_case([40]).submit(lane, arrival=word())]
    del lane
    gc.collect()
    assert all(ticket.ready() for ticket in tickets)


@pytest.mark.parametrize("target_dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_copies_convert(
    copies: CopyLane, source_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    source = torch.randn(6, 2, 2, 16, 24).mul_(1000).to(source_dtype)
    source[2, 0, 0, 0, :4] = torch.tensor([0.0, -0.0, 6e-8, float("inf")])
    target = torch.full((9, 2, 2, 16, 24), -1.0).to(target_dtype)
    want = target.clone()
    want[[8, 0, 3]] = source[[2, 5, 0]].to(target_dtype)
    ticket = copies.submit(source, [2, 5, 0], target, [8, 0, 3])
    assert ticket.wait() is None
    assert torch.equal(target, want)
    start, end = ticket.span()
    assert 0 < end - start < 10 and copies.busy_s > 0


def test_copies_of_unknown_blocks(copies: CopyLane) -> None:
    source, target = torch.ones(3, 1, 2, 16, 8), torch.zeros(2, 1, 2, 16, 8)
    for source_blocks, target_blocks in (([0, 3], [0, 1]), ([0, 1], [0, -1])):
        with pytest.raises(IndexError, match="block"):
            copies.submit(source, source_blocks, target, target_blocks).wait()
    with pytest.raises(ValueError, match="as many"):
        copies.submit(source, [0, 1], target, [0]).wait()
    with pytest.raises(ValueError, match="do not fit"):
        copies.submit(source, [0], target[:, :, :1], [0])
    assert torch.all(target == 0)
    copies.submit(source, [], target, []).wait()


NUM_WORDS = 4


class Words(RuleBasedStateMachine):
    """Any interleaving of submissions, arrivals and consumption by host or stream: words are 0 or
    1, and each is reset by its consumer."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = CpuLane(ThreadPlan(1, (), "test"), "deepest_first")
        self.arrival = torch.zeros(NUM_WORDS, dtype=torch.int32)
        self.done = torch.zeros(NUM_WORDS, dtype=torch.int32)
        self.late: dict[int, LaneTicket[Tensor]] = {}  # word -> its ticket; data to come
        self.running: dict[int, LaneTicket[Tensor]] = {}  # data have arrived
        self.consumed: list[LaneTicket[Tensor]] = []
        self.case = make_case([18])
        self.want = self.case.expected()

    def teardown(self) -> None:
        self.lane.close()

    @rule(i=st.integers(0, NUM_WORDS - 1), layer=st.integers(0, 3))
    def submit(self, i: int, layer: int) -> None:
        if i in self.late or i in self.running:
            return
        words = {"arrival": self.arrival[i : i + 1], "done": self.done[i : i + 1]}
        self.late[i] = self.case.submit(self.lane, layer, **words)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.late)))
        self.arrival[i] = 1
        self.running[i] = self.late.pop(i)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), by_stream=st.booleans())
    def consume(self, data: st.DataObject, by_stream: bool) -> None:
        i = data.draw(st.sampled_from(sorted(self.running)))
        ticket = self.running.pop(i)
        if by_stream:
            eventually(lambda: int(self.done[i]) == 1)
            self.done[i] = 0
        else:
            torch.testing.assert_close(ticket.wait(), self.want)
            self.consumed.append(ticket)
        assert (int(self.arrival[i]), int(self.done[i])) == (0, 0)
        assert not ticket.ready()

    @precondition(lambda self: self.running)
    @rule()
    def settle(self) -> None:
        for i, ticket in self.running.items():
            eventually(ticket.ready)
            assert (int(self.arrival[i]), int(self.done[i])) == (0, 1)

    @precondition(lambda self: self.consumed)
    @rule()
    def consume_again(self) -> None:
        with pytest.raises(RuntimeError, match="taken before"):
            self.consumed[-1].wait()

    @invariant()
    def words_are_as_the_model_says(self) -> None:
        for i in range(NUM_WORDS):
            arrival, done = int(self.arrival[i]), int(self.done[i])
            if i in self.running:  # taken or not, done or not
                assert arrival in (0, 1) and done in (0, 1)
            else:
                assert (arrival, done) == (0, 0)
            if i in self.late:
                assert not self.late[i].ready()


TestWords = Words.TestCase
TestWords.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True
)
