"""Predicted against measured iterations, and the chosen against the fastest strategy, cell by cell.

    python scripts/bench_prediction.py --sms 8 --only-profile   # first, in a process of its own
    python scripts/bench_prediction.py --sms 8

A cell is a size of the GPU's KV, a number of requests on the CPU and a kind of workload. In
`decode` all requests are in progress and nothing is prefilled; in `mixed` a new request comes
whenever one ends. Each strategy begins each cell as on a new engine, with the same requests: drawn
anew from one seed, at the same progress, first on the GPU until it is full, then on the CPU. Only
GPU-only, which would leave those on the CPU lie for ever, is spared them (`decode`), or has them
wait as prompts (`mixed`). So do those that a strategy would not keep on the CPU in the long run
(`KEEPS`): a window that began with them would show how fast it gets rid of them, without prompts.
Cells of one GPU KV size share an engine, GPU-only too, which leaves the staging area's blocks to
the others. The profile is read from the cache (measured where there is none: a line tells which)
and does not learn: online correction is off.

Without requests on the CPU there is nothing for a pipeline with two sides to decode there: in such
a `decode` cell GPU-only runs, and the policy, and the GPU keeps room for its requests to grow, so
that none is moved. In the `mixed` one the other pipelines run, and may take prompts to the CPU.

Tokens count in part: one that takes from t to u is spread over that time. CPU decodes come in
bursts of a whole cohort, and a short window would see one more or less. While cohorts are parked
the warm-up goes on until they had time for a token, and so does the measurement: one under way at
the end is taken to last as long as the one before.

Prints a line of JSON per cell and strategy: tokens per second, and by pipeline the number of
iterations, median time and the 50th and 90th percentile of |predicted - measured| / measured. Then
one per cell: the fastest forced strategy, the one that the policy under test picked (the pipeline
that had most of its time), that one's forced rate over the fastest, and the policy's own, since it
may mix strategies from one iteration to the next. Last the summary; Ctrl-C and SIGTERM leave the
rest out, and still print it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arguments import at_least, limit_arguments
from prediction_summary import (
    FORCED,
    GPU_ONLY,
    Found,
    by_pipeline,
    errors,
    judge,
    tokens_between,
)

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import RequestError
from swiftapex.core.records import IterationRecord
from swiftapex.core.request import Request
from swiftapex.engine.engine import Engine

_GROWTH = 96  # tokens that a GPU request may grow by in a `decode` cell without CPU requests
_DECODE_SHARE = 0.25  # of --seconds and --warmup: such cells vary less
# Requests on the CPU in the long run, where a strategy keeps fewer there than the `mixed` cell (GPU
# KV, CPU requests) has: by a simulation of these workloads over tables measured on 8
# multiprocessors of an H200 with 14 threads.
KEEPS = {
    (864, 64): {"fixed:asymmetric": 45},
    (864, 256): {"fixed:asymmetric": 45, "model_based": 55},
    (4096, 64): {"fixed:asymmetric": 30},
    (4096, 256): {"fixed:asymmetric": 30, "model_based": 90},
    (26_400, 64): {"fixed:async_overlap": 14, "model_based": 0},
    (26_400, 256): {"fixed:asymmetric": 60, "fixed:async_overlap": 20, "model_based": 145},
}
_SETUP_S, _PIN_S_PER_GIB, _RUN_S = 5.0, 0.4, 0.2  # of an engine, of a run beside its time; H200


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


@dataclass(frozen=True)
class Cell:
    gpu_kv: int
    on_cpu: int
    kind: str

    @property
    def mixed(self) -> bool:
        return self.kind == "mixed"

    def strategies(self, policy: str) -> tuple[str, ...]:
        forced = FORCED if self.on_cpu or self.mixed else (GPU_ONLY,)
        return (*forced, policy)

    def begins_with(self, strategy: str) -> int:
        """Requests on the CPU."""
        if strategy == GPU_ONLY:
            return 0
        keeps = KEEPS.get((self.gpu_kv, self.on_cpu), {}) if self.mixed else {}
        return keeps.get(strategy, self.on_cpu)

    @property
    def share(self) -> float:
        """Of --seconds and --warmup."""
        return 1.0 if self.mixed else _DECODE_SHARE


class Run:
    """An engine in the state of a cell, under a strategy, kept there."""

    def __init__(self, args: argparse.Namespace, engine: Engine, cell: Cell, strategy: str) -> None:
        engine.reuse(args.policy)  # whatever was there is forgotten
        engine.use_policy(strategy)
        self._args, self._engine, self._cell = args, engine, cell
        self._rng = random.Random(args.seed)
        self._start_s: float | None = None  # of the first iteration
        self._begun: list[Request] = []  # in progress
        self._new: list[Request] = []
        self._fill(cell.begins_with(strategy))
        self.held = engine.stats()
        self._at_once = self.held.running_gpu + cell.on_cpu

    def _fill(self, on_cpu: int) -> None:
        """Until the GPU is full and `on_cpu` are on the CPU, or no room is left there."""
        engine, stays = self._engine, self._cell.mixed or self._cell.on_cpu
        while engine.stats().running_cpu <= on_cpu:
            prompt, sampling = self._request()
            done = self._rng.randrange(1, self._args.output)
            try:
                self._begun.append(engine.add_in_progress(prompt, sampling, done))
            except RequestError:
                break
        while engine.stats().running_cpu > on_cpu or not (stays or self._may_grow()):
            engine.abort(self._begun.pop().request_id)

    def _may_grow(self) -> bool:
        stats = self._engine.stats()
        needed = stats.running_gpu * -(-_GROWTH // self._args.block_size)
        return stats.running_gpu <= 1 or stats.gpu_blocks_free >= needed

    def _request(self) -> tuple[list[int], SamplingParams]:
        args, rng = self._args, self._rng
        length = round(args.input * rng.uniform(0.9, 1.1))
        # Longer than the run, so that a cell of decodes stays as it is; but what the GPU can hold.
        longest = min(args.max_len, self._engine.stats().gpu_blocks_total * args.block_size)
        output = args.output if self._cell.mixed else longest - length
        sampling = SamplingParams(max_tokens=max(1, output), ignore_eos=True)
        return [rng.randrange(3, 500) for _ in range(length)], sampling

    def tokens_per_s(self, seconds: float) -> float:
        """Of the next `seconds`."""
        engine, begin = self._engine, time.perf_counter()
        self._start_s = self._start_s or begin
        first = engine.num_iterations
        while self._cell.mixed or engine.has_work:
            if time.perf_counter() - begin >= seconds and self._took_turns(first):
                break
            stats = engine.stats() if self._cell.mixed else None
            if stats is not None:
                there = stats.waiting + stats.running_gpu + stats.running_cpu
                self._new += [engine.add(*self._request()) for _ in range(self._at_once - there)]
            engine.step()
        end = time.perf_counter()
        assert self._start_s is not None
        tokens = sum(tokens_between(r, begin, end, self._start_s) for r in self._begun)
        tokens += sum(tokens_between(r, begin, end, None) for r in self._new)
        return tokens / (end - begin)

    def _took_turns(self, first: int) -> bool:
        """Whether what is parked had time for a token since that iteration."""
        passes = self._engine.num_iterations - first
        return passes > self._engine.model_config.num_layers or not self._engine.stats().parked


def measure(
    args: argparse.Namespace, engine: Engine, cell: Cell, strategy: str
) -> tuple[dict[str, Any], list[IterationRecord]]:
    run = Run(args, engine, cell, strategy)
    run.tokens_per_s(args.warmup * cell.share)
    engine.iterations.clear()
    rate = run.tokens_per_s(args.seconds * cell.share)
    records = list(engine.iterations)
    line = {
        "gpu_kv": cell.gpu_kv,
        "cpu_requests": run.held.running_cpu,
        "gpu_requests": run.held.running_gpu,
        "cpu_requests_at_the_end": engine.stats().running_cpu,
        "kind": cell.kind,
        "strategy": strategy,
        "tokens_per_s": round(rate, 2),
        "by_pipeline": by_pipeline(records),
    }
    return line, records


def compare(args: argparse.Namespace, engine: Engine, cell: Cell, found: Found) -> None:
    """All strategies in one cell. One that cannot hold the requests says so, and is not judged."""
    rates: dict[str, float] = {}
    records: list[IterationRecord] = []
    for strategy in cell.strategies(args.policy):
        line, records = measure(args, engine, cell, strategy)
        print(json.dumps(line), flush=True)
        held = line["cpu_requests"]
        if not line["gpu_requests"] or held < cell.begins_with(strategy):
            only = {"gpu_requests": line["gpu_requests"], "cpu_requests": held}
            found.cells.append({"cell": list(vars(cell).values()), "holds_only": only})
            print(json.dumps(found.cells[-1]), flush=True)
            return
        found.errors.setdefault((strategy, cell.kind), []).extend(errors(records))
        rates[strategy] = line["tokens_per_s"]
    found.cells.append({"cell": list(vars(cell).values())} | judge(rates, args.policy, records))
    print(json.dumps(found.cells[-1]), flush=True)


def estimate_s(args: argparse.Namespace, cells: Sequence[Cell], gib: float) -> float:
    """On an H200, without profiles. `gib`: of the CPU's KV."""
    runs: float = sum(
        len(cell.strategies(args.policy)) * (_RUN_S + (args.warmup + args.seconds) * cell.share)
        for cell in cells
    )
    return runs + len(args.gpu_kv) * (_SETUP_S + _PIN_S_PER_GIB * gib)


