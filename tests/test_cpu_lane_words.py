"""The hand-off's words: 0 or 1, each reset by its consumer, whoever that is."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from swiftapex.backends.cpu_lane import CpuLane, LaneTicket
from swiftapex.backends.threads import ThreadPlan
from tests.lane_cases import ORDERS, eventually, make_case, word


@pytest.fixture(params=ORDERS)
def lane(request: pytest.FixtureRequest) -> Iterator[CpuLane]:
    lane = CpuLane(ThreadPlan(2, (), "test"), request.param)
    yield lane
    lane.close()


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


def test_late_data_are_overtaken(lane: CpuLane) -> None:
    late, case = word(), make_case([40])
    ticket = case.submit(lane, 9, arrival=late)
    for _ in range(3):
        make_case([40]).submit(lane, 0).wait()
    assert not ticket.ready()
    late.fill_(1)
    torch.testing.assert_close(ticket.wait(), case.expected())


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
