"""What recorded passes with CPU decodes are replayed, on a GPU or on its stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def noted_replays(
    lane: type[Any], beside: Callable[[Any], object] = lambda lane: None
) -> Iterator[list[int]]:
    """The number of sub-batches of each replay meanwhile. `lane` is `CudaCpuLane`, as it was
    imported; `beside` is called with the one that replays, before each and after it."""
    replay, noted = lane.replay, []

    def noting(self: Any, recorded: Any, batches: Any, launch: Any) -> None:
        noted.append(len(batches))
        beside(self)
        replay(self, recorded, batches, launch)
        beside(self)

    with mock.patch.object(lane, "replay", noting):
        yield noted
