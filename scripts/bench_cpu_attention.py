"""Time of one layer's decode attention on the CPU, and its share of the read bandwidth.

The KV pool is larger than the caches and every call reads other blocks of it, in random order, so
that KV comes from memory. The bandwidth is that of a plain read of the same pool by the same pinned
threads, before and after each sample of the attention; the share of a setting is the median over
its samples. "share_of_equal_read" compares with reads of as many bytes as a call's instead: what a
short call still lacks there is the attention's, the rest is that of any work that forks and joins.
Samples in which the system kept a thread off its CPU are discarded. Prints one JSON
object; settings that do not fit into the pool are listed under "skipped".

Without choices: the whole grid of heads, dtypes, batches and contexts, a batch of mixed lengths,
and a single short request. --quick: the settings that say most, within a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arguments import at_least
from torch import Tensor

from swiftapex import _kernels_cpu as kernels
from swiftapex.backends.cpu import kv_row, zeroed_huge_pages
from swiftapex.backends.cpu_ops import KV_DTYPE_NUMBERS
from swiftapex.backends.reference import split_heads
from swiftapex.backends.threads import cpu_threads
from swiftapex.core.ops import AttentionShape

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,  # of KV; the activations are bfloat16
}
KERNELS = {"tuned": kernels.paged_decode_attention, "plain": kernels.plain_decode_attention}
THREAD_BYTES = 4 << 20  # that a thread reads in a sample: shorter than a scheduler's slice
MAX_STREAM_BYTES = 1 << 30  # of a sample beside a call that reads more than that
MAX_OFF_CPU = 0.02  # of a sample's time that a thread may have waited for its CPU
SPIN_US = 200  # threads stay awake between two calls from Python
MIXED_CONTEXTS = (16, 8192)


@dataclass(frozen=True)
class Setting:
    """`context`: tokens of every row; 0: spread evenly over MIXED_CONTEXTS."""

    q_heads: int
    kv_heads: int
    dtype: str
    batch: int
    context: int
    threads: int
    head_dim: int
    block_size: int

    def contexts(self) -> list[int]:
        if self.context > 0:
            return [self.context] * self.batch
        g, (low, high) = torch.Generator().manual_seed(0), MIXED_CONTEXTS
        return torch.randint(low, high + 1, (self.batch,), generator=g).tolist()

    def token_bytes(self) -> int:
        dtype = DTYPES[self.dtype]
        return self.kv_heads * 2 * kv_row(self.head_dim, dtype) * dtype.itemsize

    def call_bytes(self) -> int:
        return sum(self.contexts()) * self.token_bytes()

    def sample_bytes(self) -> int:
        return THREAD_BYTES * self.threads

    def stream_bytes(self) -> int:
        return min(max(self.sample_bytes(), self.call_bytes()), MAX_STREAM_BYTES)

    def equal_read_bytes(self) -> int:
        return min(self.call_bytes(), MAX_STREAM_BYTES)

    def pool_bytes(self) -> int:
        blocks = sum(-(-n // self.block_size) for n in self.contexts())
        return blocks * self.block_size * self.token_bytes()


class Attention:
    """Calls of one setting, each on the next blocks of a random order of the pool's."""

    def __init__(
        self, setting: Setting, pool: kernels.ThreadPool, memory: Tensor, kernel: str
    ) -> None:
        s, dtype = setting, DTYPES[setting.dtype]
        block = (s.kv_heads, 2, s.block_size, kv_row(s.head_dim, dtype))
        num_blocks = memory.numel() // (s.block_size * s.token_bytes())
        used = num_blocks * s.block_size * s.token_bytes()
        self.kv = memory[:used].view(dtype).view(num_blocks, *block)
        self.setting, self.pool, self.kernel = setting, pool, KERNELS[kernel]
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
        self.kernel(*next(self.calls))


