"""Which passes are recorded, and for which numbers of rows. No torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

HYBRID_SEEN_BEFORE = 3  # passes of a kind with CPU rows before one is recorded

Recorded = TypeVar("Recorded")


def padded_rows(rows: int) -> int:
    """Rows of the graph that serves `rows`: 1, 2, 4, 8, 12 .. 32, 40, 48 .. 64, 80, 96 .."""
    if rows <= 2:
        return rows
    step = 4 if rows <= 32 else 8 if rows <= 64 else 16
    return -(-rows // step) * step


def recorded_rows(most: int) -> list[int]:
    """Numbers of decodes that have every graph recorded which up to `most` decodes need."""
    return sorted({min(padded_rows(rows), most) for rows in range(1, most + 1)})


class Recordings(Generic[Recorded]):
    """What was recorded of passes, by their kind: a function and numbers of rows.

    A kind has to come `seen_before` times first: a recording costs as much of the host's time as
    some launched passes, and memory. `most` are kept. Where more kinds than that come in turn, each
    new one would push out one that is needed again soon; so it has to find one that was not used in
    the last `disused` passes.
    """

    def __init__(self, seen_before: int, most: int, disused: int = 256) -> None:
        self._seen_before = seen_before
        self._most = most
        self._disused = disused
        self._kept: OrderedDict[Hashable, Recorded] = OrderedDict()  # least recently used first
        self._used: dict[Hashable, int] = {}  # the pass
        self._seen: Counter[Hashable] = Counter()
        self._passes = 0

    def find(self, kind: Hashable) -> Recorded | None:
        """For one more pass of this kind."""
        self._passes += 1
        if kind not in self._kept:
            return None
        self._kept.move_to_end(kind)
        self._used[kind] = self._passes
        return self._kept[kind]

    def may_add(self, kind: Hashable) -> bool:
        """Whether this pass, for which nothing was found, is to be recorded: there is room now."""
        self._seen[kind] += 1
        if self._seen[kind] <= self._seen_before:
            return False
        if len(self._kept) >= self._most:
            oldest = next(iter(self._kept))
            if self._passes - self._used[oldest] < self._disused:
                return False
            self.drop(oldest)
        return True

    def add(self, kind: Hashable, recorded: Recorded) -> None:
        self._kept[kind] = recorded
        self._used[kind] = self._passes

    def drop(self, kind: Hashable) -> None:
        """It begins anew."""
        del self._kept[kind], self._used[kind], self._seen[kind]

    def clear(self) -> None:
        self._kept.clear()
        self._used.clear()
        self._seen.clear()
