"""Engines on a GPU: the tokens of every pipeline, and what a closed engine leaves."""

from __future__ import annotations

import gc
import random
import threading
from unittest import mock

import pytest
import torch

import swiftapex.backends.cuda_graphs as cuda_graphs
from swiftapex import LLM, SamplingParams
from swiftapex.backends.cuda_lane import CudaCpuLane
from swiftapex.core.errors import ConfigError
from swiftapex.core.request import Request
from swiftapex.engine.engine import Engine
from tests.cuda import gpu as _skips_without_one  # noqa: F401
from tests.hybrid import STRATEGIES, Tally, run_schedule, strategy
from tests.lane_cases import long_case
from tests.replays import noted_replays

pytestmark = pytest.mark.gpu
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # of `engine`: layers, K and V, heads, head_dim, float32


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("model", ["mha", "gqa-3", "gqa-8"])
def test_tokens_equal_the_oracles(model: str, name: str) -> None:
    tally = Tally()
    for seed in range(3):
        policy, args = strategy(name, seed)
        run_schedule(model, policy, args, seed, tally, late=False, device="cuda")
    assert tally.tokens > 100 and tally.cpu_tokens > 0 and not tally.forgiven


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_half_precision_stays_within_the_margin(name: str, dtype: str) -> None:
    tally = Tally()
    for seed in range(3):
        policy, args = strategy(name, seed)
        run_schedule("gqa-8", policy, args, seed, tally, late=False, device="cuda", dtype=dtype)
    assert tally.tokens > 100


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["neo", "async_overlap", "random"])
def test_kv_that_cannot_be_pinned_gives_the_same_tokens(name: str) -> None:
    tally = Tally()
    with mock.patch("swiftapex.backends.cuda._register", lambda piece: 2):
        for seed in range(3):
            policy, args = strategy(name, seed)
            run_schedule("gqa-3", policy, args, seed, tally, late=False, device="cuda")
    assert tally.cpu_tokens > 0 and not tally.forgiven


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["sequential", "asymmetric", "symmetric", "neo"])
@pytest.mark.parametrize("late", [False, True])
def test_recorded_passes_give_the_oracles_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, late: bool
) -> None:
    """Passes with CPU decodes, replayed from the second one of their kind on; `late`: other work
    keeps the CPU's threads, now before the pass and now in the midst of it."""
    rng, other = random.Random(name), long_case(8)

    def keep_busy(lane: CudaCpuLane) -> None:
        if late and rng.random() < 0.5:
            other.submit(lane._lane)

    monkeypatch.setattr(cuda_graphs, "HYBRID_SEEN_BEFORE", 1)
    tally = Tally()
    with noted_replays(CudaCpuLane, keep_busy) as replays:
        for seed in range(3):
            policy, args = strategy(name, seed)
            run_schedule("gqa-3", policy, args, seed, tally, late=False, device="cuda")
    assert tally.cpu_tokens > 0 and not tally.forgiven
    assert len(replays) > 5


def test_recorded_passes_on_a_part_of_the_gpu_give_the_same_tokens() -> None:
    """Many of the same kind, launched ahead."""
    params, outputs, num_replayed = SamplingParams(max_tokens=60, ignore_eos=True), [], []
    for seen_before in (1, 2**31):
        with (
            mock.patch.object(cuda_graphs, "HYBRID_SEEN_BEFORE", seen_before),
            noted_replays(CudaCpuLane) as replays,
        ):
            llm = engine(policy="fixed:asymmetric", gpu={"kv_tokens": 256, "sm_count": 8})
            outs = llm.generate([[5 + i] * 20 for i in range(16)], params)
            outputs.append([out.token_ids for out in outs])
            num_replayed.append(len(replays))
            llm.close()
    assert outputs[0] == outputs[1]
    assert num_replayed[0] > 20 and num_replayed[1] == 0


@pytest.fixture
def no_iteration_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in which the launching thread waits for all that was launched is an error."""
    iterate = Engine._iterate

    def checked(self: Engine) -> list[Request]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return iterate(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Engine, "_iterate", checked)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.usefixtures("no_iteration_waits")
def test_launching_waits_for_nothing(name: str) -> None:
    """Admissions, chunks, moves, preemptions and cohorts that lose an aborted request included."""
    tally = Tally()
    for seed in range(6):
        policy, args = strategy(name, seed)
        run_schedule("gqa-3", policy, args, seed, tally, late=False, device="cuda")
    assert tally.tokens > 100


@pytest.mark.usefixtures("no_iteration_waits")
def test_sampling_waits_for_nothing() -> None:
    llm = engine()
    params = [SamplingParams(max_tokens=9, temperature=0.8, top_k=k, top_p=0.9) for k in (0, 5)]
    outs = llm.generate([[5 + i] * 20 for i in range(12)], params * 6)
    assert all(out.token_ids for out in outs)
    llm.close()


def engine(**overrides: object) -> LLM:
    settings = {"gpu": {"kv_tokens": 256}, "cpu": {"kv_tokens": 1024}, "policy": "neo"}
    return LLM(
        {"architecture": "tiny", "weights": "dummy"},
        device="cuda",
        dtype="float32",
        max_model_len=128,
        **settings | overrides,
    )


def test_engines_leave_no_memory_and_no_thread() -> None:
    prompts = [[5 + i] * 20 for i in range(12)]
    left = []
    for _ in range(3):
        llm = engine()
        llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        llm.close()
        del llm
        gc.collect()
        left.append((torch.cuda.memory_allocated(), threading.active_count()))
    assert left[1] == left[2]


def test_a_part_of_the_gpu_gives_the_same_tokens() -> None:
    prompts = [[5 + i] * 20 for i in range(8)]
    outputs = []
    for sms in (None, 8):
        llm = engine(gpu={"kv_tokens": 256, "sm_count": sms})
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        outputs.append([o.token_ids for o in llm.generate(prompts, params)])
        llm.close()
    assert outputs[0] == outputs[1]


def test_kv_of_unsaid_size_leaves_room_for_the_largest_pass() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    cap = 1 << 30
    llm = engine(policy="gpu_only", gpu={"memory": cap, "memory_share": 0.5})
    kv_bytes = llm.stats().gpu_blocks_total * 32 * KV_BYTES_PER_TOKEN
    assert cap // 4 < kv_bytes < cap // 2
    torch.cuda.reset_peak_memory_stats()
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, top_p=0.9)
    outs = llm.generate([[5 + i % 90] * 100 for i in range(400)], params)
    assert all(len(out.token_ids) == 20 for out in outs)
    assert torch.cuda.max_memory_reserved() < 0.6 * cap
    llm.close()
    with pytest.raises(ConfigError, match="memory does not suffice"):
        engine(gpu={"memory": cap, "kv_memory": 2 * cap})
    engine(gpu={"kv_memory": 2 * cap}).close()  # the cap was the other engine's


def test_blocks_that_the_cpu_side_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        engine(block_size=8)