class OffCpu:
    """Seconds that each of the pool's threads, the calling one among them, was ready to run and
    did not: field 2 of schedstat (Linux, Documentation/scheduler/sched-stats). A hypervisor's
    theft does not show there."""

    def __init__(self) -> None:
        self._files = []
        for task in Path("/proc/self/task").iterdir():
            name = (task / "comm").read_text()
            if name.startswith("swiftapex-") or int(task.name) == os.getpid():
                self._files.append(os.open(task / "schedstat", os.O_RDONLY))

    def seconds(self) -> list[float]:
        return [1e-9 * int(os.pread(file, 100, 0).split()[1]) for file in self._files]

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def timed(call: Callable[[], object], repeats: int = 1) -> float:
    """Mean seconds of one call."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


@dataclass(frozen=True)
class Sample:
    attention_s: float
    stream_s: float  # mean of one before and one after
    equal_read_s: float
    disturbed: bool


def reads(pool: kernels.ThreadPool, memory: Tensor, num_bytes: int) -> Callable[[], None]:
    """A plain read of so many bytes, each call of the next ones."""
    starts = itertools.cycle(range(0, memory.numel() - num_bytes + 1, num_bytes))

    def read() -> None:
        kernels.read_stream(pool, memory.data_ptr() + next(starts), num_bytes)

    return read


def samples(
    setting: Setting, pool: kernels.ThreadPool, memory: Tensor, kernel: str, seconds: float
) -> tuple[list[Sample], int]:
    """Undisturbed ones, and how many others there were; at least three in all."""
    attention = Attention(setting, pool, memory, kernel)
    stream = reads(pool, memory, setting.stream_bytes())
    equal_read = reads(pool, memory, setting.equal_read_bytes())
    repeats = max(1, setting.sample_bytes() // setting.call_bytes())
    off_cpu = OffCpu()

    def sample() -> Sample:
        before = off_cpu.seconds()
        kernels.read_stream(pool, memory.data_ptr(), 4096)  # wakes the threads up
        begin = time.perf_counter()
        before_s, equal_read_s = timed(stream), timed(equal_read, repeats)
        attention_s, after_s = timed(attention, repeats), timed(stream)
        allowed = MAX_OFF_CPU * (time.perf_counter() - begin)
        waited = max(b - a for a, b in zip(before, off_cpu.seconds(), strict=True))
        stream_s = (before_s + after_s) / 2
        return Sample(attention_s, stream_s, equal_read_s, waited > allowed)

    sample()
    end = time.perf_counter() + seconds
    taken: list[Sample] = []
    while len(taken) < 3 or time.perf_counter() < end:
        taken.append(sample())
    off_cpu.close()
    kept = [each for each in taken if not each.disturbed]
    return kept, len(taken) - len(kept)


def measure(
    setting: Setting, pool: kernels.ThreadPool, memory: Tensor, kernel: str, seconds: float
) -> dict[str, Any]:
    all_cpus = os.sched_getaffinity(0)
    first = cpu_threads(setting.threads).cpus[:1]
    os.sched_setaffinity(0, first or all_cpus)  # the calling thread is the pool's thread 0
    kept, discarded = samples(setting, pool, memory, kernel, seconds)
    os.sched_setaffinity(0, all_cpus)
    result = asdict(setting) | {"samples": len(kept), "discarded": discarded}
    if not kept:
        return result
    layer_s = statistics.median(each.attention_s for each in kept)
    stream_s = statistics.median(each.stream_s for each in kept)
    rate = setting.call_bytes() / setting.stream_bytes()
    shares = [rate * each.stream_s / each.attention_s for each in kept]
    equal_rate = setting.call_bytes() / setting.equal_read_bytes()
    equal_shares = [equal_rate * each.equal_read_s / each.attention_s for each in kept]
    quartiles = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    group, itemsize = setting.q_heads // setting.kv_heads, DTYPES[setting.dtype].itemsize
    return result | {
        "share": round(statistics.median(shares), 3),
        "share_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "share_of_equal_read": round(statistics.median(equal_shares), 3),
        "us_per_layer": round(layer_s * 1e6, 2),
        "gb_per_s": round(setting.call_bytes() / layer_s / 1e9, 2),
        "stream_gb_per_s": round(setting.stream_bytes() / stream_s / 1e9, 2),
        # 4 operations per query head for each pair of K and V elements
        "gflop_per_s": round(setting.call_bytes() / layer_s / 1e9 * 2 * group / itemsize, 1),
    }


def torch_us(setting: Setting) -> float | None:
    """scaled_dot_product_attention over contiguous KV; None where that is mixed, int8 or slow."""
    s, dtype = setting, DTYPES[setting.dtype]
    if s.context == 0 or dtype is torch.int8 or s.call_bytes() > 1 << 28:
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
    first = timed(call)
    return round(timed(call, max(1, int(0.3 / first))) * 1e6, 2)


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    sizes = list(itertools.product(args.batches, args.contexts))
    if args.quick:
        sizes = [(16, 1024)]
    for (batch, context), dtype, heads, threads in itertools.product(
        [*sizes, (1, 512), (128, 0)], args.dtypes, args.heads, args.threads
    ):
        q_heads, kv_heads = (int(n) for n in heads.split(":"))
        yield Setting(
            q_heads, kv_heads, dtype, batch, context, threads, args.head_dim, args.block_size
        )


def kv_pool(num_bytes: int) -> Tensor:
    """Memory whose elements, and scales of int8, are of ordinary size in every dtype and of both
    signs: about 1 in float16, .01 in the others, int8 near half of its range."""
    memory = zeroed_huge_pages((num_bytes,), torch.uint8)
    pattern = 0x3C + 0x80 * torch.randint(0, 2, (2 << 20,), dtype=torch.uint8)
    memory.view(-1, pattern.numel())[:] = pattern
    return memory


def pool_bytes(wanted: list[Setting], limit_mib: int) -> int:
    """Twice the largest call, at least 2 GiB, at most the limit and half of what is free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    largest = max((setting.pool_bytes() for setting in wanted), default=0)
    return min(max(2 * largest, 2 << 30), limit_mib << 20, free // 2) >> 21 << 21


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """One panel per number of query and kv heads, dtype and threads; one line per batch size.
    Mixed lengths are drawn at their mean."""
    import matplotlib.pyplot as plt

    panels: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for r in results:
        title = f"{r['q_heads']}:{r['kv_heads']} {r['dtype']}, {r['threads']} threads"
        point = (r["context"] or sum(MIXED_CONTEXTS) // 2, r["share"])
        panels.setdefault(title, {}).setdefault(r["batch"], []).append(point)
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.5 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        for batch, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"batch {batch}")
        axes.set_title(title, fontsize=8)
        axes.set(xscale="log", ylim=(0, 1.05))
    grid[0, 0].legend(fontsize=6)
    figure.supxlabel("context (tokens)")
    figure.supylabel("share of read bandwidth")
    figure.savefig(path, bbox_inches="tight", dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a minute: batch 16 of 1,024 tokens")
    parser.add_argument("--heads", nargs="+", default=["32:32", "32:8", "32:4"], metavar="Q:KV")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: all; quick: 16 bits")
    parser.add_argument("--batches", nargs="+", type=at_least(1, int), default=[1, 4, 16, 64, 128])
    parser.add_argument(
        "--contexts", nargs="+", type=at_least(1, int), default=[256, 1024, 4096, 16384]
    )
    parser.add_argument(
        "--threads", nargs="+", type=at_least(1, int), default=[cpu_threads("auto").count]
    )
    parser.add_argument("--head-dim", type=at_least(1, int), default=128)
    parser.add_argument("--block-size", type=at_least(1, int), default=32)
    parser.add_argument("--kernel", default="tuned", choices=KERNELS)
    parser.add_argument("--isa", default="", choices=["", *kernels.available_isas()])
    parser.add_argument(
        "--memory-mib", type=at_least(1, int), default=24576, help="limit of the KV pool"
    )
    parser.add_argument(
        "--seconds", type=at_least(1e-3, float), help="per setting; default 0.6, quick 1.2"
    )
    parser.add_argument("--torch", action="store_true", help="also time torch's SDPA")
    parser.add_argument("--plot", type=Path, help="write a figure here")
    args = parser.parse_args()
    args.dtypes = args.dtypes or [name for name in DTYPES if name != "float32" or not args.quick]
    args.seconds = args.seconds or (1.2 if args.quick else 0.6)
    return args


def main() -> None:
    args = arguments()
    kernels.set_isa_cap(args.isa)
    wanted = list(settings(args))
    memory = kv_pool(pool_bytes(wanted, args.memory_mib))
    plans = {n: cpu_threads(n) for n in args.threads}
    pools = {
        n: kernels.ThreadPool(plan.count, list(plan.cpus), spin_us=SPIN_US)
        for n, plan in plans.items()
    }
    results: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for setting in wanted:
        if setting.pool_bytes() > memory.numel():
            skipped.append(asdict(setting))
            continue
        pool = pools[setting.threads]
        result = measure(setting, pool, memory, args.kernel, args.seconds)
        if args.torch:
            result["torch_us_per_layer"] = torch_us(setting)
        (results if "share" in result else skipped).append(result)
        print(*result.values(), file=sys.stderr)
    print(
        json.dumps(
            {
                "isa": kernels.isa(),
                "kernel": args.kernel,
                "pool_bytes": memory.numel(),
                "results": results,
                "skipped": skipped,
            },
            indent=1,
        )
    )
    if args.plot and results:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
