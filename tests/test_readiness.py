"""Agreement over shared memory, and the distance between the launching thread and the device."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftapex.pipelines.readiness import (
    Decisions,
    FollowerReadiness,
    LaunchAhead,
    LeaderReadiness,
    OwnReadiness,
)


class SometimesReady:
    """Ready or not at random: ranks must not ask their own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def ready(self) -> bool:
        return self._random.random() < 0.5

    def wait(self) -> Tensor:
        return torch.empty(0)


def follow(name: str, num_followers: int, follower: int, count: int, answers: object) -> None:
    memory = SharedMemory(name=name)
    readiness = FollowerReadiness(Decisions(memory.buf, num_followers), follower)
    ticket = SometimesReady(1000 + follower)
    answers.put((follower, [readiness.agreed(ticket) for _ in range(count)]))  # type: ignore[attr-defined]
    del readiness
    memory.close()


@pytest.mark.parametrize("num_followers", [1, 3])
def test_all_ranks_take_rank_0s_decisions(num_followers: int) -> None:
    """More questions than the ring has slots, in processes of their own."""
    count = Decisions.SLOTS * 2 + 17
    context = multiprocessing.get_context("spawn")
    size = 4 * Decisions.num_words(num_followers)
    memory = SharedMemory(create=True, size=size)
    try:
        memory.buf[:size] = bytes(size)
        answers = context.Queue()
        ranks = [
            context.Process(target=follow, args=(memory.name, num_followers, i, count, answers))
            for i in range(num_followers)
        ]
        for rank in ranks:
            rank.start()
        leader = LeaderReadiness(Decisions(memory.buf, num_followers))
        ticket = SometimesReady(0)
        decided = [leader.agreed(ticket) for _ in range(count)]
        got = dict(answers.get(timeout=30) for _ in ranks)
        for rank in ranks:
            rank.join(timeout=10)
        assert 0.4 < np.mean(decided) < 0.6
        assert all(got[i] == decided for i in range(num_followers))
        words = np.frombuffer(memory.buf, np.uint32, size // 4).copy()
        assert not words[: size // 8].any(), "every published word was reset by its consumer"
        assert set(words) <= {0, 1}
        del leader
    finally:
        memory.close()
        memory.unlink()


def test_rank_0_never_overtakes_a_slow_follower() -> None:
    memory = memoryview(bytearray(4 * Decisions.num_words(1)))
    decisions = Decisions(memory, 1)
    leader, follower = LeaderReadiness(decisions), FollowerReadiness(decisions, 0)
    ticket, decided = SometimesReady(0), []
    count = Decisions.SLOTS + 5

    def lead() -> None:
        decided.extend(leader.agreed(ticket) for _ in range(count))

    thread = threading.Thread(target=lead)
    thread.start()
    time.sleep(0.2)
    assert decisions.published.sum() == Decisions.SLOTS, "the ring is full, and rank 0 waits"
    assert [follower.agreed(SometimesReady(7)) for _ in range(count)] == [
        *decisions_in_order(thread, decided)
    ]


def decisions_in_order(thread: threading.Thread, decided: list[bool]) -> list[bool]:
    thread.join(timeout=10)
    return decided


def test_one_rank_asks_its_own_ticket() -> None:
    ticket, twin = SometimesReady(3), SometimesReady(3)
    readiness = OwnReadiness()
    assert [readiness.agreed(ticket) for _ in range(20)] == [twin.ready() for _ in range(20)]
    readiness.wait(ticket)


def test_the_launching_thread_stays_near_the_device() -> None:
    device, looks = Device(), 0

    def look() -> None:
        nonlocal looks
        looks += 1

    ahead = LaunchAhead(limit=2, progress=device, meanwhile=look)
    for _ in range(2):
        ahead.layer_launched()
    ahead.wait_until_near()
    assert looks == 1
    ahead.layer_launched()
    assert device.posted == [1, 2, 3]
    passed = threading.Event()

    def launch() -> None:
        ahead.wait_until_near()
        passed.set()

    thread = threading.Thread(target=launch)
    thread.start()
    assert not passed.wait(0.1), "three layers are launched and none is done"
    device.done = 1
    assert passed.wait(5)
    thread.join()
    assert looks > 2
    LaunchAhead().layer_launched()
    LaunchAhead().wait_until_near()  # a synchronous device is always near


class Device:
    def __init__(self) -> None:
        self.posted: list[int] = []
        self.done = 0

    def post(self, count: int) -> None:
        self.posted.append(count)

    def reached(self) -> int:
        return self.done