def set_up(args: argparse.Namespace, gpu_kv: int) -> Engine:
    """With a line that tells where the profile is from."""
    begin = time.perf_counter()
    engine = make_engine(args, gpu_kv)
    folder, seconds = engine.profiled.folder, time.perf_counter() - begin
    newest = max((path.stat().st_mtime for path in folder.glob("*.json")), default=0.0)
    source = "measured now" if newest > time.time() - seconds else "read"
    print(json.dumps({"gpu_kv": gpu_kv, "setup_s": round(seconds, 1), "profile": source}))
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=at_least(1, int))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sms", type=at_least(1, int))
    parser.add_argument("--gpu-kv", type=at_least(1, int), nargs="+", default=[864, 4096, 26_400])
    parser.add_argument("--cpu-requests", type=at_least(0, int), nargs="+", default=[0, 8, 64, 256])
    parser.add_argument("--kinds", nargs="+", default=["decode", "mixed"])
    parser.add_argument("--cpu-kv", type=at_least(1, int), default=102_400)
    limit_arguments(parser, block_size=16)
    parser.add_argument("--input", type=at_least(1, int), default=200)
    parser.add_argument("--output", type=at_least(1, int), default=100)
    parser.add_argument("--warmup", type=at_least(0, float), default=1.5)
    parser.add_argument("--seconds", type=at_least(1e-3, float), default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profiles", help="folder of profiles; default: the user's cache")
    parser.add_argument("--policy", default="model_based", help="under test; one that uses the CPU")
    parser.add_argument(
        "--only-profile", action="store_true", help="measured with the largest KV, for all"
    )
    args = parser.parse_args()
    if args.only_profile:
        set_up(args, max(args.gpu_kv)).close()
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    product = itertools.product(args.gpu_kv, args.cpu_requests, args.kinds)
    cells, found = [Cell(*cell) for cell in product], Found()
    try:
        for gpu_kv in args.gpu_kv:
            engine = set_up(args, gpu_kv)
            try:
                if gpu_kv == args.gpu_kv[0]:
                    gib = args.cpu_kv * engine.model_config.kv_bytes_per_token(args.dtype) / 2**30
                    text = f"{len(cells)} cells, about {estimate_s(args, cells, gib):.0f} s"
                    print(text, file=sys.stderr, flush=True)
                for cell in cells:
                    if cell.gpu_kv == gpu_kv:
                        compare(args, engine, cell, found)
            finally:
                engine.close()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(json.dumps({"summary": found.summary(len(cells))}), flush=True)


if __name__ == "__main__":
    main()
