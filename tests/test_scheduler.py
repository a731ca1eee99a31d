"""The control plane without a model: any arrivals, lengths, aborts and pool sizes."""

from __future__ import annotations

import pytest
from harness import Harness
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftapex.core.errors import RequestError
from swiftapex.core.request import SIDES, Placement, Request, RequestState, SamplingParams
from swiftapex.engine.admission import fit_sampling
from swiftapex.kv.block_manager import BlockManager
from swiftapex.scheduler.index import RequestIndex


class BlockManagerMachine(RuleBasedStateMachine):
    """Against a model that only counts: blocks never leak and are never owned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager({Placement.GPU: 7, Placement.CPU: 4}, block_size=4)
        self.tokens: dict[int, tuple[Placement, int]] = {}
        self.next_id = 0

    def used(self, side: Placement) -> int:
        return sum(-(-n // 4) for where, n in self.tokens.values() if where is side)

    @rule(side=st.sampled_from(SIDES), num_tokens=st.integers(0, 40))
    def allocate(self, side: Placement, num_tokens: int) -> None:
        request_id, self.next_id = self.next_id, self.next_id + 1
        fits = self.used(side) + -(-num_tokens // 4) <= self.blocks.num_total(side)
        assert self.blocks.can_allocate(side, num_tokens) == fits
        if fits:
            gained = self.blocks.allocate(request_id, side, num_tokens)
            assert gained == self.blocks.owned(request_id)
            self.tokens[request_id] = (side, num_tokens)
        else:
            with pytest.raises(ValueError, match="blocks"):
                self.blocks.allocate(request_id, side, num_tokens)
            assert self.blocks.owned(request_id) == ()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 12))
    def append(self, data: st.DataObject, more: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        side, num_tokens = self.tokens[request_id]
        before = self.blocks.owned(request_id)
        need = -(-(num_tokens + more) // 4) - len(before)
        fits = need <= self.blocks.num_free(side)
        assert self.blocks.can_append(request_id, num_tokens + more) == fits
        if fits:
            gained = self.blocks.append(request_id, num_tokens + more)
            assert self.blocks.owned(request_id) == before + gained
            self.tokens[request_id] = (side, num_tokens + more)
        else:
            with pytest.raises(ValueError, match="no free block"):
                self.blocks.append(request_id, num_tokens + more)
            assert self.blocks.owned(request_id) == before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), where=st.sampled_from(SIDES))
    def move(self, data: st.DataObject, where: Placement) -> None:
        target = where
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        side, num_tokens = self.tokens[request_id]
        before = self.blocks.owned(request_id)
        if side is target or not self.blocks.can_move(request_id, target):
            with pytest.raises(ValueError):
                self.blocks.begin_move(request_id, target)
            return
        free = self.blocks.num_free(side)
        assert len(self.blocks.begin_move(request_id, target)) == len(before)
        assert self.blocks.num_free(side) == free, "the copy still reads the old blocks"
        self.blocks.check_integrity()
        self.blocks.finish_move(request_id)
        self.tokens[request_id] = (target, num_tokens)

    @rule(request_id=st.integers(0, 30))
    def free(self, request_id: int) -> None:
        self.blocks.free(request_id)
        self.tokens.pop(request_id, None)

    @invariant()
    def counts_agree(self) -> None:
        self.blocks.check_integrity()
        for side in SIDES:
            free = self.blocks.num_total(side) - self.used(side)
            assert self.blocks.num_free(side) == free


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_integrity_check_notices_a_leak_and_a_double_owner() -> None:
    blocks = BlockManager({Placement.GPU: 3}, 4)
    blocks.allocate(0, Placement.GPU, 4)
    blocks._free[Placement.GPU].pop()
    with pytest.raises(AssertionError):
        blocks.check_integrity()
    blocks = BlockManager({Placement.GPU: 3}, 4)
    blocks.allocate(0, Placement.GPU, 4)
    blocks._free[Placement.GPU].append(blocks.owned(0)[0])
    with pytest.raises(AssertionError):
        blocks.check_integrity()


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, lengths and aborts on small pools; at the end everything drains."""

    def __init__(self) -> None:
        super().__init__()
        self.harness: Harness | None = None

    @precondition(lambda self: self.harness is None)
    @rule(
        gpu_blocks=st.integers(0, 12),
        block_size=st.sampled_from((1, 3, 4)),
        rows=st.integers(1, 6),
        tokens=st.integers(1, 20),
    )
    def build(self, gpu_blocks: int, block_size: int, rows: int, tokens: int) -> None:
        self.harness = Harness(gpu_blocks, block_size, rows, tokens)

    @precondition(lambda self: self.harness is not None)
    @rule(prompt_len=st.integers(1, 40), max_tokens=st.integers(1, 20))
    def add(self, prompt_len: int, max_tokens: int) -> None:
        self.harness.add(prompt_len, max_tokens)

    @precondition(lambda self: self.harness is not None)
    @rule(request_id=st.integers(0, 30))
    def abort(self, request_id: int) -> None:
        self.harness.abort(request_id)

    @precondition(lambda self: self.harness is not None)
    @rule()
    def step(self) -> None:
        self.harness.step()

    def teardown(self) -> None:
        if self.harness is None:
            return
        self.harness.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(max_examples=600, deadline=None)
