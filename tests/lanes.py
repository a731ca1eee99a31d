"""Stand-ins for the CPU's threads and the copy lane, late on purpose, replayable from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from swiftapex.core.ops import AttentionBatch, AttentionShape, Backend


class LateTicket:
    """Does its work only when it is asked for the last time before it is ready, or is waited for:
    whatever was changed under it in between shows in the result."""

    def __init__(self, delay: int, work: Callable[[], Tensor]) -> None:
        self._delay = delay  # times that `ready` says no; 0: the work is done at once
        self._work: Callable[[], Tensor] | None = work
        self._output: Tensor | None = None
        if delay == 0:
            self.run()

    def run(self) -> None:
        if self._work is not None:
            self._output, self._work = self._work(), None

    def ready(self) -> bool:
        if self._delay > 0:
            self._delay -= 1
            return False
        self.run()
        return True

    def wait(self) -> Tensor:
        self.run()
        if self._output is None:
            raise RuntimeError("the attention result has been taken already")
        output, self._output = self._output, None
        return output


class LateLane:
    """CPU attention that is ready after a random number of questions, out of order."""

    work = None
    link_bytes = None

    def __init__(self, seed: int, backend: Backend, longest: int = 6) -> None:
        self._random = random.Random(seed)
        self._longest = longest
        self._backend = backend
        self.num_submitted = 0

    def submit(
        self, layer: int, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> LateTicket:
        self.num_submitted += 1
        delay = self._random.choice((0, 0, 1, self._random.randint(1, self._longest)))
        return LateTicket(delay, lambda: self._backend.attend(kv, batch, shape, qkv))

    def check(self) -> None:
        """Nothing: tickets raise it."""

    def close(self) -> None:
        pass


class LateCopies:
    """Copies in order, each as late as its order allows: when it, or a later one, is waited for.
    Some are done at once, with all before them."""

    link_bytes = None

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._queue: list[LateTicket] = []
        self.num_submitted = 0

    def submit(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> _LateCopy:
        self.num_submitted += 1
        source_blocks, target_blocks = list(source_blocks), list(target_blocks)

        def copy() -> Tensor:
            target[target_blocks] = source[source_blocks].to(target.dtype)
            return target

        self._queue.append(LateTicket(1, copy))
        ticket = _LateCopy(self, self._queue[-1])
        if self._random.random() < 0.3:
            self.run_until(self._queue[-1])
        return ticket

    def run_until(self, last: LateTicket) -> None:
        while last in self._queue:
            self._queue.pop(0).run()

    def close(self) -> None:
        for ticket in self._queue:
            ticket.run()


class _LateCopy:
    def __init__(self, lane: LateCopies, ticket: LateTicket) -> None:
        self._lane = lane
        self._ticket = ticket

    def wait(self) -> Tensor:
        self._lane.run_until(self._ticket)
        return self._ticket.wait()
