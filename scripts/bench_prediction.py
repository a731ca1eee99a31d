"""Predicted against measured iterations, and the chosen against the fastest strategy, cell by cell.

    python scripts/bench_prediction.py --model llama2-7b --device cuda --sms 8 \
        --gpu-kv 864 4096 26400 --cpu-requests 0 8 64 256 --kinds decode mixed

A cell is a size of the GPU's KV, a number of requests on the CPU and a kind of workload: `decode`
begins with all requests in progress and prefills nothing, `mixed` has prompts waiting at all times.
Each strategy runs in each cell, with the same requests. Cells of one GPU KV size share an engine,
GPU-only too, which leaves the staging area's blocks to the others. The profile is read from the
cache (measured first where there is none), and does not learn: online correction is off.

Prints a line of JSON per cell and strategy: tokens per second, and by pipeline the number of
iterations, median time and the 50th and 90th percentile of |predicted - measured| / measured. Then
one per cell: the fastest forced strategy, and what the policy under test made of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from typing import Any

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import RequestError
from swiftapex.core.records import IterationRecord
from swiftapex.core.request import Request
from swiftapex.engine.engine import Engine

FORCED = ("gpu_only", "fixed:asymmetric", "fixed:async_overlap")
_WAITING = 4  # prompts that wait at all times in a mixed cell


def make_engine(args: argparse.Namespace, gpu_kv: int) -> Engine:
    return Engine(
        ModelSection(
            architecture=args.model, weights="dummy", dtype=args.dtype, num_layers=args.layers
        ),
        EngineConfig(
            device=args.device,
            gpu=GpuConfig(kv_tokens=gpu_kv, sm_count=args.sms),
            cpu=CpuConfig(kv_tokens=args.cpu_kv),
            block_size=args.block_size,
            max_model_len=args.max_len,
            max_batch_size=args.max_batch,
            max_tokens_in_batch=args.max_tokens,
            profile="on",
            profile_folder=args.profiles,
            online_correction=False,
        ),
        policy=args.policy,
    )


class Cell:
    """An engine in the state of a cell, kept there."""

    def __init__(self, args: argparse.Namespace, engine: Engine, on_cpu: int, mixed: bool) -> None:
        self.engine = engine
        self._args = args
        self._rng = random.Random(args.seed)
        self._mixed = mixed
        self._requests: list[Request] = []
        while engine.stats().running_cpu < on_cpu or not on_cpu:
            try:
                done = self._rng.randrange(1, args.output)
                self._requests.append(engine.add_in_progress(*self._request(), done))
            except RequestError:
                break
            if not on_cpu and engine.stats().running_cpu:
                engine.abort(self._requests[-1].request_id)  # the GPU is full
                break

    def _request(self) -> tuple[list[int], SamplingParams]:
        args, rng = self._args, self._rng
        length = round(args.input * rng.uniform(0.9, 1.1))
        # Longer than the run, so that a cell of decodes stays as it is.
        output = args.output if self._mixed else args.max_len - length
        sampling = SamplingParams(max_tokens=max(1, output), ignore_eos=True)
        return [rng.randrange(3, 500) for _ in range(length)], sampling

    def run_for(self, seconds: float) -> float:
        """Output tokens per second."""
        start, tokens = time.perf_counter(), 0
        while time.perf_counter() - start < seconds and (self._mixed or self.engine.has_work):
            while self._mixed and self.engine.stats().waiting < _WAITING:
                self._requests.append(self.engine.add(*self._request()))
            tokens += len(self.engine.step())
        return tokens / (time.perf_counter() - start)

    def end(self) -> None:
        for request in self._requests:
            self.engine.abort(request.request_id)


def errors(records: list[IterationRecord]) -> dict[str, Any]:
    """By pipeline, with and without chunks."""
    kinds: dict[str, list[IterationRecord]] = {}
    for record in records:
        if record.predicted_us:
            kind = record.pipeline + (" + prefill" if record.prefill_tokens else "")
            kinds.setdefault(kind, []).append(record)
    return {
        kind: {
            "iterations": len(mine),
            "ms": round(1e-3 * statistics.median(r.duration_us for r in mine), 3),
            "predicted_ms": round(1e-3 * statistics.median(r.predicted_us or 0 for r in mine), 3),
            "error_p50": round(relative(mine, 0.5), 4),
            "error_p90": round(relative(mine, 0.9), 4),
            "schedule_share": round(
                statistics.median(r.schedule_us / r.duration_us for r in mine), 5
            ),
        }
        for kind, mine in kinds.items()
    }


def relative(records: list[IterationRecord], share: float) -> float:
    found = sorted(abs((r.predicted_us or 0) - r.duration_us) / r.duration_us for r in records)
    return found[min(len(found) - 1, int(share * len(found)))]


def measure(
    args: argparse.Namespace, engine: Engine, strategy: str, gpu_kv: int, on_cpu: int, kind: str
) -> dict[str, Any]:
    engine.use_policy(strategy)
    cell = Cell(args, engine, on_cpu, kind == "mixed")
    before = engine.stats()
    cell.run_for(args.warmup)
    engine.iterations.clear()
    rate = cell.run_for(args.seconds)
    records = list(engine.iterations)
    cell.end()
    return {
        "gpu_kv": gpu_kv,
        "cpu_requests": before.running_cpu,
        "gpu_requests": before.running_gpu,
        "kind": kind,
        "strategy": strategy,
        "tokens_per_s": round(rate, 2),
        "by_pipeline": errors(records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sms", type=int)
    parser.add_argument("--gpu-kv", type=int, nargs="+", default=[864, 4096, 26_400])
    parser.add_argument("--cpu-requests", type=int, nargs="+", default=[0, 8, 64, 256])
    parser.add_argument("--kinds", nargs="+", default=["decode", "mixed"])
    parser.add_argument("--cpu-kv", type=int, default=131_072)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--input", type=int, default=300)
    parser.add_argument("--output", type=int, default=100)
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profiles", help="folder of profiles; default: the user's cache")
    parser.add_argument("--policy", default="model_based", help="what is under test")
    args = parser.parse_args()
    for gpu_kv in args.gpu_kv:
        engine = make_engine(args, gpu_kv)
        try:
            for cell in itertools.product(args.cpu_requests, args.kinds):
                compare(args, engine, gpu_kv, *cell)
        finally:
            engine.close()


def compare(args: argparse.Namespace, engine: Engine, gpu_kv: int, on_cpu: int, kind: str) -> None:
    """All strategies in one cell."""
    rates = {}
    for strategy in (*FORCED, args.policy):
        found = measure(args, engine, strategy, gpu_kv, on_cpu, kind)
        rates[strategy] = found["tokens_per_s"]
        print(json.dumps(found), flush=True)
    chosen = rates.pop(args.policy)
    best = max(rates, key=lambda name: rates[name])
    ratio = round(chosen / rates[best], 4) if rates[best] else None
    cell = [gpu_kv, on_cpu, kind]
    print(json.dumps({"cell": cell, "fastest": best, "policy_over_fastest": ratio}), flush=True)


if __name__ == "__main__":
    main()
