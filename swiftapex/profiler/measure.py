"""What the profiler measures, and how it takes iterations apart into tables. No torch.

Every figure comes from whole iterations of real pipelines, by difference:

    iteration   an iteration of decodes over one token each, less its layers: more rounds of them
    linear      the same iteration's layers: attention over one token each is counted in here; of
                more rows, which only passes with chunks have, the layers without attention
    attention   what longer contexts, chunks or CPU decodes add to an iteration of as many rows
    hand-off    what an asymmetric iteration takes beyond its two sub-batches' linear stages
    layerwise   what a pass of asynchronous overlap without cohorts takes beyond one of GPU decodes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from swiftapex.core.request import Placement
from swiftapex.cost_model import CHUNKS, COHORTS, DECODES, TWO_BATCHES, TWO_DECODES
from swiftapex.costs.tables import Curve, Grid, Line, Tables
from swiftapex.profiler.probe import Probe, Work, decodes

GPU, CPU = Placement.GPU, Placement.CPU
_SEVERAL_ROUNDS = "swiftapex.profiler.rounds:Rounds"
_LINEAR_STAGES = "swiftapex.profiler.rounds:LinearStages"
_ROUNDS = 4  # of that pipeline
_SWEEPS = 2
_LONG_US = 100_000  # iterations from here on are not measured a second time
_MOST_REST = 0.8  # share of an iteration that is not its layers: more is taken for noise
_FINE = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows: GEMM tiles make steps
_COARSE = (384, 512, 768, 1024, 1536, 2048, 3072, 4096)


@dataclass(frozen=True)
class Points:
    """Where the tables are measured. Part of a profile's fingerprint."""

    decode_rows: tuple[int, ...]  # linear stages in iterations of decodes
    chunk_rows: tuple[int, ...]  # and in iterations with chunks, which have more rows
    sampled: tuple[int, ...]
    gpu_requests: tuple[int, ...]
    gpu_tokens: tuple[int, ...]
    chunks: tuple[int, ...]
    prefixes: tuple[int, ...]
    cpu_requests: tuple[int, ...]  # empty: no CPU side
    cpu_tokens: tuple[int, ...]
    copy_blocks: tuple[int, ...]
    max_context: int

    @staticmethod
    def within(
        *,
        max_batch_size: int,
        max_tokens: int,
        max_context: int,
        gpu_tokens: int,
        cpu_tokens: int,
        block_size: int,
    ) -> Points:
        """Points for these limits and KV pools (tokens), so that no reasonable iteration lies far
        beyond the last one. Pools count as the next power of two below: profiles of like pools are
        the same profile."""
        rows = _up_to(_FINE, min(max_batch_size, max_tokens))
        more = tuple(n for n in _COARSE if rows[-1] < n <= max_tokens)
        if max_tokens > (more or rows)[-1]:
            more = (*more, max_tokens)
        requests = _up_to((1, 4, 16, 64, 256), rows[-1])
        gpu_most = min(_power_below(gpu_tokens), requests[-1] * max_context, 2**17)
        cpu_most = min(_power_below(cpu_tokens), requests[-1] * max_context, 2**16)
        longest = max(1, max_context - 1)
        movable = min(gpu_tokens, cpu_tokens, max_context) // block_size
        return Points(
            decode_rows=rows,
            chunk_rows=more,
            sampled=_up_to((1, 64, 256), rows[-1]),
            gpu_requests=requests if gpu_most else (),
            gpu_tokens=_powers(64, gpu_most),
            chunks=_up_to((16, 64, 128, 256, 512, 1024, 2048), min(max_tokens, longest)),
            prefixes=tuple(p for p in (0, 512, 2048, 8192) if p + 16 <= longest) or (0,),
            cpu_requests=_up_to((1, 8, 64, 256), rows[-1]) if cpu_most else (),
            cpu_tokens=_powers(64, cpu_most),
            copy_blocks=_up_to((1, 8, 64), movable) if movable else (),
            max_context=max_context,
        )


def profile(
    probe: Probe, points: Points, num_layers: int, watch: Callable[[float], None] = lambda _: None
) -> Tables:
    """Measures everything. `watch` is told the share that is done, in (0, 1]."""
    return _Measurement(probe, points, num_layers, watch).run()


