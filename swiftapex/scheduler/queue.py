"""Requests in the order in which they are served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from swiftapex.core.request import Request, RequestState


class RequestQueue:
    """First come, first served. `waiting` own no blocks; `running` own blocks, oldest first.

    The order is that of arrival at the queue (the request id), for running requests too: a request
    that was preempted takes its old place among the others.
    """

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[Request]:
        yield from self._running
        yield from self._waiting

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def newest_running(self) -> Request:
        return self._running[-1]

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        self._waiting.append(request)

    def start(self, request: Request) -> None:
        """The head of the waiting requests becomes running."""
        assert self._waiting and self._waiting[0] is request, "requests start in order"
        self._waiting.popleft()
        request.state = RequestState.RUNNING
        self._running.append(request)

    def preempt(self, request: Request) -> None:
        """The newest running request goes back to the head of the waiting ones."""
        assert self._running and self._running[-1] is request, "the newest is preempted first"
        self._running.pop()
        request.state = RequestState.WAITING
        self._waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Takes out a request in any state; it is finished."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            self._running.remove(request)
        request.state = RequestState.FINISHED

    def check_integrity(self) -> None:
        """Raises AssertionError unless states fit the lists and both are in arrival order."""
        assert all(r.state is RequestState.WAITING for r in self._waiting)
        assert all(r.state is RequestState.RUNNING for r in self._running)
        ids = [r.request_id for r in self]
        assert ids == sorted(set(ids)), "requests are out of order"
