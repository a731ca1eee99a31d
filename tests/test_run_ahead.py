"""An engine that launches an iteration before it knows the tokens of the one before."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from typing import Any

import pytest

from swiftapex import SamplingParams
from swiftapex.config.schema import WorkloadConfig
from swiftapex.core.request import FinishReason
from swiftapex.engine.engine import Engine
from swiftapex.workloads.build import build_workload
from swiftapex.workloads.replay import replay
from tests.hybrid import (
    STRATEGIES,
    Pools,
    Tally,
    random_pools,
    random_workload,
    run_and_compare,
    small_engine,
    strategy,
)

pytestmark = pytest.mark.timeout(300)
ROOMY = Pools(gpu=6, cpu=64, block_size=8, rows=8, chunk=24)


def ahead(engine: Engine) -> Engine:
    """The engine, on a device that answers late."""
    engine._executor.runs_ahead = True
    return engine


@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_equal_the_oracles(name: str) -> None:
    tally = Tally()
    for seed in range(4):
        rng = random.Random(seed)
        pools, workload = random_pools(rng), random_workload(rng)
        engine = ahead(small_engine("gqa-3", pools, *strategy(name, seed), late=seed))
        run_and_compare(engine, "gqa-3", workload, rng, tally)
        engine.close()
    assert tally.cpu_tokens > 0 and not tally.forgiven


@pytest.mark.parametrize("name", STRATEGIES)
def test_stop_tokens_end_requests_that_have_been_launched_again(name: str) -> None:
    """What such a request computed in vain is given to nobody, and its blocks come back."""
    outputs = []
    for make in (lambda engine: engine, ahead):
        engine = make(small_engine("gqa-3", ROOMY, *strategy(name, 5), late=5))
        stops = tuple(range(3, 9))
        requests = [
            engine.add([5, 6, 7 + i], SamplingParams(max_tokens=3 + i, stop_token_ids=stops))
            for i in range(12)
        ]
        while engine.has_work:
            engine.step()
            engine._state.check_integrity()
        outputs.append([(r.output_ids, r.finish_reason) for r in requests])
        assert all(len(r.token_times_s) == len(r.output_ids) for r in requests)
        stats = engine.stats()
        assert stats.gpu_blocks_free == stats.gpu_blocks_total
        assert stats.cpu_blocks_free == stats.cpu_blocks_total
        engine.close()
    assert outputs[0] == outputs[1]
    assert {reason for _, reason in outputs[0]} == {FinishReason.STOP, FinishReason.LENGTH}


def test_step_returns_every_token_once() -> None:
    engine = ahead(small_engine("mha", ROOMY, "gpu_only", {}, late=None))
    request = engine.add([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    seen = [len(request.output_ids) for _ in range(20) if engine.has_work and engine.step()]
    assert seen == [1, 2, 3, 4, 5, 6] and request.finish_reason is FinishReason.LENGTH
    assert len(engine.iterations) == 6
    ends = [record.start_s + record.duration_us * 1e-6 for record in engine.iterations]
    assert ends == sorted(ends)
    engine.close()


def test_an_iteration_lasts_until_its_tokens_were_there_not_until_they_were_fetched() -> None:
    """Launching the next one may take longer, where it waits for the device to come near."""
    engine = ahead(small_engine("mha", ROOMY, "gpu_only", {}, late=None))
    executor: Any = engine._executor
    execute, there_s = executor.execute, []

    def slow(plan: Any) -> Any:
        if executor.launched:
            there_s.append(time.perf_counter())  # of the iteration before
        result = execute(plan)
        time.sleep(0.02)
        number, executor.launched = executor.launched, executor.launched + 1

        def fetch() -> Any:
            if number == len(there_s):  # the last one: nothing is launched behind it
                there_s.append(time.perf_counter())
            return dataclasses.replace(result.fetch(), done_s=there_s[number])

        return dataclasses.replace(result, fetch=fetch)

    executor.execute, executor.launched = slow, 0
    engine.add([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.has_work:
        engine.step()
    starts = [record.start_s for record in engine.iterations]
    ends = [r.start_s + 1e-6 * r.duration_us for r in engine.iterations]
    close = functools.partial(pytest.approx, rel=0, abs=1e-4)  # the clock's zero is the boot
    assert len(ends) == 5 and ends == close(there_s)
    assert starts[1:] == close(there_s[:-1]), "each begins where the one before ended"
    engine.close()


def test_a_request_that_is_aborted_between_launch_and_token() -> None:
    engine = ahead(small_engine("mha", ROOMY, "gpu_only", {}, late=None))
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    first, second = engine.add([5, 6, 7], sampling), engine.add([5, 6], sampling)
    engine.step()
    engine.step()
    engine.abort(first.request_id)
    assert first.finish_reason is FinishReason.ABORT and len(first.output_ids) == 2
    while engine.has_work:
        engine.step()
    assert len(second.output_ids) == 6 and len(first.output_ids) == 2
    assert engine.stats().gpu_blocks_free == engine.stats().gpu_blocks_total
    engine.close()


def test_a_replay_gets_every_token() -> None:
    engine = ahead(small_engine("gqa-3", ROOMY, "neo", {}, late=3))
    workload = WorkloadConfig(kind="synthetic", num_requests=10, input_len=9, output_len=7)
    items = build_workload(workload, seed=1, vocab_size=120)
    seen = []
    log = replay(engine, items, workload, report=seen.append)
    assert all(len(o.output_ids) == 7 and o.completed for o in log.outcomes)
    assert seen[-1].ended == 10 and seen[-1].output_tokens == 70
    assert sum(record.completed_tokens for record in log.iterations) == 70
    engine.close()
