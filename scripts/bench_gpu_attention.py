"""Bandwidth of decode_attention on the GPU, as a share of a plain read's (read_stream).

Both run on the same multiprocessors (a green context limits them) and in turns over the same pool
of KV, which is larger than the L2 cache: a part of it for each layer, whose blocks are read in the
same random order, as a batch's are. Prints one JSON object: `attention_us` of calls one behind the
other, where the first of 32 finds out who computes what for all, and all but the second begin while
the one before them ends; `layer_us`, what a call adds to rotate-and-append in a graph of 32 layers;
`share` and `layer_share` are the read's time over these.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from arguments import at_least, require_gpu
from torch import Tensor

from swiftapex import _kernels_cuda as kernels

cuda: Any = torch.cuda  # parts of it have no types
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


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
LAYERS = 32  # and calls of a sample


def time_of(stream: Any, work: Callable[[int], None], calls: int, samples: int) -> float:
    """Seconds of a call, of which `work` launches `calls`: the median. Its argument is the number
    of the first one, which tells what part of the pool it reads."""
    times = []
    for sample in range(samples + 1):
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(1_000_000)  # the launches queue up behind it
        first.record(stream)
        work(sample * calls)
        last.record(stream)
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / calls)
    return float(statistics.median(times[1:]))


def block_table(setting: Setting) -> Tensor:
    """[rows, blocks] int32, of a layer's part of the pool."""
    blocks_of = [-(-context // setting.block_size) for context in setting.contexts]
    order = torch.randperm(sum(blocks_of), dtype=torch.int32)
    table = torch.zeros(len(blocks_of), max(blocks_of), dtype=torch.int32)
    first = 0
    for row, blocks in enumerate(blocks_of):
        table[row, :blocks] = order[first : first + blocks]
        first += blocks
    return table.cuda()


def measure(setting: Setting, pool: Tensor, stream: Any, ctas: int, samples: int) -> Any:
    n, q_heads, kv_heads, dim = (
        len(setting.contexts), setting.q_heads, setting.kv_heads, setting.head_dim
    )  # fmt: skip
    table = block_table(setting)
    blocks = sum(-(-context // setting.block_size) for context in setting.contexts)
    layer_bytes = blocks * setting.block_bytes
    parts = POOL_BYTES // layer_bytes  # of the pool
    lens = torch.tensor(setting.contexts, dtype=torch.int32, device="cuda")
    width = (q_heads + 2 * kv_heads) * dim
    qkv = torch.randn(n, width, device="cuda").to(setting.dtype)
    out = torch.empty(n, q_heads * dim, dtype=setting.dtype, device="cuda")
    slots = torch.full((n,), -1, dtype=torch.int64, device="cuda")
    rotation = torch.zeros(n, dim, device="cuda")
    size = kernels.decode_attention_workspace(n, q_heads, kv_heads, dim, ctas)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    size = kernels.decode_attention_plan_bytes(ctas)
    plan = torch.empty(size, dtype=torch.uint8, device="cuda")
    sums = torch.empty(ctas * 8, device="cuda")
    number, handle = NUMBERS[setting.dtype], stream.cuda_stream
    bytes_read = setting.kv_bytes // 16 * 16

    def kv_of(index: int) -> int:
        return pool.data_ptr() + index % parts * layer_bytes

    def attend(index: int) -> None:
        kernels.decode_attention(
            number, number, qkv.data_ptr(), kv_of(index), table.data_ptr(), lens.data_ptr(),
            out.data_ptr(), workspace.data_ptr(), n, q_heads, kv_heads, dim, setting.block_size,
            table.stride(0), width, q_heads * dim, dim**-0.5, ctas, plan.data_ptr(),
            index % LAYERS > 0, handle,
        )  # fmt: skip

    def rotate(_: int) -> None:
        kernels.rope_append(
            number, number, qkv.data_ptr(), rotation.data_ptr(), slots.data_ptr(), pool.data_ptr(),
            n, q_heads, kv_heads, dim, width, setting.block_size, handle,
        )  # fmt: skip

    def read(ctas: int, index: int) -> None:
        kernels.read_stream(kv_of(index), bytes_read, sums.data_ptr(), ctas, handle)

    def repeated(call: Callable[[int], None]) -> float:
        def work(first: int) -> None:
            for i in range(LAYERS):
                call(first + i)

        return time_of(stream, work, LAYERS, samples)

    def replayed(*calls: Callable[[int], None]) -> float:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(LAYERS):
                for call in calls:
                    call(layer)
        return time_of(stream, lambda _: graph.replay(), LAYERS, samples)

    attention = repeated(attend)
    in_layer = replayed(rotate, attend) - replayed(rotate)
    # The yardstick is its best grid.
    reading = min(repeated(functools.partial(read, ctas * more)) for more in (1, 2, 4, 8))
    return {
        "attention_us": round(attention * 1e6, 2),
        "layer_us": round(in_layer * 1e6, 2),
        "read_us": round(reading * 1e6, 2),
        "read_gb_per_s": round(bytes_read / reading / 1e9, 1),
        "share": round(reading / attention, 3),
        "layer_share": round(reading / in_layer, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--sms", type=at_least(1, int), nargs="+", help="multiprocessors; None: all, then 8"
    )
    parser.add_argument(
        "--ctas-per-sm", type=at_least(1, int), default=1, help="thread blocks of a multiprocessor"
    )
    parser.add_argument(
        "--samples", type=at_least(1, int), default=7, help="of 32 calls, whose median counts"
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="q heads and KV heads"
    )
    parser.add_argument(
        "--contexts", nargs="+", choices=CONTEXTS, default=list(CONTEXTS), help="rows x tokens"
    )
    parser.add_argument("--head-dim", type=at_least(1, int), default=128, help="elements")
    arguments = parser.parse_args()
    require_gpu(parser)
    pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    all_sms = torch.cuda.get_device_properties(0).multi_processor_count
    torch.cuda.synchronize()
    results = []
    asked = arguments.sms or [all_sms, 8]
    if max(asked) > all_sms:
        parser.error(f"--sms {max(asked)}: this GPU has {all_sms} multiprocessors")
    for sms in asked:
        green = kernels.GreenContext(0, sms) if sms < all_sms else None
        stream = cuda.Stream() if green is None else cuda.ExternalStream(green.stream)
        for shape, name in itertools.product(arguments.shapes, arguments.contexts):
            setting = Setting(*SHAPES[shape], CONTEXTS[name], arguments.head_dim)
            with cuda.stream(stream):
                ctas = sms * arguments.ctas_per_sm
                result = measure(setting, pool, stream, ctas, arguments.samples)
            line = {"sms": sms, "shape": shape, "contexts": name, **result}
            print(*line.values(), sep="\t", file=sys.stderr)
            results.append(line)
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
