"""Where the time of decoding goes: the GPU's idle share, launches, host time, the CPU's read rate.

    python scripts/bench_gpu_idle.py --model llama2-7b --sms 8 --gpu-kv 4096 --cpu-gib 80

Requests are in progress and none is prefilled, as with `bench_hybrid.py --kinds decode`; GPU-only
gets as many as keep their KV for all of the measurement. After a warm-up `--passes` passes are
timed, then as many again under CUPTI (torch.profiler). Prints a line of JSON per strategy:

- `ms_per_pass` without the profiler, `ms_per_pass_profiled` with it;
- `gpu`: busy and idle shares, kernels and launches, copies; `gpu_timeline.py` defines them. All are
  of the profiled passes, but for `idle_share_unprofiled`: the same kernels' time over the time that
  the passes took without profiler. null without a GPU;
- `host`: the launching thread's µs in `Engine.step` without its waits (for tokens, and for the GPU
  to come near), and `launch_us_per_pass` of it to launch a pass. A full launch queue counts;
- `cpu`: the share of time in which the attention threads are in the kernel, KV bytes that they read
  per second (the contexts of the calls handed to them), and that over the rate at which as many
  threads on the same CPUs read the same memory in a plain sum while nothing else runs: the mean of
  a reading just before those passes and one just after them, both given, since on a machine that is
  shared it changes within seconds.

`--table` prints launches and host time as a markdown table behind that. With `--device cpu` there
is no timeline and no launch: that is for trying the script out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import swiftapex._kernels_cpu as kernels
from arguments import at_least
from bench_hybrid import Run, Workload, by_pipeline, engine_arguments, engines, parsed
from gpu_recorder import recorded, start_cupti
from gpu_timeline import analyse, table

from swiftapex import SamplingParams
from swiftapex.backends.threads import split_threads, threads_beside_launching
from swiftapex.core.request import Placement
from swiftapex.engine.engine import Engine
from swiftapex.pipelines import readiness
from swiftapex.policies import make_policy

STRATEGIES = ["gpu_only", "fixed:asymmetric", "fixed:async_overlap"]
READ_BYTES = 2 << 30  # of one reading of the CPU's KV
READINGS = 5
SETTLE = 10  # passes after a reading, for which the CPU side was interrupted


class Watch:
    """Counts what an engine's launching thread does, and what it hands to the CPU side."""

    def __init__(self, engine: Engine) -> None:
        self._executor: Any = engine._executor
        self.launch_s = self.wait_s = 0.0
        self.kv_bytes = 0
        self._tokens: dict[int, tuple[Any, int]] = {}  # of KV, by id of the batch, which is kept

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        lane = self._executor._worker._backends.cpu_attention
        execute, wait_until = self._executor.execute, readiness.wait_until
        self._executor.execute = self._launching(execute)
        readiness.wait_until = self._waiting(wait_until)
        if lane is not None:
            submit, lane.submit = lane.submit, self._reading(lane.submit)
        try:
            yield
        finally:
            self._executor.execute, readiness.wait_until = execute, wait_until
            if lane is not None:
                lane.submit = submit

    def _launching(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def timed(plan: Any) -> Any:
            start, waited = time.perf_counter(), self.wait_s
            result = execute(plan)
            self.launch_s += time.perf_counter() - start - (self.wait_s - waited)
            return dataclasses.replace(result, fetch=self._waiting(result.fetch))

        return timed

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args)
            finally:
                self.wait_s += time.perf_counter() - start

        return timed

    def _reading(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def counted(layer: int, kv: Any, batch: Any, shape: Any, qkv: Any) -> Any:
            known = self._tokens.get(id(batch))
            if known is None:
                known = self._tokens[id(batch)] = (batch, int(batch.context_lens.sum()))
            self.kv_bytes += known[1] * kv[0].nbytes // shape.block_size
            return submit(layer, kv, batch, shape, qkv)

        return counted


def add_requests(engine: Engine, strategy: str, args: argparse.Namespace) -> None:
    mean_input, mean_output = map(int, args.lengths.split("x"))
    workload = Workload(mean_input, mean_output, args.seed)
    if make_policy(*parsed(strategy)).uses_cpu:
        Run(engine, workload, args.block_size).fill(args.requests)
        return
    steps = args.warmup + 2 * (args.passes + SETTLE) + 2
    block = args.block_size
    rows = engine.stats().gpu_blocks_total // -(-(mean_input + steps) // block)
    if rows == 0:
        raise SystemExit(
            f"--gpu-kv {args.gpu_kv} holds no request of {mean_input} tokens that decodes in "
            f"{steps} passes: fewer --passes or --warmup, or a shorter input in --lengths"
        )
    sampling = SamplingParams(max_tokens=steps, ignore_eos=True)
    for _ in range(min(rows, args.requests)):
        engine.add_in_progress([5] * mean_input, sampling, 1)


def run_passes(engine: Engine, passes: int) -> tuple[float, float]:
    """Seconds of `passes` iterations, from an idle GPU until it is idle again, and of them those
    in `Engine.step`."""
    executor: Any = engine._executor
    finish = executor._worker._backends.finish
    finish()
    start = time.perf_counter()
    for _ in range(passes):
        engine.step()
    stepped = time.perf_counter()
    finish()
    return time.perf_counter() - start, stepped - start


def read_rate(engine: Engine, args: argparse.Namespace) -> float | None:
    """GB/s of a plain sum over the CPU's KV, by as many threads as attend, on their CPUs."""
    executor: Any = engine._executor
    kv = executor._worker._store._kv.get(Placement.CPU)
    if kv is None:
        return None
    wanted: Any = args.threads or "auto"
    plan = threads_beside_launching(wanted) if args.device == "cuda" else split_threads(wanted)[1]
    pool = kernels.ThreadPool(plan.count, list(plan.cpus), caller_works=False)
    size = min(READ_BYTES, kv.nbytes) // 64 * 64
    times = []
    for index in range(READINGS + 1):
        offset = index * size % (kv.nbytes - size + 1) // 64 * 64
        start = time.perf_counter()
        kernels.read_stream(pool, kv.data_ptr() + offset, size)
        times.append(time.perf_counter() - start)
    pool.close()
    return float(size / statistics.median(times[1:]) / 1e9)


def measure(engine: Engine, strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    engine.reuse(*parsed(strategy))
    on_gpu = args.device == "cuda"
    if on_gpu:
        start_cupti()
    add_requests(engine, strategy, args)
    run_passes(engine, args.warmup)
    rates = [read_rate(engine, args)]
    run_passes(engine, SETTLE)
    engine.iterations.clear()
    n, layers, watch = args.passes, engine.model_config.num_layers, Watch(engine)
    busy = engine.busy().cpu_s
    with watch.on():
        seconds, step_s = run_passes(engine, n)
    busy_end = engine.busy().cpu_s
    rates.append(read_rate(engine, args))
    run_passes(engine, SETTLE)
    host_us = 1e6 * (step_s - watch.wait_s) / n
    gpu = profiled_s = None
    if on_gpu:
        activities, times = recorded(lambda: run_passes(engine, n))
        profiled_s = times[0]
        gpu = analyse(activities, profiled_s, n, layers)
        kernel_s = gpu["kernel_ms_per_pass"] * n / 1e3
        gpu["idle_share_unprofiled"] = round(1 - kernel_s / seconds, 4)
    cpu = None
    known = [rate for rate in rates if rate is not None]
    if known and busy is not None and busy_end is not None:
        read = watch.kv_bytes / seconds / 1e9
        cpu = {
            "threads_in_kernel": round((busy_end - busy) / seconds, 4),
            "kv_gb_per_s": round(read, 2),
            "read_gb_per_s": [round(rate, 2) for rate in known],
            "share_of_read_rate": round(read / statistics.mean(known), 4),
        }
    return {
        "strategy": strategy,
        "passes": n,
        "num_layers": layers,
        # all of them decoded, and requests were left at the end
        "steady": engine.has_work and not any(i.prefill_tokens for i in engine.iterations),
        "ms_per_pass": round(1e3 * seconds / n, 3),
        "ms_per_pass_profiled": None if profiled_s is None else round(1e3 * profiled_s / n, 3),
        "gpu": gpu,
        "host": {
            "us_per_pass": round(host_us, 1),
            "us_per_layer": round(host_us / layers, 2),
            "launch_us_per_pass": round(1e6 * watch.launch_s / n, 1),
        },
        "cpu": cpu,
        "iterations": by_pipeline(engine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    engine_arguments(parser)
    parser.add_argument("--lengths", default="400x200", help="input x output")
    parser.add_argument("--requests", type=at_least(1, int), default=1000, help="at most")
    parser.add_argument("--passes", type=at_least(1, int), default=200)
    parser.add_argument("--warmup", type=at_least(0, int), default=100, help="passes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--table", action="store_true", help="also as markdown")
    args = parser.parse_args()
    if args.tp != 1:
        parser.error("--tp: other processes than this one cannot be watched")
    results = []
    for engine, strategies, _ in engines(args):
        for strategy in strategies:
            results.append(measure(engine, strategy, args))
            print(json.dumps(results[-1]), flush=True)
    if args.table:
        print(table(results))


if __name__ == "__main__":
    main()
