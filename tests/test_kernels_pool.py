"""The native thread pool and the run-time choice of the instruction set."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swiftapex import _kernels_cpu as kernels


@pytest.fixture
def words() -> torch.Tensor:
    """100 MB of 64-bit words and an odd rest: several milliseconds to read."""
    return torch.arange(12_500_037, dtype=torch.int64)


def native_threads() -> int:
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("swiftapex-") for name in names if name.exists())


def busy_s() -> float:
    """CPU seconds of all threads of this process."""
    times = os.times()
    return times.user + times.system


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert native_threads() == 0


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("caller_works", [True, False])
def test_every_part_runs_once(words: torch.Tensor, num_threads: int, caller_works: bool) -> None:
    pool = kernels.ThreadPool(num_threads, caller_works=caller_works)
    assert native_threads() == num_threads - caller_works
    total = words.numel() * (words.numel() - 1) // 2
    assert kernels.read_stream(pool, words.data_ptr(), words.nbytes) == total
    for count in (0, 1, 63, 64, 65, 1000):
        for _ in range(20):
            expected = count * (count - 1) // 2
            assert kernels.read_stream(pool, words.data_ptr(), 8 * count) == expected
    pool.close()


def test_two_pools_live_at_once(words: torch.Tensor) -> None:
    pools = [kernels.ThreadPool(2), kernels.ThreadPool(3)]
    sums = [kernels.read_stream(pool, words.data_ptr(), 8000) for pool in pools * 10]
    assert set(sums) == {1000 * 999 // 2}
    for pool in pools:
        pool.close()


def test_calls_from_several_python_threads_take_turns(words: torch.Tensor) -> None:
    pool = kernels.ThreadPool(2)
    sums: list[int] = []

    def call() -> None:
        for _ in range(100):
            sums.append(kernels.read_stream(pool, words.data_ptr(), 80_000))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sums == [10_000 * 9_999 // 2] * 400
    pool.close()


def test_a_long_call_lets_other_python_threads_run(words: torch.Tensor) -> None:
    pool = kernels.ThreadPool(1)
    ticks, running = 0, threading.Event()

    def call() -> None:
        running.set()
        for _ in range(20):
            kernels.read_stream(pool, words.data_ptr(), words.nbytes)

    caller = threading.Thread(target=call)
    caller.start()
    running.wait()
    while caller.is_alive():
        ticks += 1
        time.sleep(0.0005)
    # Holding the GIL through a call would leave about one turn between two calls.
    assert ticks > 30
    pool.close()


def test_idle_threads_sleep() -> None:
    pool = kernels.ThreadPool(4)
    kernels.read_stream(pool, torch.zeros(1000).data_ptr(), 4000)
    time.sleep(0.05)
    before = busy_s()
    time.sleep(0.5)
    assert busy_s() - before < 0.1
    pool.close()


def test_close_twice_and_use_after() -> None:
    pool = kernels.ThreadPool(3)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        kernels.read_stream(pool, torch.zeros(1).data_ptr(), 4)


def test_threads_end_with_the_pool() -> None:
    pool = kernels.ThreadPool(3)
    assert native_threads() == 2
    del pool


def test_threads_start_where_binding_is_refused() -> None:
    pool = kernels.ThreadPool(3, cpus=[0, 100_000, -1])
    assert pool.num_pinned == 0
    assert kernels.read_stream(pool, torch.ones(8, dtype=torch.int64).data_ptr(), 64) == 8
    pool.close()


def test_threads_are_pinned_and_the_caller_is_not() -> None:
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    pool = kernels.ThreadPool(2, cpus=[cpu, cpu])
    assert pool.num_pinned == 1
    assert os.sched_getaffinity(0) == allowed
    pool.close()


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one"):
        kernels.ThreadPool(0)


def test_the_cap_chooses_among_the_available() -> None:
    names = kernels.available_isas()
    assert names[0] == "scalar"
    assert kernels.isa() == names[-1]
    for name in names:
        kernels.set_isa_cap(name)
        assert kernels.isa() == name
    kernels.set_isa_cap("")
    assert kernels.isa() == names[-1]
    with pytest.raises(ValueError, match=r"'mmx' is not available.*scalar"):
        kernels.set_isa_cap("mmx")
