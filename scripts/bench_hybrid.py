"""Output tokens per second of several strategies on one GPU, or a part of it, in one run.

    python scripts/bench_hybrid.py --model llama2-7b --sms 8 --gpu-kv 4096 --cpu-gib 40 \
        --lengths 400x200 400x50 --strategies gpu_only fixed:asymmetric fixed:async_overlap

Dummy weights, lengths within 10 % of the given means, ignored end-of-sequence tokens. Strategies
that use the CPU share an engine, GPU-only has one without CPU KV and staging area. Kinds of
measurement:

- `--kinds window` (default): requests begin at evenly spread progress with their KV in place, new
  ones wait behind them, and a window is measured after a warm-up. It is `valid` if prefilled tokens
  over the input length and output tokens over the output length, requests per window both, agree
  within 5 %; it goes on until they do, for at most `--stretch` times as long. With `--at-once`, a
  new request comes when one has ended, so that there are never more. Lengths `400x200@N` begin with
  N requests: as many as the strategy keeps, or what is measured is how the CPU side drains or
  fills. `400x200@N:S` orders them as first come, first served leaves them, when S is the share of
  tokens that the CPU decodes: those on the CPU have up to that share of their output, those on the
  GPU, which came earlier, the rest.
- `--kinds decode`: the same without new requests: the rate of decoding alone.
- `--kinds whole`: all requests arrive at once and run to their end.

Prints a line of JSON per lengths and strategy: tokens per second, iterations and their median time
per pipeline, planning time, and the CPU's busy share; with `--tp N` also what crossed between the
driver and the ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from arguments import at_least, limit_arguments

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import ConfigError, EngineError, RequestError
from swiftapex.core.request import Request
from swiftapex.engine.engine import Engine
from swiftapex.executor.ray_executor import ControlTraffic, RayExecutor
from swiftapex.policies import make_policy
from swiftapex.simulation.engine import SimulatedEngine

KINDS = ("window", "decode", "whole")
AGREE = 0.05  # of the requests that a window prefilled and decoded
_WAITING = 1000  # requests at least: a policy that asks sees work for many minutes


def make_engine(args: argparse.Namespace, strategy: str) -> Engine:
    policy, policy_args = parsed(strategy)
    return Engine(
        ModelSection(
            architecture=args.model, weights="dummy", dtype=args.dtype, num_layers=args.layers
        ),
        EngineConfig(
            device=args.device,
            gpu=GpuConfig(kv_tokens=args.gpu_kv, sm_count=args.sms),
            cpu=CpuConfig(kv_memory=int(args.cpu_gib * 2**30), threads=args.threads or "auto"),
            block_size=args.block_size,
            max_model_len=args.max_len,
            max_batch_size=args.max_batch,
            max_tokens_in_batch=args.max_tokens,
            profile=args.profile,
            tensor_parallel_size=args.tp,
        ),
        policy=policy,
        policy_args=policy_args,
    )


def parsed(strategy: str) -> tuple[str, dict[str, Any]]:
    """`NAME` or `NAME?{"argument": value}`. ConfigError where that is no object of JSON."""
    policy, _, text = strategy.partition("?")
    try:
        policy_args = json.loads(text or "{}")
    except ValueError:
        policy_args = None
    if not isinstance(policy_args, dict):
        raise ConfigError(f'{strategy}: expected NAME or NAME?{{"argument": value}}')
    return policy, policy_args


@dataclass(frozen=True)
class Lengths:
    """Mean lengths in tokens, and what a window begins with: at most so many requests, and the
    share of its output that the oldest one on the CPU has (None: evenly spread everywhere)."""

    mean_input: int
    mean_output: int
    requests: int | None = None
    cpu_share: float | None = None

    @staticmethod
    def parse(text: str) -> Lengths:
        """`INPUTxOUTPUT[@REQUESTS[:SHARE]]`."""
        lengths, _, start = text.partition("@")
        requests, _, share = start.partition(":")
        mean_input, mean_output = map(int, lengths.split("x"))
        return Lengths(
            mean_input,
            mean_output,
            int(requests) if requests else None,
            float(share) if share else None,
        )


def evenly_spread(count: int) -> list[float]:
    """Shares of their output that requests in progress have, in no order."""
    order = list(range(64))
    random.Random(1).shuffle(order)
    return [(order[index % len(order)] + 0.5) / len(order) for index in range(count)]


def oldest_first(count: int, on_gpu: int, cpu_share: float) -> list[float]:
    """The same where the first `on_gpu` are the oldest ones, and the others have no more than
    `cpu_share`."""
    on_gpu = min(on_gpu, count)
    gpu = [1 - (1 - cpu_share) * (index + 0.5) / on_gpu for index in range(on_gpu)]
    on_cpu = count - on_gpu
    return gpu + [cpu_share * (1 - (index + 0.5) / on_cpu) for index in range(on_cpu)]


class Workload:
    """Requests of one pair of mean lengths, the same for every strategy."""

    def __init__(self, mean_input: int, mean_output: int, seed: int) -> None:
        self.mean_input, self.mean_output = mean_input, mean_output
        self._rng = random.Random(seed)

    def next(self) -> tuple[list[int], SamplingParams]:
        prompt = self._rng.choices(range(3, 500), k=self._near(self.mean_input))
        sampling = SamplingParams(max_tokens=self._near(self.mean_output), ignore_eos=True)
        return prompt, sampling

    def _near(self, mean: int) -> int:
        return max(1, round(mean * self._rng.uniform(0.9, 1.1)))


class Run:
    """Requests on an engine, and what they have gained so far."""

    def __init__(self, engine: Engine | SimulatedEngine, workload: Workload, size: int) -> None:
        self._engine = engine
        self._workload = workload
        self._block_size = size
        self.requests: list[Request] = []

    def add(self, count: int) -> None:
        """RequestError where lengths were cut: rates would be those of other lengths."""
        for _ in range(count):
            prompt, sampling = self._workload.next()
            request = self._engine.add(prompt, sampling)
            if request.sampling.max_tokens < sampling.max_tokens:
                raise RequestError(
                    f"{len(prompt)} prompt tokens leave room for {request.sampling.max_tokens} of "
                    f"{sampling.max_tokens} output tokens: --max-len is too small"
                )
            self.requests.append(request)

    def fill(self, most: int, cpu_share: float | None = None) -> None:
        """Requests in progress until no KV is left for another one."""
        if cpu_share is None:
            shares = evenly_spread(most)
        else:
            shares = oldest_first(most, self._held_by_gpu(cpu_share), cpu_share)
        for share in shares:
            prompt, sampling = self._workload.next()
            done = min(sampling.max_tokens - 1, round(share * sampling.max_tokens))
            try:
                self.requests.append(self._engine.add_in_progress(prompt, sampling, max(1, done)))
            except RequestError:
                return

    def _held_by_gpu(self, cpu_share: float) -> int:
        """Requests whose KV the GPU holds, from `cpu_share` of their output on."""
        workload, size = self._workload, self._block_size
        tokens = workload.mean_input + (1 + cpu_share) / 2 * workload.mean_output
        return int(self._engine.stats().gpu_blocks_total // (tokens / size + 2))

    def feed(self, at_once: int | None) -> None:
        """New requests, so that many wait, or that `at_once` are there."""
        stats = self._engine.stats()
        if at_once is not None:
            self.add(at_once - stats.waiting - stats.running_gpu - stats.running_cpu)
        elif stats.waiting < _WAITING:
            self.add(_WAITING + 64 - stats.waiting)

    @property
    def output_tokens(self) -> int:
        return sum(len(r.output_ids) for r in self.requests)


def window(
    run: Run,
    engine: Engine | SimulatedEngine,
    lengths: Lengths,
    args: argparse.Namespace,
    feed: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Any:
    most = args.requests if lengths.requests is None else lengths.requests
    run.fill(min(most, args.at_once or most), lengths.cpu_share)
    started = len(run.requests)

    def steps(seconds: float) -> float:
        start = clock()
        while engine.has_work and clock() - start < seconds:
            if feed:
                run.feed(args.at_once)
            engine.step()
        return clock() - start

    steps(args.warmup)
    engine.iterations.clear()
    tokens, busy, seconds = run.output_tokens, engine.busy().cpu_s, 0.0
    moved = engine.stats()
    while True:
        seconds += steps(args.seconds if seconds == 0 else 0.5)
        output = run.output_tokens - tokens
        prefilled = sum(r.prefill_tokens for r in engine.iterations)
        ins, outs = prefilled / lengths.mean_input, output / lengths.mean_output
        valid = not feed or abs(ins - outs) <= AGREE * max(ins, outs)
        if valid or seconds >= args.stretch * args.seconds or not engine.has_work:
            break
    if seconds == 0:
        raise EngineError("no request was in progress when the window began")
    now, stats = engine.busy().cpu_s, engine.stats()
    rate = output / seconds
    return {
        "in_flight": started,
        "seconds": seconds,
        "valid": valid,
        "prefilled_requests": ins,
        "decoded_requests": outs,
        "output_tokens_per_s": rate,
        "cpu_busy": None if now is None or busy is None else (now - busy) / seconds,
        "cpu_token_share": (stats.cpu_decoded_tokens - moved.cpu_decoded_tokens) / max(1, output),
        "moves": stats.moves - moved.moves,
        "preemptions": stats.preemptions - moved.preemptions,
    }


def whole(
    run: Run,
    engine: Engine | SimulatedEngine,
    args: argparse.Namespace,
    clock: Callable[[], float] = time.perf_counter,
) -> Any:
    run.add(args.requests)
    start = clock()
    while engine.has_work:
        engine.step()
    seconds = clock() - start
    assert all(r.error is None for r in run.requests)
    return {"seconds": seconds, "output_tokens_per_s": run.output_tokens / seconds}


def measure(engine: Engine, strategy: str, asked: str, kind: str, args: argparse.Namespace) -> Any:
    lengths = Lengths.parse(asked)
    engine.reuse(*parsed(strategy))
    engine.iterations.clear()
    executor = engine._executor
    if isinstance(executor, RayExecutor):
        executor.traffic = ControlTraffic()
    workload = Workload(lengths.mean_input, lengths.mean_output, args.seed)
    run = Run(engine, workload, args.block_size)
    if kind == "whole":
        result = whole(run, engine, args)
    else:
        result = window(run, engine, lengths, args, feed=kind == "window")
    result["iterations"] = by_pipeline(engine)
    if isinstance(executor, RayExecutor):
        result["control"] = control(executor.traffic, args.tp)
    return {"lengths": asked.partition("@")[0], "strategy": strategy, "kind": kind} | result


def control(traffic: ControlTraffic, ranks: int) -> dict[str, float]:
    """Means per iteration, those of the warm-up included."""
    count = max(1, traffic.iterations)
    return {
        "plan_bytes_per_rank": round(traffic.bytes_sent / count / ranks),
        "answer_bytes": round(traffic.bytes_received / count),
        "overhead_us": round(traffic.overhead_us / count, 1),
    }


def by_pipeline(engine: Engine) -> dict[str, Any]:
    """Of iterations with and without prefill: count, and medians in ms."""
    kinds: dict[str, list[Any]] = {}
    for record in engine.iterations:
        kind = record.pipeline + (" + prefill" if record.prefill_tokens else "")
        kinds.setdefault(kind, []).append(record)

    def median(records: list[Any], name: str, scale: float = 1.0) -> float:
        return round(scale * float(statistics.median(getattr(r, name) for r in records)), 3)

    return {
        kind: {
            "count": len(records),
            "seconds": round(sum(r.duration_us for r in records) / 1e6, 2),
            "ms": median(records, "duration_us", 1e-3),
            "schedule_ms": median(records, "schedule_us", 1e-3),
            "predicted_ms": median(predicted, "predicted_us", 1e-3) if predicted else None,
            "gpu_decodes": median(records, "gpu_decodes"),
            "cpu_decodes": round(statistics.mean(r.cpu_decodes for r in records), 1),
            "parked": median(records, "parked"),
            "prefill_tokens": median(records, "prefill_tokens"),
        }
        for kind, records in kinds.items()
        for predicted in [[r for r in records if r.predicted_us is not None]]
    }


def engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What `make_engine` reads."""
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=at_least(1, int))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sms", type=at_least(1, int))
    parser.add_argument("--gpu-kv", type=at_least(1, int), default=4096)
    parser.add_argument("--cpu-gib", type=at_least(0, float), default=16)
    parser.add_argument("--threads", type=at_least(1, int))
    limit_arguments(parser, block_size=32)
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--tp", type=at_least(1, int), default=1, help="GPUs")


