"""Two iterations of a pipeline as the trace recorded them, laid out for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swiftapex.core.trace import CPU_ATTENTION, GPU, Span, TracedIteration, TraceRecorder

SHOWN_LAYERS = 6


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Iterations of one pipeline in a row, and all work that overlaps with them in time."""

    pipeline: str
    iterations: tuple[TracedIteration, ...]
    spans: tuple[Span, ...]

    @property
    def num_layers(self) -> int:
        return 1 + max((_layer(span) for span in self.spans), default=-1)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A stretch of time of one iteration, and what it shows in words."""

    title: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A span as it is drawn: milliseconds from the picture's origin, cut at the excerpt's ends."""

    lane: str
    name: str
    sub_batch: int | str | None
    layer: int | None
    start_ms: float
    length_ms: float


def take_snapshots(trace: TraceRecorder) -> tuple[Snapshot, ...]:
    """One per pipeline of which the trace holds an iteration that computed something."""
    snapshots = []
    for pipeline in trace.pipelines():
        iterations = trace.example(pipeline)
        spans = trace.spans_between(iterations[0].start_s, iterations[-1].end_s)
        if any(span.lane in (GPU, CPU_ATTENTION) for span in spans):
            snapshots.append(Snapshot(pipeline, tuple(iterations), tuple(spans)))
    return tuple(snapshots)


def whole(snapshot: Snapshot) -> Excerpt:
    """Both iterations."""
    first, last = snapshot.iterations[0], snapshot.iterations[-1]
    return Excerpt("", first.start_s, last.end_s)


def excerpts(snapshot: Snapshot) -> list[Excerpt]:
    """A handful of layers of each iteration: the first ones, unless the CPU side works on later
    ones (cohorts that are few reach only a few layers per pass). All where they are few."""
    return [_excerpt(snapshot, iteration) for iteration in snapshot.iterations]


def bars(snapshot: Snapshot, excerpt: Excerpt, origin_s: float) -> list[Bar]:
    """The work within an excerpt, in order of time."""
    placed = []
    for span in sorted(snapshot.spans, key=lambda span: span.start_s):
        start, end = max(span.start_s, excerpt.start_s), min(span.end_s, excerpt.end_s)
        if start < end:
            sub_batch, layer = span.args.get("sub_batch"), span.args.get("layer")
            begin_ms, length_ms = (start - origin_s) * 1e3, (end - start) * 1e3
            placed.append(Bar(span.lane, span.name, sub_batch, layer, begin_ms, length_ms))
    return placed


def _excerpt(snapshot: Snapshot, iteration: TracedIteration) -> Excerpt:
    title = f"iteration {iteration.index}"
    times = _layer_times(snapshot.spans, iteration)
    if len(times) <= SHOWN_LAYERS + 2:
        return Excerpt(title, iteration.start_s, iteration.end_s)
    first = _interesting_layer(snapshot.spans, times)
    last = first + SHOWN_LAYERS - 1
    start_s = iteration.start_s if first == 0 else times[first][0]
    return Excerpt(f"{title}, layers {first} to {last}", start_s, times[last][1])


def _layer_times(spans: Sequence[Span], iteration: TracedIteration) -> list[tuple[float, float]]:
    """When the GPU side began and ended each layer; empty where it did not walk all of them."""
    times: dict[int, tuple[float, float]] = {}
    for span in spans:
        inside = iteration.start_s <= span.start_s and span.end_s <= iteration.end_s
        if span.lane == GPU and inside and _layer(span) >= 0:
            start_s, end_s = times.get(_layer(span), (span.start_s, span.end_s))
            times[_layer(span)] = (min(start_s, span.start_s), max(end_s, span.end_s))
    is_complete = sorted(times) == list(range(len(times)))
    return [times[layer] for layer in sorted(times)] if is_complete else []


def _interesting_layer(spans: Sequence[Span], times: Sequence[tuple[float, float]]) -> int:
    """Where the excerpt begins: at 0 if the CPU side has about as much to do there as anywhere."""
    begun = [span.start_s for span in spans if span.lane == CPU_ATTENTION]

    def work(first: int) -> int:
        start_s, end_s = times[first][0], times[first + SHOWN_LAYERS - 1][1]
        return sum(start_s <= begin_s < end_s for begin_s in begun)

    starts = range(len(times) - SHOWN_LAYERS + 1)
    best = max(starts, key=work)
    return 0 if 2 * work(0) >= work(best) else best


def _layer(span: Span) -> int:
    return int(span.args.get("layer", -1))
