"""When and by whom a ticket is asked for its result.

With one rank the ticket itself answers. With several, all ranks must merge the same cohorts at the
same layer, without a collective: rank 0 asks its own ticket and publishes the decision in host
shared memory, the others read it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swiftapex.attention import Ticket

_SPIN_S = 0.0005  # then the waiting thread yields between looks


class Readiness(Protocol):
    def agreed(self, ticket: Ticket) -> bool:
        """Whether all ranks take this ticket's result now. Does not wait for the result."""

    def wait(self, ticket: Ticket) -> None:
        """Blocks until the ticket is ready on this rank."""


class OwnReadiness:
    """One rank: the ticket answers."""

    def agreed(self, ticket: Ticket) -> bool:
        return ticket.ready()

    def wait(self, ticket: Ticket) -> None:
        wait_until(ticket.ready)


class Decisions:
    """A ring of decisions in memory that all ranks share: [slots, followers] words each for
    `published` and `ready`, 0 or 1.

    Rank 0 writes `ready`, then sets `published` for every follower; a follower reads `ready`, then
    resets its own `published` word. Rank 0 never overtakes: it waits for a word to be reset before
    it uses the slot again. Stores of one process are seen in order on the machines this runs on
    (x86-64; on AArch64 the interpreter's own locks order them).
    """

    SLOTS = 1024

    def __init__(self, memory: memoryview, num_followers: int) -> None:
        words: NDArray[np.uint32] = np.frombuffer(memory, dtype=np.uint32)
        self.published, self.ready = words[: self.num_words(num_followers)].reshape(
            2, self.SLOTS, num_followers
        )

    @classmethod
    def num_words(cls, num_followers: int) -> int:
        """uint32 words of shared memory that the ring needs, zeroed."""
        return 2 * cls.SLOTS * num_followers


class LeaderReadiness(OwnReadiness):
    """Rank 0: asks its ticket and publishes what it decides."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._count = 0

    def agreed(self, ticket: Ticket) -> bool:
        ready = ticket.ready()
        slot = self._count % Decisions.SLOTS
        published = self._decisions.published[slot]
        wait_until(lambda: not published.any())
        self._decisions.ready[slot] = ready
        published[:] = 1
        self._count += 1
        return ready


class FollowerReadiness(OwnReadiness):
    """Another rank: does as rank 0 decided for the same question. Its own ticket may be later."""

    def __init__(self, decisions: Decisions, follower: int) -> None:
        self._published = decisions.published[:, follower]
        self._ready = decisions.ready[:, follower]
        self._count = 0

    def agreed(self, ticket: Ticket) -> bool:
        slot = self._count % Decisions.SLOTS
        wait_until(lambda: bool(self._published[slot]))
        ready = bool(self._ready[slot])
        self._published[slot] = 0
        self._count += 1
        return ready


class Progress(Protocol):
    """Steps of an asynchronous device, counted in its own order."""

    def post(self, count: int) -> None:
        """The device has made `count` steps once it has done what was launched so far."""

    def reached(self) -> int:
        """The newest count that the device has posted (its low 31 bits)."""


class LaunchAhead:
    """Keeps the launching thread at most `limit` layers ahead of the device.

    A thread that ran far ahead would ask for tickets long before the pass is really there, and
    find none ready. Measured on 8 multiprocessors of an H200 (7B, asynchronous overlap): up to ten
    layers ahead at the end of a pass saves 1.2 % of it, as the device does not wait for the next
    pass to be planned and bound, and the CPU reads 8 % less KV a second, as cohorts miss a pass.
    `progress` None: the device works synchronously, and is always where the thread is. `meanwhile`
    is called at each look at the device.
    """

    def __init__(
        self,
        limit: int = 2,
        progress: Progress | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._limit = limit
        self._progress = progress
        self._meanwhile = meanwhile
        self._launched = 0  # layers

    def layer_launched(self) -> None:
        """Called after a layer's last stage."""
        if self._progress is not None:
            self._launched += 1
            self._progress.post(self._launched)

    def wait_until_near(self) -> None:
        """Blocks until no more than `limit` launched layers are left for the device to do."""
        progress = self._progress
        if progress is not None:
            wait_until(lambda: self._ahead(progress) <= self._limit)

    def _ahead(self, progress: Progress) -> int:
        self._meanwhile()
        return (self._launched - progress.reached()) % 2**31


def wait_until(condition: Callable[[], bool]) -> None:
    """Looks at once, then for a short while again and again, then every 50 µs."""
    spin_until = time.perf_counter() + _SPIN_S
    while not condition():
        if time.perf_counter() > spin_until:
            time.sleep(50e-6)
