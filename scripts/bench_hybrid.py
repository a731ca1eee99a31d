"""Output tokens per second of several strategies on one GPU, or a part of it, in one run.

    python scripts/bench_hybrid.py --model llama2-7b --sms 8 --gpu-kv 4096 --cpu-gib 40 \
        --input 400 --output 200 --requests 128 --strategies gpu_only fixed:asymmetric

Dummy weights, lengths within 10 % of the given means, ignored end-of-sequence tokens. Two kinds of
measurement:

- `whole` (default): all requests arrive at once and run to their end.
- `--steady SECONDS`: requests begin at uniformly random progress with their KV in place, and
  nothing is prefilled: the rate of decoding alone, over a window after a second of warm-up.

Prints a line of JSON per strategy: tokens per second, iterations and their median time per
pipeline, the planning time, the CPU's busy share, and bytes of KV that the CPU read per second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import RequestError
from swiftapex.core.request import Request
from swiftapex.engine.engine import Engine

Lengths = list[tuple[int, int]]


def make_engine(args: argparse.Namespace, strategy: str) -> Engine:
    policy, _, policy_args = strategy.partition("?")
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
        ),
        policy=policy,
        policy_args=json.loads(policy_args or "{}"),
    )


def lengths(args: argparse.Namespace) -> Lengths:
    rng = random.Random(args.seed)

    def near(mean: int) -> int:
        return max(1, round(mean * rng.uniform(0.9, 1.1)))

    return [(near(args.input), near(args.output)) for _ in range(args.requests)]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(length)]


def whole_run(engine: Engine, all_lengths: Lengths, rng: random.Random) -> dict[str, Any]:
    requests: list[Request] = []
    start = time.perf_counter()
    for input_len, output_len in all_lengths:
        sampling = SamplingParams(max_tokens=output_len, ignore_eos=True)
        requests.append(engine.add(prompt(rng, input_len), sampling, arrival_s=start))
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    tokens = sum(len(r.output_ids) for r in requests)
    assert all(r.error is None for r in requests)
    return {"seconds": seconds, "output_tokens": tokens, "output_tokens_per_s": tokens / seconds}


def steady_run(
    engine: Engine, all_lengths: Lengths, rng: random.Random, window_s: float
) -> dict[str, Any]:
    requests: list[Request] = []
    for input_len, output_len in all_lengths:
        sampling = SamplingParams(max_tokens=output_len, ignore_eos=True)
        try:
            done = rng.randrange(1, max(2, output_len))
            requests.append(engine.add_in_progress(prompt(rng, input_len), sampling, done))
        except RequestError:
            break

    def run_for(seconds: float) -> tuple[float, int]:
        before, start = sum(len(r.output_ids) for r in requests), time.perf_counter()
        while engine.has_work and time.perf_counter() - start < seconds:
            engine.step()
        return time.perf_counter() - start, sum(len(r.output_ids) for r in requests) - before

    run_for(1.0)
    engine.iterations.clear()
    seconds, tokens = run_for(window_s)
    return {
        "requests_in_flight": len(requests),
        "left_at_the_end": sum(r.finish_reason is None for r in requests),
        "seconds": seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
    }


def measure(args: argparse.Namespace, strategy: str) -> dict[str, Any]:
    begin = time.perf_counter()
    engine = make_engine(args, strategy)
    setup_s = time.perf_counter() - begin
    try:
        rng = random.Random(args.seed)
        busy, start = engine.busy().cpu_s, time.perf_counter()
        if args.steady:
            result = steady_run(engine, lengths(args), rng, args.steady)
        else:
            result = whole_run(engine, lengths(args), rng)
        wall = time.perf_counter() - start
        cpu_s = engine.busy().cpu_s
        stats = engine.stats()
        result["cpu_busy"] = None if cpu_s is None or busy is None else (cpu_s - busy) / wall
        result |= {"cpu_tokens": stats.cpu_decoded_tokens, "moves": stats.moves}
        result |= {"preemptions": stats.preemptions, "setup_s": setup_s}
        result["iterations"] = by_pipeline(engine)
    finally:
        engine.close()
    return {"strategy": strategy} | result


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
            "predicted_ms": round(
                1e-3 * statistics.median(r.predicted_us or 0.0 for r in records), 3
            ),
            "gpu_decodes": median(records, "gpu_decodes"),
            "cpu_decodes": round(statistics.mean(r.cpu_decodes for r in records), 1),
            "parked": median(records, "parked"),
            "prefill_tokens": median(records, "prefill_tokens"),
        }
        for kind, records in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sms", type=int)
    parser.add_argument("--gpu-kv", type=int, default=4096)
    parser.add_argument("--cpu-gib", type=float, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--input", type=int, default=400)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--steady", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", nargs="+", default=["gpu_only", "neo", "apex"])
    args = parser.parse_args()
    for strategy in args.strategies:
        print(json.dumps(measure(args, strategy)), flush=True)


if __name__ == "__main__":
    main()
