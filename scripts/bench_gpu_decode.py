"""GPU-only decode iterations against the floor that matrix products and memory set.

    python scripts/bench_gpu_decode.py [--models llama2-7b llama3.1-8b] [--sms 8 132]

Dummy bfloat16 weights; requests begin in progress, so that all iterations decode. Prints a line of
JSON per model, multiprocessors and batch:

- `iteration_ms`: median time between two returns of `step`, planning and sampling included;
- `floor_ms`: `linear_ms`, all matrix products of a pass by cuBLAS at the same number of rows in one
  CUDA graph, and `kv_ms`, the bytes of KV at the rate `read_gb_per_s` that a streaming sum reaches;
  both on the same multiprocessors, in the same process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import swiftapex._kernels_cuda as kernels
import torch
import torch.nn.functional as F
from arguments import at_least, require_gpu

from swiftapex import SamplingParams
from swiftapex.config.schema import EngineConfig, GpuConfig, ModelSection
from swiftapex.engine.engine import Engine
from swiftapex.model.weights import ModelWeights

STREAM_BYTES = 1 << 30


def median_ms(call: Callable[[], object], stream: torch.cuda.Stream, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        stream.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def read_rate(stream: torch.cuda.Stream, num_sms: int) -> float:
    """GB/s of a streaming sum, at the best of some grid sizes."""
    data = torch.ones(STREAM_BYTES, dtype=torch.uint8, device="cuda")
    sums = torch.zeros(64 * num_sms, device="cuda")
    best = float("inf")
    for per_sm in (1, 2, 4, 8, 16):
        ctas = per_sm * num_sms
        address, out, handle = data.data_ptr(), sums.data_ptr(), stream.cuda_stream
        ms = median_ms(
            lambda: kernels.read_stream(address, STREAM_BYTES, out, ctas, handle),  # noqa: B023
            stream,
            5,
        )
        best = min(best, ms)
    return STREAM_BYTES / best / 1e6


def linear_ms(weights: ModelWeights, rows: int, stream: torch.cuda.Stream) -> float:
    """All matrix products of a pass over `rows` rows."""
    matrices = [m for w in weights.layers for m in (w.qkv, w.o, w.gate_up, w.down)]
    matrices.append(weights.head)
    inputs = {
        m.shape[1]: torch.randn(rows, m.shape[1], dtype=m.dtype, device="cuda") for m in matrices
    }

    def products() -> None:
        for m in matrices:
            F.linear(inputs[m.shape[1]], m)

    products()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        products()
    return median_ms(graph.replay, stream, 7)


def iteration_ms(engine: Engine, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Median, and tokens of KV that a median iteration reads."""
    sampling = SamplingParams(max_tokens=steps + 50, ignore_eos=True)
    ids = [engine.add_in_progress([5] * context, sampling, 1).request_id for _ in range(batch)]
    for _ in range(10):
        engine.step()
    returns = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        returns.append(time.perf_counter())
    tokens = sum(engine.request(i).num_tokens for i in ids) - batch * steps / 2
    for request_id in ids:
        engine.abort(request_id)
    times = [1e3 * (b - a) for a, b in itertools.pairwise(returns)]
    return statistics.median(times), tokens


def measure(model: str, sms: int | None, args: argparse.Namespace) -> None:
    kv_tokens = max(args.batch) * (args.context + args.steps + 96)
    engine = Engine(
        ModelSection(architecture=model, weights="dummy", dtype="bfloat16"),
        EngineConfig(
            device="cuda",
            gpu=GpuConfig(kv_tokens=kv_tokens, sm_count=sms),
            max_model_len=args.context + args.steps + 64,
        ),
    )
    worker: Any = engine._executor
    backend, weights = worker._worker._backends.gpu, worker._worker._stages.weights
    config = engine.model_config
    with torch.cuda.stream(backend.stream), torch.inference_mode():
        rate = read_rate(backend.stream, backend.num_sms)
        for batch in args.batch:
            ms, tokens = iteration_ms(engine, batch, args.context, args.steps)
            products = linear_ms(weights, batch, backend.stream)
            kv = tokens * config.kv_bytes_per_token("bfloat16") / rate / 1e6
            result = {
                "model": model,
                "sms": backend.num_sms,
                "batch": batch,
                "iteration_ms": ms,
                "floor_ms": products + kv,
                "over_floor": ms / (products + kv),
                "linear_ms": products,
                "kv_ms": kv,
                "read_gb_per_s": rate,
            }
            print(json.dumps(result), flush=True)
    del weights
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["llama2-7b", "llama3.1-8b"])
    parser.add_argument(
        "--sms", type=at_least(1, int), nargs="+", help="multiprocessors; default: 8, and all"
    )
    parser.add_argument("--batch", type=at_least(1, int), nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--context", type=at_least(1, int), default=500)
    parser.add_argument("--steps", type=at_least(1, int), default=30)
    args = parser.parse_args()
    require_gpu(parser)
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    for model in args.models:
        for sms in args.sms or [8, whole]:
            measure(model, None if sms == whole else sms, args)


if __name__ == "__main__":
    main()
