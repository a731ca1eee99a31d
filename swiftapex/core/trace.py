"""Spans of a few iterations from the middle of a run, as a Chrome trace.

A run's length is not known while it runs, and a trace of all of it would not fit in memory. So the
recorder is active in windows of `iterations` iterations: window after window at first, then at
starts that grow by a quarter each time. What can no longer lie in the middle is dropped: whatever
the run's length, at most about 16 windows are held, and the best one begins within about an
eighth of the middle. Of each pipeline one example, two iterations in a row, outlives that.

Open the file in chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

GPU, CPU_ATTENTION, COPIES, SCHEDULER = LANES = ("GPU", "CPU attention", "copies", "scheduler")
_GROWTH = 1.25


class Span(NamedTuple):
    """Work on one lane; times are time.perf_counter seconds."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TracedIteration:
    """An iteration that was recorded; times as in `Span`."""

    index: int
    pipeline: str
    start_s: float
    end_s: float


class TraceRecorder:
    """Records spans while `active`. `TraceRecorder(0)` never is, and costs one comparison.

    Spans may come from any thread. Callers that build a span's arguments should ask `active`
    first; `span` itself drops what arrives in between windows.
    """

    def __init__(self, iterations: int = 50) -> None:
        self.active = False
        self._size = iterations
        self._total = 0  # iterations begun
        self._first = 0  # iteration of this recorder
        self._window_start = 0
        self._began_s: dict[int, float] = {}  # recorded iterations, in order
        self._spans: dict[int, list[Span]] = {}
        self._pipelines: dict[int, str] = {}
        self._current: list[Span] = []

    def restart(self, iterations: int) -> None:
        """Forgets what was recorded, and from the next iteration on is a new recorder of windows of
        so many iterations (0: records nothing)."""
        self.active = False
        self._size = iterations
        self._first = self._window_start = self._total
        for table in (self._began_s, self._spans, self._pipelines):
            table.clear()

    def begin_iteration(self, index: int) -> None:
        """Call at the start of iteration `index` (0, 1, 2, ...)."""
        self._total = index + 1
        if self._size == 0:
            return
        if index >= self._window_start + self._size:
            grown = int(self._window_start * _GROWTH)
            self._window_start = max(self._window_start + self._size, grown)
            self._drop_what_is_too_early()
        if self.active or index >= self._window_start:
            self._began_s[index] = time.perf_counter()  # after a window: the end of its last one
        self.active = index >= self._window_start
        if self.active:
            self._current = self._spans.setdefault(index, [])

    def tag(self, pipeline: str) -> None:
        """Says which pipeline the current iteration ran."""
        if self.active:
            self._pipelines[self._total - 1] = pipeline

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Adds work on `lane` (one of LANES) to the current iteration; args are shown with it."""
        if self.active:
            self._current.append(Span(lane, name, start_s, end_s, args))

    def pipelines(self) -> list[str]:
        """Of the iterations that are held, in order of appearance."""
        return list(dict.fromkeys(self._pipelines.values()))

    def example(self, pipeline: str) -> list[TracedIteration]:
        """Two iterations in a row that ran `pipeline`: with as many kinds of work as possible, and
        near the run's middle. One where no two in a row are held; none where none is."""
        candidates = [index for index, ran in self._pipelines.items() if ran == pipeline]
        if not candidates:
            return []
        first = self._best_example(candidates)
        pair = [index for index in (first, first + 1) if self._pipelines.get(index) == pipeline]
        spans = [self._iteration_span(index) for index in pair]
        return [
            TracedIteration(index, pipeline, span.start_s, span.end_s)
            for index, span in zip(pair, spans, strict=True)
        ]

    def spans_between(self, start_s: float, end_s: float) -> list[Span]:
        """All work that overlaps with an interval, whichever iteration noted it: attention on the
        CPU is noted when its result is taken, which may be an iteration later."""
        return [
            span
            for spans in self._spans.values()
            for span in spans
            if span.end_s > start_s and span.start_s < end_s
        ]

    def recorded_iterations(self) -> range:
        """The iterations that `write` would write: `iterations` of them, nearest the middle."""
        target = (self._total - self._size) / 2
        starts = self._possible_starts()
        if starts:
            start = min(starts, key=lambda index: abs(index - target))
            return range(start, start + self._size)
        return range(self._first, min(self._total, self._first + self._size))

    def write(self, path: Path | str) -> None:
        """Writes the Chrome trace; times count from the first written iteration, in µs."""
        iterations = self.recorded_iterations()
        spans = [span for index in iterations for span in self._spans[index]]
        spans += [self._iteration_span(index) for index in iterations]
        origin = min((span.start_s for span in spans), default=0.0)
        lanes = dict.fromkeys((*LANES, *(span.lane for span in spans)))
        threads = {lane: thread for thread, lane in enumerate(lanes, start=1)}
        events = [event for lane, thread in threads.items() for event in _lane_events(lane, thread)]
        for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": threads[span.lane],
                    "name": span.name,
                    "ts": round((span.start_s - origin) * 1e6, 3),
                    "dur": round((span.end_s - span.start_s) * 1e6, 3),
                    "args": span.args,
                }
            )
        document = {"displayTimeUnit": "ms", "traceEvents": events}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def _possible_starts(self) -> list[int]:
        """Recorded iterations that are followed by enough recorded ones to fill a window."""
        recorded, size = list(self._spans), self._size
        return [
            first
            for first, last in zip(recorded, recorded[size - 1 :], strict=False)
            if last - first == size - 1
        ]

    def _drop_what_is_too_early(self) -> None:
        """The middle only moves on: of the possible starts before it, the last is enough."""
        middle = (self._total - self._size) / 2
        first_kept = max((s for s in self._possible_starts() if s <= middle), default=0)
        early: dict[str, list[int]] = {}
        for index, pipeline in self._pipelines.items():
            if index < first_kept:
                early.setdefault(pipeline, []).append(index)
        examples = {self._best_example(indices) + i for indices in early.values() for i in range(3)}
        tables: tuple[dict[int, Any], ...] = (self._spans, self._began_s, self._pipelines)
        for table in tables:
            for index in [i for i in table if i < first_kept and i not in examples]:
                del table[index]

    def _best_example(self, candidates: list[int]) -> int:
        """The first iteration of the pair that is most worth looking at."""

        def worth(first: int) -> tuple[bool, int, bool, float]:
            pipelines, pair = self._pipelines, (first, first + 1)
            is_pair = pipelines.get(first) == pipelines.get(first + 1)
            kinds = [
                {
                    (span.name, span.args.get("sub_batch"))
                    for span in self._spans.get(index, ())
                    if span.lane in (GPU, CPU_ATTENTION)
                }
                for index in pair
            ]
            is_followed = first + 2 in self._spans  # so that work noted late is there
            return is_pair, min(map(len, kinds)), is_followed, -abs(first - self._total / 2)

        return max(candidates, key=worth)

    def _iteration_span(self, index: int) -> Span:
        """The whole iteration, around the spans in it; the newest one ends with its last span."""
        start = self._began_s[index]
        end = self._began_s.get(index + 1)
        if end is None:
            end = max((span.end_s for span in self._spans[index]), default=start)
        args = {"iteration": index, "pipeline": self._pipelines.get(index)}
        return Span(SCHEDULER, f"iteration {index}", start, max(start, end), args)


def _lane_events(lane: str, thread: int) -> list[dict[str, Any]]:
    """A lane's name and its place from the top."""
    common = {"ph": "M", "pid": 1, "tid": thread}
    return [
        {**common, "name": "thread_name", "args": {"name": lane}},
        {**common, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]
