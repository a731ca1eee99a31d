"""Runs of random workloads on a tiny model whose CPU side is late on purpose."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.engine.engine import Engine
from tests.lanes import LateCopies, LateLane

MAX_MODEL_LEN = 96
Workload = list[tuple[int, list[int], int]]  # (iteration of arrival, prompt, output tokens)


@dataclass(frozen=True)
class Pools:
    """KV blocks of each side, and the limits of a batch."""

    gpu: int
    cpu: int
    block_size: int = 4
    rows: int = 8
    chunk: int = 24


def random_pools(rng: random.Random) -> Pools:
    """Small enough to force moves and preemption, large enough for the longest request on a side."""
    size = rng.choice((4, 8, 16))
    most = -(-MAX_MODEL_LEN // size)
    gpu, cpu = rng.choice(((most, 3 * most), (2 * most, 2 * most), (3, 3 * most), (2 * most, 4)))
    return Pools(max(gpu, 2), cpu, size, rng.randint(2, 9), rng.randint(3, 40))


def random_workload(rng: random.Random, pools: Pools, vocab: int = 200) -> Workload:
    longest = min(MAX_MODEL_LEN, max(pools.gpu - 2, 1) * pools.block_size)
    items = []
    for _ in range(rng.randint(3, 8)):
        prompt_len = rng.randint(1, max(1, longest // 2))
        output_len = rng.randint(1, max(1, longest - prompt_len))
        prompt = [rng.randrange(3, vocab) for _ in range(prompt_len)]
        items.append((rng.randint(0, 25), prompt, min(output_len, 24)))
    return sorted(items, key=lambda item: item[0])


class Oracle:
    """Tokens of each request alone, unchunked, GPU-only, on the reference backend."""

    def __init__(self, model: ModelSection) -> None:
        config = EngineConfig(
            device="reference", gpu=GpuConfig(kv_tokens=256), max_model_len=MAX_MODEL_LEN
        )
        self._engine = Engine(model, config)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: Sequence[int], n: int) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < n:
            sampling = SamplingParams(max_tokens=n, ignore_eos=True)
            request = self._engine.request(self._engine.add_request(prompt, sampling))
            while self._engine.has_work:
                self._engine.step()
            known = self._known[tuple(prompt)] = request.output_ids
        return known[:n]


def late_engine(
    model: ModelSection, pools: Pools, policy: str, args: Mapping[str, Any], seed: int
) -> Engine:
    """An engine on the reference backend with late lanes."""
    config = EngineConfig(
        device="reference",
        gpu=GpuConfig(kv_tokens=pools.gpu * pools.block_size),
        cpu=CpuConfig(kv_tokens=pools.cpu * pools.block_size),
        block_size=pools.block_size,
        max_model_len=MAX_MODEL_LEN,
        max_batch_size=pools.rows,
        max_tokens_in_batch=max(pools.chunk, pools.rows),
    )
    engine = Engine(model, config, policy=policy, policy_args=args)
    worker = engine._executor._worker
    if worker._backends.cpu_attention is not None:
        lane, copies = LateLane(seed), LateCopies(seed)
        worker._attention._cpu = lane
        worker._backends = replace(worker._backends, cpu_attention=lane, copies=copies)
    return engine


def run_and_compare(
    engine: Engine, oracle: Oracle, workload: Workload, rng: random.Random, aborts: bool = True
) -> None:
    """Runs the workload to its end, with random aborts; every token must be the oracle's."""
    pending, open_requests, all_requests = list(workload), {}, []
    for iteration in range(5000):
        while pending and pending[0][0] <= iteration:
            _, prompt, n = pending.pop(0)
            sampling = SamplingParams(max_tokens=n, ignore_eos=True)
            request_id = engine.add_request(prompt, sampling)
            open_requests[request_id] = engine.request(request_id)
            all_requests.append((engine.request(request_id), n))
        if aborts and open_requests and rng.random() < 0.02:
            engine.abort(rng.choice(list(open_requests)))
        if not pending and not engine.has_work and not engine.in_flight:
            break
        engine.step()
        engine._state.check_integrity()
        open_requests = {i: r for i, r in open_requests.items() if r.finish_reason is None}
    assert not engine.has_work and not pending, "the workload does not end"
    for request, n in all_requests:
        expected = oracle.tokens(request.prompt_ids, n)
        got = request.output_ids
        assert got == expected[: len(got)], (request.request_id, got, expected)
        assert len(got) == n or request.finish_reason.value == "abort"
    stats = engine.stats()
    assert stats.gpu_blocks_free == stats.gpu_blocks_total
    assert stats.cpu_blocks_free == stats.cpu_blocks_total
