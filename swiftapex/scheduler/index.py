"""Running requests by what they do next, so that no plan has to look through all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import Any

from swiftapex.core.request import GPU, Request

_age = attrgetter("request_id")
_turn = attrgetter("last_served", "request_id")
_last_served = attrgetter("last_served")
_AT_ONCE = 16  # requests that are looked at together, or as many as were by then


class _Group:
    """Requests by their id, in the order of `key`. Most that come go to the end."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self.members: dict[int, Request] = {}
        self._key = key

    def add(self, requests: list[Request]) -> None:
        if len(requests) > 1:
            requests.sort(key=self._key)
        self.append(requests)

    def append(self, requests: list[Request]) -> None:
        """Adds requests that are in order among themselves."""
        key, members = self._key, self.members
        first, behind = key(requests[0]), []
        while members and key(next(reversed(members.values()))) > first:
            behind.append(members.popitem()[1])
        if behind:
            requests = sorted(behind + requests, key=key)
        members.update(zip([r.request_id for r in requests], requests, strict=True))


class Lazily:
    """The first of many requests, looked at one by one: with a thousand of them, looking at each
    would take longer than all the rest of a plan."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._seen: list[Request] = []
        self._more = iter(requests)

    def __getitem__(self, index: int) -> Request:
        if index >= len(self._seen):
            self.first(index + 1)
        return self._seen[index]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.groups())

    def groups(self) -> Iterator[list[Request]]:
        """All in order, a few at a time."""
        yield self._seen
        while some := list(islice(self._more, max(_AT_ONCE, len(self._seen)))):
            self._seen += some
            yield some

    def first(self, count: int) -> list[Request]:
        """At most `count`."""
        self._seen.extend(islice(self._more, max(0, count - len(self._seen))))
        return self._seen[:count]


class RequestIndex:
    """Every running request in one of four groups, by its id: GPU decodes and prefills (oldest
    first), CPU decodes at a token boundary (least recently served first), and what is in flight.

    Whoever changes a request calls `touch`; it is filed anew at the next question, with all others
    that were, since a token may be booked in between. A GPU decode that stays where it is needs no
    touch; CPU decodes that were served are told together (`serve`): of hundreds in each plan only
    the turn changes, and the tokens that they read grow by one.
    """

    def __init__(self) -> None:
        self._gpu, self._cpu = _Group(_age), _Group(_turn)
        self._prefills, self._in_flight = _Group(_age), _Group(_turn)
        self._group_of: dict[int, _Group] = {}
        self._touched: dict[int, Request] = {}
        self._served: set[int] = set()
        self._turns = 0  # in which those were served
        self._ages: list[int] = []  # heap of ids that are, or were, CPU decodes at a boundary
        self._in_ages: set[int] = set()
        self._reads: Counter[int] = Counter()  # tokens of KV that a visit of each on the CPU reads
        self._cpu_tokens = 0

    def touch(self, request: Request) -> None:
        self._touched[request.request_id] = request

    def serve(self, request_ids: Collection[int]) -> None:
        """CPU decodes, in flight until now or not, have had their turn, all the same one, and each
        gains a token before the next question, unless it is discarded."""
        self._served.update(request_ids)
        self._turns += bool(request_ids)

    def park(self, requests: Iterable[Request]) -> None:
        """CPU decodes of theirs have left for a pass: there their order does not matter, and they
        read what they did."""
        group_of, in_flight = self._group_of, self._in_flight
        for request in requests:
            request_id = request.request_id
            group = group_of.get(request_id)
            if group is not None:
                del group.members[request_id]
            group_of[request_id] = in_flight
            in_flight.members[request_id] = request

    def discard(self, request: Request) -> None:
        """It runs no longer."""
        self._touched.pop(request.request_id, None)
        self._served.discard(request.request_id)
        self._cpu_tokens -= self._reads.pop(request.request_id, 0)
        group = self._group_of.pop(request.request_id, None)
        if group is not None:
            del group.members[request.request_id]

    @property
    def gpu_decodes(self) -> dict[int, Request]:
        self._file()
        return self._gpu.members

    @property
    def cpu_decodes(self) -> dict[int, Request]:
        """At a token boundary."""
        self._file()
        return self._cpu.members

    def cpu_decodes_by_age(self) -> Iterator[Request]:
        """At a token boundary, oldest first. To be read before anything changes."""
        self._file()
        while self._ages and self._ages[0] not in self._cpu.members:
            self._in_ages.remove(heappop(self._ages))
        ages = self._ages.copy()
        while ages:
            request = self._cpu.members.get(heappop(ages))
            if request is not None:
                yield request

    @property
    def cpu_tokens(self) -> int:
        """Tokens of KV that one visit of all requests on the CPU reads, prompts that are on their
        way there included."""
        self._file()
        return self._cpu_tokens

    @property
    def prefills(self) -> dict[int, Request]:
        self._file()
        return self._prefills.members

    def counts(self) -> tuple[int, int, int]:
        """GPU decodes, CPU decodes at a token boundary, requests in flight."""
        self._file()
        groups = self._gpu, self._cpu, self._in_flight
        return len(groups[0].members), len(groups[1].members), len(groups[2].members)

    def _file(self) -> None:
        if not (self._touched or self._served):
            return
        filed: dict[_Group, list[Request]] = {}
        group_of, reads = self._group_of, self._reads
        for request_id, request in self._touched.items():
            if (old := group_of.get(request_id)) is not None:
                del old.members[request_id]
            group = self._group(request)
            group_of[request_id] = group
            filed.setdefault(group, []).append(request)
            if group is not self._in_flight:  # what leaves for a pass reads what it did
                tokens = 0 if request.placement is GPU else request.num_tokens
                self._cpu_tokens += tokens - reads.get(request_id, 0)
                reads[request_id] = tokens
        if self._served:
            self._served.difference_update(self._touched)  # those were filed as they are by now
        self._touched.clear()
        if self._served:
            self._cpu.append(self._take_served())
        if on_cpu := filed.get(self._cpu):
            self._note_ages({request.request_id for request in on_cpu})
        for group, requests in filed.items():
            group.add(requests)

    def _take_served(self) -> list[Request]:
        """What `serve` was told of, out of its groups, in the order of their turns."""
        served, idle, in_flight = self._served, self._cpu.members, self._in_flight.members
        returned = served.difference(idle)
        self._note_ages(returned)
        self._group_of.update(zip(returned, repeat(self._cpu)))
        requests = [(in_flight if i in returned else idle).pop(i) for i in sorted(served)]
        self._reads.update(served)  # each reads one token more
        self._cpu_tokens += len(served)
        served.clear()
        if self._turns > 1:
            requests.sort(key=_last_served)  # keeps the older ones of a turn before the younger
        self._turns = 0
        return requests

    def _note_ages(self, request_ids: set[int]) -> None:
        new = request_ids - self._in_ages
        self._in_ages |= new
        for request_id in new:
            heappush(self._ages, request_id)

    def _group(self, request: Request) -> _Group:
        if request.in_flight:
            return self._in_flight
        if not request.is_decoding:
            return self._prefills
        return self._gpu if request.placement is GPU else self._cpu