def engines(args: argparse.Namespace) -> Iterator[tuple[Engine, list[str], float]]:
    """One for the strategies that leave the CPU out, one for those that use it: each with its
    strategies and the seconds that it took to set up. Closed when the next one is asked for."""
    with_cpu = {s: make_policy(*parsed(s)).uses_cpu for s in args.strategies}
    for uses_cpu in sorted(set(with_cpu.values())):
        strategies = [s for s in args.strategies if with_cpu[s] is uses_cpu]
        begin = time.perf_counter()
        engine = make_engine(args, strategies[0])
        try:
            yield engine, strategies, time.perf_counter() - begin
        finally:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    engine_arguments(parser)
    parser.add_argument(
        "--lengths", nargs="+", default=["400x200"], help="input x output [@requests[:share]]"
    )
    parser.add_argument(
        "--requests", type=at_least(1, int), default=1000, help="at most, or of a whole run"
    )
    parser.add_argument(
        "--at-once", type=at_least(1, int), help="requests; default: as many as there is KV for"
    )
    parser.add_argument("--kinds", nargs="+", default=["window"], choices=KINDS)
    parser.add_argument("--seconds", type=at_least(1e-3, float), default=10.0)
    parser.add_argument("--stretch", type=at_least(1, float), default=2.0)
    parser.add_argument("--warmup", type=at_least(0, float), default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", nargs="+", default=["gpu_only", "neo", "apex"])
    args = parser.parse_args()
    for engine, strategies, setup_s in engines(args):
        for lengths, strategy, kind in product(args.lengths, strategies, args.kinds):
            result = measure(engine, strategy, lengths, kind, args)
            print(json.dumps(result | {"setup_s": round(setup_s, 1)}), flush=True)


if __name__ == "__main__":
    main()