def test_every_request_ends_whatever_the_pool(seed: int) -> None:
    import random

    rng = random.Random(seed)
    harness = Harness(
        rng.randint(0, 40), rng.choice((1, 4, 16)), rng.randint(1, 9), rng.randint(1, 64)
    )
    arrivals = [(rng.randint(1, 60), rng.randint(1, 30)) for _ in range(rng.randint(1, 12))]
    while arrivals:
        if rng.random() < 0.3:
            harness.add(*arrivals.pop())
        if rng.random() < 0.02 and harness.live:
            harness.abort(rng.choice(list(harness.live)))
        harness.step()
    harness.drain()


def test_preempted_request_keeps_its_output_and_its_place() -> None:
    harness = Harness(gpu_blocks=4, block_size=4, rows=8, tokens=64)
    harness.add(4, 9)
    harness.add(4, 9)
    first, second = harness.live[0], harness.live[1]
    while second.state is not RequestState.RUNNING or not second.output_ids:
        harness.step()
    while not harness.state.num_preemptions:
        harness.step()
    assert second.state is RequestState.WAITING and first.state is RequestState.RUNNING
    kept = len(second.output_ids)
    assert kept > 0 and second.num_computed == 0
    while harness.live:
        harness.step()
    assert len(first.output_ids) == len(second.output_ids) == 9


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    state = Harness(gpu_blocks=4, block_size=4, rows=8, tokens=64).state
    with pytest.raises(RequestError, match=r"need 5 KV blocks of 4 tokens, 4 exist"):
        fit_sampling(SamplingParams(max_tokens=8), 10, 10_000, state)
    assert fit_sampling(SamplingParams(max_tokens=7), 10, 10_000, state).max_tokens == 7


def test_max_tokens_is_cut_to_the_models_length() -> None:
    state = Harness(gpu_blocks=100, block_size=4, rows=8, tokens=64).state
    assert fit_sampling(SamplingParams(max_tokens=50), 10, 32, state).max_tokens == 22
    with pytest.raises(RequestError, match="at most 31"):
        fit_sampling(SamplingParams(max_tokens=1), 32, 32, state)


def test_cpu_decodes_served_in_two_turns_before_a_question_come_in_the_order_of_turns() -> None:
    index = RequestIndex()
    requests = [Request(i, (1, 2), SamplingParams(), 0.0) for i in range(5)]
    for request in requests:
        request.placement, request.num_computed, request.output_ids = Placement.CPU, 2, [7]
        index.touch(request)
    assert list(index.cpu_decodes) == [0, 1, 2, 3, 4]
    for turn, served in enumerate(([4, 2], [3, 0]), start=1):
        for request_id in served:
            requests[request_id].last_served = turn
            requests[request_id].num_computed += 1
            requests[request_id].output_ids.append(7)
        index.serve(served)
    assert list(index.cpu_decodes) == [1, 2, 4, 0, 3]
    assert index.cpu_tokens == sum(request.num_tokens for request in requests)


def test_a_cpu_decode_that_leaves_before_anyone_has_asked_counts_as_others_do() -> None:
    """Policies may go through the queue alone, and ask for nothing else."""
    index = RequestIndex()
    request = Request(0, (1, 2), SamplingParams(), 0.0, placement=Placement.CPU)
    request.num_computed, request.output_ids = 2, [7]
    index.touch(request)
    request.in_flight = True
    index.park([request])
    assert index.counts() == (0, 0, 1) and index.cpu_tokens == 3
    request.in_flight = False
    index.serve([0])
    request.num_computed, request.output_ids = 3, [7, 7]
    assert index.counts() == (0, 1, 0) and index.cpu_tokens == 4
    index.check_integrity([request])