class _Measurement:
    def __init__(
        self, probe: Probe, points: Points, num_layers: int, watch: Callable[[float], None]
    ) -> None:
        self._probe = probe
        self._points = points
        self._layers = num_layers
        self._watch = watch
        self._done = 0
        self._best: dict[Hashable, float] = {}
        p = points
        self._total = len(p.sampled) * 2 + len(p.decode_rows) + len(p.chunk_rows) + 2
        self._total += len(p.gpu_requests) * len(p.gpu_tokens) + len(p.chunks) * len(p.prefixes)
        layerwise = 2 if probe.runs_ahead else 0
        self._total += len(p.cpu_requests) * (len(p.cpu_tokens) + 2 + layerwise)
        self._total += len(p.copy_blocks)
        self._iteration = Curve([1], [0.0])
        self._linear = Curve([1], [0.0])

    def run(self) -> Tables:
        """In two sweeps: what disturbs a measurement in one seldom does so in the other, and only
        ever adds, so that the shorter time counts. Long iterations are disturbed by less, and are
        most of the profiler's time: once must do for them."""
        for _ in range(_SWEEPS):
            tables = self._sweep()
        self._watch(1.0)
        return tables

    def _sweep(self) -> Tables:
        iteration = self._measure_iteration()
        self._iteration = Curve(iteration.xs, iteration.us)
        linear = self._measure_linear()
        self._linear = Curve(linear.xs, linear.us)
        return Tables(
            num_layers=self._layers,
            linear=linear,
            iteration=iteration,
            gpu_attention=self._measure_gpu_attention(),
            prefill_attention=self._measure_prefill(),
            cpu_attention=self._measure_cpu_attention(),
            hand_off=self._measure_hand_off(),
            layerwise=self._measure_layerwise(),
            copy=self._measure_copies(),
            host_us=self._measure_host(),
        )

    def _measure_iteration(self) -> Line:
        times = []
        for rows in self._points.sampled:
            batch = decodes(GPU, rows, rows)
            one = self._time("sequential", batch)
            several = self._time(_SEVERAL_ROUNDS, batch)
            layers = (several - one) / (_ROUNDS - 1)
            times.append(min(max(0.0, one - layers), _MOST_REST * one))
        return Line(self._points.sampled, tuple(times))

    def _measure_linear(self) -> Line:
        """Iterations that complete one token. Those with chunks are launched anew each time, where
        one of decodes alone may be a graph; and attention over one token for each of a thousand
        rows, which no such iteration has, would be a twentieth of its time."""
        alone = self._points.decode_rows
        times = [self._time("sequential", decodes(GPU, n, n), sampled=1) for n in alone]
        for n in self._points.chunk_rows:
            times.append(self._time(_LINEAR_STAGES, decodes(GPU, n, n), sampled=1))
        rest = self._iteration(1)
        layers = [max(0.0, t - rest) / self._layers for t in times]
        return Line((*alone, *self._points.chunk_rows), tuple(layers))

    def _measure_gpu_attention(self) -> Grid:
        def one(requests: int, tokens: int) -> float:
            batch = decodes(GPU, requests, tokens)
            return self._above(self._time("sequential", batch, sampled=1), requests)

        p = self._points
        longest = p.max_context
        return self._grid(p.gpu_requests, p.gpu_tokens, one, lambda n, t: n < t <= n * longest)

    def _measure_prefill(self) -> Grid:
        def one(chunk: int, prefix: int) -> float:
            return self._above(self._time("sequential", [Work(GPU, prefix, chunk)]), chunk)

        points, longest = self._points, self._points.max_context
        return self._grid(points.chunks, points.prefixes, one, lambda c, p: c + p <= longest)

    def _measure_cpu_attention(self) -> Grid:
        """In a sequential iteration nothing hides it: it is the whole way, words included."""
        p = self._points

        def one(requests: int, tokens: int) -> float:
            batch = decodes(CPU, requests, tokens)
            return self._above(self._time("sequential", batch, sampled=1), requests)

        longest = p.max_context
        tokens = tuple(sorted({*p.cpu_requests, *p.cpu_tokens}))
        return self._grid(
            p.cpu_requests, tokens, one, lambda n, t: t == n or 2 * n <= t <= n * longest
        )

    def _measure_hand_off(self) -> Line:
        p, times = self._points, []
        for rows in p.cpu_requests:
            first, second = decodes(GPU, 1, 1), decodes(CPU, rows, rows)
            whole = self._time("asymmetric", first, second, sampled=1)
            linear = self._linear(1) + self._linear(rows)
            known = self._iteration(1) + self._layers * linear
            if self._probe.runs_ahead:  # the device may have been waiting for the host
                host = self._host_time("asymmetric", first, second)
                known = whole if host > 0.95 * whole else known
            times.append(max(0.0, whole - known) / self._layers)
        return Line(p.cpu_requests, tuple(times))

    def _measure_layerwise(self) -> Line:
        """Where passes are recorded; elsewhere all are launched layer by layer."""
        rows = self._points.cpu_requests if self._probe.runs_ahead else ()
        return Line(rows, tuple(map(self._layerwise, rows)))

    def _layerwise(self, rows: int) -> float:
        batch = decodes(GPU, rows, rows)
        apart, whole = (
            self._time(pipeline, batch, sampled=1) for pipeline in ("async_overlap", "sequential")
        )
        return max(0.0, apart - whole) / self._layers

    def _measure_copies(self) -> Line:
        p = self._points
        times = [self._least(("move", n), partial(self._probe.move_time, n)) for n in p.copy_blocks]
        return Line(tuple(n * self._probe.block_size for n in p.copy_blocks), tuple(times))

    def _measure_host(self) -> dict[str, float]:
        """Where the device works beside the host; elsewhere the host's time is the iteration's."""
        if not self._probe.runs_ahead:
            return {}
        one = decodes(GPU, 1, 1)
        chunk = [*one, Work(GPU, 0, 1)]
        host = {
            DECODES: self._host_time("sequential", one),
            CHUNKS: self._host_time("sequential", chunk),
        }
        host[COHORTS] = host[CHUNKS]  # as launched layer by layer
        if self._points.cpu_requests:
            on_cpu = decodes(CPU, 1, 1)
            host[TWO_DECODES] = self._host_time("asymmetric", one, on_cpu)
            host[TWO_BATCHES] = self._host_time("asymmetric", chunk, on_cpu)
        return host

    def _above(self, measured: float, rows: int) -> float:
        """µs of a layer beyond linear stages of so many rows."""
        rest = self._iteration(1) + self._layers * self._linear(rows)
        return max(0.0, measured - rest) / self._layers

    def _grid(
        self,
        xs: Sequence[int],
        ys: Sequence[int],
        one: Callable[[int, int], float],
        exists: Callable[[int, int], bool],
    ) -> Grid:
        rows: list[tuple[float | None, ...]] = []
        kept = []
        for x in xs:
            row = tuple(one(x, y) if exists(x, y) else None for y in ys)
            if any(value is not None for value in row):
                kept.append(x)
                rows.append(row)
        return Grid(tuple(kept), tuple(ys), tuple(rows)) if kept else Grid()

    def _time(self, pipeline: str, *batches: Sequence[Work], sampled: int | None = None) -> float:
        key = (pipeline, tuple(map(tuple, batches)), sampled)
        return self._least(key, partial(self._probe.time, pipeline, *batches, sampled=sampled))

    def _host_time(self, pipeline: str, *batches: Sequence[Work]) -> float:
        key = ("host", pipeline, tuple(map(tuple, batches)))
        return self._least(key, partial(self._probe.host_time, pipeline, *batches))

    def _least(self, key: Hashable, measure: Callable[[], float]) -> float:
        """The shortest time so far of what `key` stands for."""
        best = self._best.get(key, math.inf)
        if not _LONG_US < best < math.inf:
            best = min(best, measure())
        self._best[key] = best
        self._done += 1
        self._watch(min(1.0, self._done / self._total / _SWEEPS))
        return self._best[key]


def _up_to(values: Iterable[int], most: int) -> tuple[int, ...]:
    """Those of the values that are at most `most`, and `most` itself where it is beyond the last
    of them or lies between two."""
    kept = tuple(v for v in values if v <= most)
    last = max(values)
    return kept if most >= last or (kept and kept[-1] == most) else (*kept, most)


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 0


def _powers(first: int, last: int) -> tuple[int, ...]:
    """first, 4 first, 16 first .. and `last`; only `last` if that is less."""
    if last <= 0:
        return ()
    values = []
    while first < last:
        values.append(first)
        first *= 4
    return (*values, last)
