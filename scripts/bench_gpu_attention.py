"""Bandwidth of decode_attention on the GPU, as a share of a plain read's (read_stream).

Both run on the same multiprocessors (a green context limits them) and in turns over the same pool
of KV, which is larger than the L2 cache: every call reads other blocks, in random order. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiftapex import _kernels_cuda as kernels

cuda: Any = torch.cuda  # parts of it have no types
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
STREAM = 0  # the default stream belongs to the green context that is set


@dataclass(frozen=True)
class Setting:
    q_heads: int
    kv_heads: int
    contexts: tuple[int, ...]
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * 2 * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        return sum(self.contexts) * self.block_bytes // self.block_size


SHAPES = {"MHA": (32, 32), "GQA-4": (32, 8), "GQA-8": (64, 8)}
CONTEXTS = {
    "1 x 16384": (16384,),
    "1 x 65536": (65536,),
    "8 x 2048": (2048,) * 8,
    "8 x 8192": (8192,) * 8,
    "32 x 512": (512,) * 32,
    "64 x 1000": (1000,) * 64,
    "256 x 128": (128,) * 256,
    "1 x 12288 + 31 x 132": (12288,) + (132,) * 31,
}

POOL_BYTES = 4 << 30
CALLS_PER_SAMPLE = 8


def time_of(calls: Callable[[int], None], samples: int) -> float:
    """Seconds of a call, the median; the index tells which part of the pool it reads."""
    times = []
    for sample in range(samples + 1):
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(200_000)  # the launches queue up behind it
        first.record()
        for i in range(CALLS_PER_SAMPLE):
            calls(sample * CALLS_PER_SAMPLE + i)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / CALLS_PER_SAMPLE)
    return float(statistics.median(times[1:]))


def measure(setting: Setting, pool: Tensor, sms: int, ctas_per_sm: int, samples: int) -> Any:
    n, block_size = len(setting.contexts), setting.block_size
    blocks_of = [-(-context // block_size) for context in setting.contexts]
    total = sum(blocks_of)
    num_sets = max(2, POOL_BYTES // setting.block_bytes // total)
    order = torch.randperm(POOL_BYTES // setting.block_bytes, dtype=torch.int32)
    table = torch.zeros(num_sets, n, max(blocks_of), dtype=torch.int32)
    for index in range(num_sets):
        first = index * total
        for row, blocks in enumerate(blocks_of):
            table[index, row, :blocks] = order[first : first + blocks]
            first += blocks
    table = table.cuda()
    lens = torch.tensor(setting.contexts, dtype=torch.int32, device="cuda")
    width = setting.q_heads * setting.head_dim
    q = torch.randn(n, width, device="cuda").to(setting.dtype)
    out = torch.empty_like(q)
    shape = (setting.q_heads, setting.kv_heads, setting.head_dim)
    num_ctas = sms * ctas_per_sm
    size = kernels.decode_attention_workspace(n, *shape, num_ctas)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    number = NUMBERS[setting.dtype]

    def attend(index: int) -> None:
        kernels.decode_attention(
            number, number, q.data_ptr(), pool.data_ptr(), tables[index % num_sets],
            lens.data_ptr(), out.data_ptr(), workspace.data_ptr(), n, *shape, block_size,
            table.stride(1), width, width, setting.head_dim**-0.5, num_ctas, STREAM,
        )  # fmt: skip

    bytes_read = setting.kv_bytes // 16 * 16
    sums = torch.empty(sms * 8, device="cuda")
    tables = [table[index].data_ptr() for index in range(num_sets)]

    def read(ctas: int) -> Callable[[int], None]:
        def call(index: int) -> None:
            data = pool.data_ptr() + index % num_sets * bytes_read
            kernels.read_stream(data, bytes_read, sums.data_ptr(), ctas, STREAM)

        return call

    attention = time_of(attend, samples)
    # The yardstick is its best grid.
    reading = min(time_of(read(sms * per_sm), samples) for per_sm in (1, 2, 4, 8))
    return {
        "attention_us": round(attention * 1e6, 2),
        "read_us": round(reading * 1e6, 2),
        "attention_gb_per_s": round(setting.kv_bytes / attention / 1e9, 1),
        "read_gb_per_s": round(bytes_read / reading / 1e9, 1),
        "share": round(reading / attention, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sms", type=int, nargs="+", default=[132, 8])
    parser.add_argument("--ctas-per-sm", type=int, default=1)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--contexts", nargs="+", default=list(CONTEXTS))
    parser.add_argument("--head-dim", type=int, default=128)
    arguments = parser.parse_args()
    pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    all_sms = torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for sms in arguments.sms:
        if sms < all_sms:
            context = cuda.green_contexts.GreenContext.create(num_sms=sms, device_id=0)
            context.set_context()
        for shape, name in itertools.product(arguments.shapes, arguments.contexts):
            setting = Setting(*SHAPES[shape], CONTEXTS[name], arguments.head_dim)
            result = measure(setting, pool, sms, arguments.ctas_per_sm, arguments.samples)
            line = {"sms": sms, "shape": shape, "contexts": name, **result}
            print(*line.values(), sep="\t", file=sys.stderr)
            results.append(line)
        if sms < all_sms:
            context.pop_context()
    fixed = {
        "device": torch.cuda.get_device_name(0),
        "ctas_per_sm": arguments.ctas_per_sm,
        "head_dim": arguments.head_dim,
        "block_size": Setting.block_size,
        "dtype": "bfloat16",
        "pool_bytes": POOL_BYTES,
    }
    print(json.dumps({**fixed, "results": results}, indent=1))


if __name__ == "__main__":
    main()
