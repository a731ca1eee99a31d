"""Time of one layer's decode attention on the CPU, and its share of the read bandwidth.

The KV pool is larger than the caches and every call reads other blocks of it, in random order, so
that KV comes from memory. The bandwidth is that of a plain read of the same pool by the same
threads, measured in turns with the attention. Prints one JSON object; settings that do not fit
into the pool are listed under "skipped".
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftapex import _kernels_cpu as kernels
from swiftapex.backends.cpu import kv_row, zeroed_huge_pages
from swiftapex.backends.cpu_ops import KV_DTYPE_NUMBERS
from swiftapex.backends.reference import split_heads
from swiftapex.core.ops import AttentionShape

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,  # of KV; the activations are bfloat16
}
SAMPLE_BYTES = 32 << 20  # read per sample, so that a sample is shorter than a scheduler's slice
MAX_STREAM_BYTES = 1 << 30  # of a sample beside a call that reads more than SAMPLE_BYTES
SPIN_US = 200  # threads stay awake between two calls from Python
QUANTILE = 0.2  # of the samples' times: other load on the machine can only lengthen them


@dataclass(frozen=True)
class Setting:
    q_heads: int
    kv_heads: int
    dtype: str
    batch: int
    context: int
    mixed: bool  # contexts spread evenly: see `contexts`
    threads: int
    head_dim: int
    block_size: int

    def contexts(self) -> list[int]:
        if not self.mixed:
            return [self.context] * self.batch
        g = torch.Generator().manual_seed(0)
        low, high = min(16, self.context), 2 * self.context - min(16, self.context)
        return torch.randint(low, high + 1, (self.batch,), generator=g).tolist()

    def token_bytes(self) -> int:
        dtype = DTYPES[self.dtype]
        return self.kv_heads * 2 * kv_row(self.head_dim, dtype) * dtype.itemsize

    def call_bytes(self) -> int:
        return sum(self.contexts()) * self.token_bytes()


class Attention:
    """Calls of one setting, each on the next blocks of a random order of the pool's."""

    def __init__(self, setting: Setting, pool: kernels.ThreadPool, memory: Tensor) -> None:
        s, dtype = setting, DTYPES[setting.dtype]
        block = (s.kv_heads, 2, s.block_size, kv_row(s.head_dim, dtype))
        num_blocks = memory.numel() // (s.block_size * s.token_bytes())
        used = num_blocks * s.block_size * s.token_bytes()
        self.kv = memory[:used].view(dtype).view(num_blocks, *block)
        self.setting, self.pool = setting, pool
        self.shape = AttentionShape(s.q_heads, s.kv_heads, s.head_dim, s.block_size)
        lens = torch.tensor(s.contexts(), dtype=torch.int32)
        blocks = [-(-n // s.block_size) for n in lens.tolist()]
        self.tables = list(self._tables(num_blocks, blocks))  # kept alive: calls hold addresses
        activations = torch.bfloat16 if dtype is torch.int8 else dtype
        self.qkv = torch.randn(s.batch, s.q_heads + 2 * s.kv_heads, s.head_dim).to(activations)
        self.out = torch.empty(s.batch, s.q_heads, s.head_dim, dtype=activations)
        self.plan = kernels.DecodePlan(
            lens.data_ptr(), s.batch, s.kv_heads, s.block_size, s.threads
        )
        self.calls = itertools.cycle([self._arguments(table) for table in self.tables])

    def _tables(self, num_blocks: int, blocks: list[int]) -> Iterator[Tensor]:
        order = torch.randperm(num_blocks, dtype=torch.int32)
        for begin in range(0, num_blocks - sum(blocks) + 1, sum(blocks)):
            table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
            for row, n in enumerate(blocks):
                table[row, :n] = order[begin : begin + n]
                begin += n
            yield table

    def _arguments(self, table: Tensor) -> tuple[Any, ...]:
        """Made beforehand: they take longer than a short call."""
        s = self.setting
        q, k, v = split_heads(self.qkv, self.shape)
        return (
            self.pool,
            self.plan,
            KV_DTYPE_NUMBERS[self.qkv.dtype],
            KV_DTYPE_NUMBERS[self.kv.dtype],
            *(x.data_ptr() for x in (q, k, v, self.out, self.kv, table)),
            *(x.stride(0) for x in (q, k, v, self.out, table)),
            s.q_heads,
            s.head_dim,
            self.shape.scale,
        )

    def __call__(self) -> None:
        kernels.paged_decode_attention(*next(self.calls))


def timed(call: Callable[[], object], repeats: int) -> float:
    """Mean seconds of one call."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def undisturbed(samples: list[float]) -> float:
    return sorted(samples)[int(QUANTILE * len(samples))]


def measure(setting: Setting, pool: kernels.ThreadPool, memory: Tensor, seconds: float) -> Any:
    attention = Attention(setting, pool, memory)
    sample_bytes = min(max(SAMPLE_BYTES, setting.call_bytes()), MAX_STREAM_BYTES, memory.numel())
    starts = itertools.cycle(range(0, memory.numel() - sample_bytes + 1, sample_bytes))

    def stream() -> None:
        kernels.read_stream(pool, memory.data_ptr() + next(starts), sample_bytes)

    attention()
    all_cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cpus)})  # the calling thread is the pool's thread 0
    repeats = max(1, SAMPLE_BYTES // setting.call_bytes())
    attention_s: list[float] = []
    stream_s: list[float] = []
    end = time.perf_counter() + seconds
    while len(attention_s) < 3 or time.perf_counter() < end:
        attention_s.append(timed(attention, repeats))
        stream_s.append(timed(stream, 1))
    os.sched_setaffinity(0, all_cpus)
    layer_s, sample_s = undisturbed(attention_s), undisturbed(stream_s)
    stream_gb_s = sample_bytes / sample_s / 1e9
    read_gb_s = setting.call_bytes() / layer_s / 1e9
    group = setting.q_heads // setting.kv_heads
    return {
        **asdict(setting),
        "us_per_layer": round(layer_s * 1e6, 2),
        "gb_per_s": round(read_gb_s, 2),
        "stream_gb_per_s": round(stream_gb_s, 2),
        "share": round(read_gb_s / stream_gb_s, 3),
        # 4 operations per query head for each pair of K and V elements
        "gflop_per_s": round(read_gb_s * 2 * group / DTYPES[setting.dtype].itemsize, 1),
    }


def torch_us(setting: Setting) -> float | None:
    """scaled_dot_product_attention over contiguous KV; None where that is mixed, int8 or slow."""
    s, dtype = setting, DTYPES[setting.dtype]
    if s.mixed or dtype is torch.int8 or s.call_bytes() > 1 << 28:
        return None
    torch.set_num_threads(s.threads)
    copies = max(1, (256 << 20) // s.call_bytes())
    q = torch.randn(s.batch, s.q_heads, 1, s.head_dim).to(dtype)
    kv = torch.zeros(copies, 2, s.batch, s.kv_heads, s.context, s.head_dim, dtype=dtype)
    turn = itertools.cycle(range(copies))

    def call() -> None:
        k, v = kv[next(turn)]
        F.scaled_dot_product_attention(q, k, v, enable_gqa=s.q_heads != s.kv_heads)

    call()
    first = timed(call, 1)
    return round(timed(call, max(1, int(0.3 / first))) * 1e6, 2)


def fits(setting: Setting, memory_bytes: int) -> bool:
    blocks = sum(-(-n // setting.block_size) for n in setting.contexts())
    return blocks * setting.block_size * setting.token_bytes() <= memory_bytes


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    for heads, threads, dtype, context, batch in itertools.product(
        args.heads, args.threads, args.dtypes, args.contexts, args.batches
    ):
        q_heads, kv_heads = (int(n) for n in heads.split(":"))
        yield Setting(
            q_heads,
            kv_heads,
            dtype,
            batch,
            context,
            args.mixed,
            threads,
            args.head_dim,
            args.block_size,
        )


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """One panel per number of query and kv heads, dtype and threads; one line per batch size."""
    import matplotlib.pyplot as plt

    panels: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for r in results:
        title = f"{r['q_heads']}:{r['kv_heads']} {r['dtype']}, {r['threads']} threads"
        panels.setdefault(title, {}).setdefault(r["batch"], []).append((r["context"], r["share"]))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.5 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        for batch, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch}")
        axes.set_title(title, fontsize=8)
        axes.set(xscale="log", ylim=(0, 1.05))
    grid[0, 0].legend(fontsize=6)
    figure.supxlabel("context (tokens)")
    figure.supylabel("share of read bandwidth")
    figure.savefig(path, bbox_inches="tight", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", nargs="+", default=["32:32", "32:8", "32:4"], metavar="Q:KV")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"], choices=DTYPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64, 128])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 1024, 4096, 16384])
    parser.add_argument("--mixed", action="store_true", help="contexts from 16 to twice each")
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--isa", default="", choices=["", *kernels.available_isas()])
    parser.add_argument("--memory-mib", type=int, default=2048, help="size of the KV pool")
    parser.add_argument("--seconds", type=float, default=0.6, help="per setting")
    parser.add_argument("--torch", action="store_true", help="also time torch's SDPA")
    parser.add_argument("--plot", type=Path, help="write a figure here")
    args = parser.parse_args()

    kernels.set_isa_cap(args.isa)
    memory = zeroed_huge_pages((args.memory_mib << 20,), torch.uint8).fill_(0)
    cpus = sorted(os.sched_getaffinity(0))
    pools = {n: kernels.ThreadPool(n, cpus[:n], spin_us=SPIN_US) for n in args.threads}
    results: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for setting in settings(args):
        if not fits(setting, memory.numel()):
            skipped.append(asdict(setting))
            continue
        result = measure(setting, pools[setting.threads], memory, args.seconds)
        if args.torch:
            result["torch_us_per_layer"] = torch_us(setting)
        results.append(result)
        print(*result.values(), file=sys.stderr)
    print(json.dumps({"isa": kernels.isa(), "results": results, "skipped": skipped}, indent=1))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
