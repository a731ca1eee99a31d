"""Requests that begin in progress, so that a short window measures the steady state."""

from __future__ import annotations

import pytest

from swiftapex import SamplingParams
from swiftapex.config.schema import WorkloadConfig
from swiftapex.core.errors import ConfigError, RequestError
from swiftapex.core.request import Placement
from swiftapex.report.metrics import summarize
from swiftapex.workloads.build import build_workload
from swiftapex.workloads.replay import replay
from tests.hybrid import Pools, small_engine

POOLS = Pools(gpu=6, cpu=20, block_size=8, rows=8, chunk=24)


@pytest.mark.parametrize("policy", ["gpu_only", "neo", "fixed:async_overlap"])
def test_a_warm_run_ends_and_counts_only_its_own_tokens(policy: str) -> None:
    engine = small_engine("gqa-3", POOLS, policy, {}, late=3)
    workload = WorkloadConfig(
        kind="synthetic", num_requests=16, input_len=9, output_len=12, warm_start=True
    )
    log = replay(engine, build_workload(workload, seed=1, vocab_size=120), workload)
    assert all(o.completed and len(o.output_ids) == 12 for o in log.outcomes)
    begun = [o for o in log.outcomes if o.progress]
    assert 0 < len(begun) < 16
    assert all(o.progress + len(o.token_times_s) == 12 for o in begun)
    summary = summarize(log)
    assert summary["output_tokens"] == sum(12 - o.progress for o in log.outcomes)
    fresh = [o for o in log.outcomes if not o.progress]
    first = sorted(1e3 * (o.token_times_s[0] - o.arrival_s) for o in fresh)
    assert summary["ttft_ms"]["p50"] == pytest.approx(
        (first[(len(first) - 1) // 2] + first[len(first) // 2]) / 2
    )
    stats = engine.stats()
    assert stats.gpu_blocks_free == stats.gpu_blocks_total
    assert stats.cpu_blocks_free == stats.cpu_blocks_total
    engine.close()


def test_the_gpu_fills_first_and_what_does_not_fit_is_refused() -> None:
    engine = small_engine("gqa-3", POOLS, "neo", {}, late=None)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    placements = []
    with pytest.raises(RequestError, match="no KV blocks"):
        for _ in range(20):
            placements.append(engine.add_in_progress([5] * 9, sampling, 4).placement)
    on_gpu = placements.count(Placement.GPU)
    assert placements == [Placement.GPU] * on_gpu + [Placement.CPU] * (len(placements) - on_gpu)
    assert 0 < on_gpu < len(placements) < 20
    while engine.has_work:
        engine.step()
    engine.close()


@pytest.mark.parametrize("policy", ["gpu_only", "apex"])
def test_truncated_requests_begin_within_the_models_length(policy: str) -> None:
    engine = small_engine("gqa-3", POOLS, policy, {}, late=None)
    output_len = engine.max_model_len + 60
    workload = WorkloadConfig(
        kind="synthetic", num_requests=8, input_len=9, output_len=output_len,
        over_length="truncate", warm_start=True,
    )  # fmt: skip
    engine.max_model_len = 40  # shorter than what the pools hold
    log = replay(engine, build_workload(workload, seed=1, vocab_size=120), workload)
    assert any(o.progress for o in log.outcomes)
    for outcome in log.outcomes:
        assert outcome.finish_reason == "length" and outcome.truncated
        assert (outcome.prompt_len, outcome.max_tokens, outcome.num_output) == (1, 39, 39)
    engine.close()


def test_progress_that_leaves_nothing_to_generate_is_refused() -> None:
    engine = small_engine("gqa-3", POOLS, "gpu_only", {}, late=None)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    for wrong in (12, 200, -1):
        with pytest.raises(RequestError, match=f"1 to max_tokens - 1 tokens, got {wrong} with max"):
            engine.add_in_progress([5] * 9, sampling, wrong)
    limit = engine.max_model_len
    with pytest.raises(RequestError, match=f"9 prompt tokens and {limit} output tokens .* {limit}"):
        engine.add_in_progress([5] * 9, SamplingParams(max_tokens=limit), 3)
    assert not engine.has_work
    assert engine.add_in_progress([5] * 9, sampling, 11).num_generated == 11
    engine.step()
    assert not engine.has_work
    engine.close()


def test_an_engine_goes_on_under_another_policy() -> None:
    warm = WorkloadConfig(
        kind="synthetic", num_requests=16, input_len=9, output_len=12, warm_start=True,
        window={"warmup_s": 0.0, "measure_s": 0.02},
    )  # fmt: skip
    engine = small_engine("gqa-3", POOLS, "fixed:async_overlap", {}, late=3)
    cut = replay(engine, build_workload(warm, seed=1, vocab_size=120), warm)
    assert any(o.finish_reason == "unfinished" for o in cut.outcomes)
    engine.reuse("neo")
    stats = engine.stats()
    assert stats.gpu_blocks_free == stats.gpu_blocks_total
    assert stats.cpu_blocks_free == stats.cpu_blocks_total and stats.parked == 0
    assert engine._queue.prompt_share() == 0.0  # of no request that ended before

    whole = warm.model_copy(update={"window": None, "warm_start": False})
    items = build_workload(whole, seed=2, vocab_size=120)
    log = replay(engine, items, whole)
    assert {r.pipeline for r in log.iterations} <= {"asymmetric", "sequential"}
    assert min(r.index for r in log.iterations) > max(r.index for r in cut.iterations)
    with pytest.raises(ConfigError, match="another KV cache"):
        engine.reuse("gpu_only")
    engine.close()

    fresh = small_engine("gqa-3", POOLS, "neo", {}, late=None)
    expected = [o.output_ids for o in replay(fresh, items, whole).outcomes]
    fresh.close()
    assert [o.output_ids for o in log.outcomes] == expected


def test_a_policy_without_the_cpu_never_gets_what_only_the_cpu_can_hold() -> None:
    """It would leave those requests waiting for ever, and end the engine with them."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    long = SamplingParams(max_tokens=24, ignore_eos=True)  # 4 blocks; of the GPU's, 3 are its own
    pools = Pools(gpu=4, cpu=20, block_size=8, rows=8, chunk=24)
    engine = small_engine("gqa-3", pools, "fastdecode", {}, late=3)
    requests = [engine.add([5] * 9, sampling)]
    engine.step()
    requests.append(engine.add([5] * 9, long))
    for open_ones in (r"2 of 2 open", r"1 of 1 open"):
        with pytest.raises(ConfigError, match=f"'gpu_only' leaves the CPU out, where {open_ones}"):
            engine.use_policy("gpu_only")
        engine.abort(requests.pop(0).request_id)
    engine.use_policy("gpu_only")
    with pytest.raises(RequestError, match="need 4 KV blocks of 8 tokens, 3 exist"):
        engine.add([5] * 9, long)
    alone = engine.add([5] * 9, sampling)
    engine.use_policy("neo")
    engine.add([5] * 9, long)
    while engine.has_work:
        engine.step()
    assert len(alone.output_ids) == 12
    with pytest.raises(ConfigError, match="another KV cache"):
        engine.reuse("gpu_only")
    engine.close()


def test_a_cpu_side_of_no_blocks_is_one() -> None:
    engine = small_engine("gqa-3", Pools(6, 0, 8, 8, 24), "neo", {}, late=None)
    engine.reuse("apex")
    request = engine.add([5] * 9, SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(request.output_ids) == 4
    engine.close()


def test_unwritten_kv_gets_memory_of_its_own_and_keeps_what_it_holds() -> None:
    engine = small_engine("gqa-3", POOLS, "neo", {}, late=None)
    store = engine._executor._worker._store
    kv = store.layer(Placement.CPU, 0)
    kv[1, 0, 0, 0, :4] = 1.5
    before = kv.clone()
    engine._executor.touch_kv()
    assert (kv == before).all() and float(kv.sum()) == 6.0
    engine.close()
