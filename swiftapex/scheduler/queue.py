"""Requests in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from swiftapex.core.request import Request, RequestState

_age = attrgetter("request_id")
_MEMORY = 0.98  # of what ended requests say, from one to the next
_ENOUGH = 8  # of them say more than limits do
_SAMPLE = 64  # running requests whose limits are asked


@dataclass(slots=True)
class _Ended:
    """Of requests that have ended with output, the newer ones counting more."""

    count: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def add(self, request: Request) -> None:
        self.count = _MEMORY * self.count + 1
        self.prompt_tokens = _MEMORY * self.prompt_tokens + len(request.prompt_ids)
        self.output_tokens = _MEMORY * self.output_tokens + request.num_generated


class RequestQueue:
    """First come, first served. `waiting` own no blocks; `running` own blocks. Both are ordered by
    arrival (the request id): a request that was preempted takes its old place among the others."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._running_by_id: dict[int, Request] = {}
        self._ended = _Ended()
        self._came_later = 0

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
    def first_waiting(self) -> Request:
        """The oldest one; there is one."""
        return self._waiting[0]

    def running_request(self, request_id: int) -> Request | None:
        """The running request of this id."""
        return self._running_by_id.get(request_id)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_came_later(self) -> int:
        """Requests that came while others ran, since there were none."""
        return self._came_later

    def prompt_share(self) -> float:
        """Tokens of prompt for each token of output: of requests that ended lately or, until some
        have, of those that run, as long as they may get."""
        ended = self._ended
        if ended.count >= _ENOUGH:
            return ended.prompt_tokens / ended.output_tokens
        sample = [*islice(self._running, _SAMPLE), *islice(self._waiting, _SAMPLE)]
        prompts = sum(len(request.prompt_ids) for request in sample)
        return prompts / max(1, sum(request.sampling.max_tokens for request in sample))

    def forget_ended(self) -> None:
        """What comes next is another workload."""
        self._ended = _Ended()

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        insort(self._waiting, request, key=_age)
        self._came_later += bool(self._running)

    def start(self, request: Request) -> None:
        """The oldest waiting request becomes running."""
        assert self._waiting and self._waiting[0] is request, "requests start in order"
        self._waiting.pop(0)
        request.state = RequestState.RUNNING
        insort(self._running, request, key=_age)
        self._running_by_id[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """A running request goes back to the waiting ones."""
        self._stop(request)
        request.state = RequestState.WAITING
        insort(self._waiting, request, key=_age)

    def remove(self, request: Request) -> None:
        """Takes out a request in any state; it is finished."""
        if request.num_generated:
            self._ended.add(request)
        if request.state is RequestState.WAITING:
            _take_out(self._waiting, request)
        elif request.state is RequestState.RUNNING:
            self._stop(request)
        request.state = RequestState.FINISHED
        if not len(self):
            self._came_later = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless states fit the lists and both are in arrival order."""
        assert all(r.state is RequestState.WAITING for r in self._waiting)
        assert all(r.state is RequestState.RUNNING for r in self._running)
        for requests in (self._waiting, self._running):
            ids = [r.request_id for r in requests]
            assert ids == sorted(set(ids)), "requests are out of order"
        assert not set(self.waiting) & set(self.running)
        assert self._running_by_id == {r.request_id: r for r in self._running}

    def _stop(self, request: Request) -> None:
        _take_out(self._running, request)
        del self._running_by_id[request.request_id]


def _take_out(requests: list[Request], request: Request) -> None:
    """Of those in order of arrival."""
    index = bisect_left(requests, request.request_id, key=_age)
    assert requests[index] is request
    del requests[index]
