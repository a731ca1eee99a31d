"""Running requests by what they do next, so that no plan has to look through all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from swiftapex.core.request import GPU, Request

_age = attrgetter("request_id")
_turn = attrgetter("last_served", "request_id")
_AT_ONCE = 16  # requests that are looked at together, or as many as were by then


class _Group:
    """Requests by their id, in the order of `key`. Most that come go to the end."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self.members: dict[int, Request] = {}
        self.key = key

    def add(self, requests: list[Request]) -> None:
        if len(requests) > 1:
            requests.sort(key=self.key)
        self.append(requests)

    def append(self, requests: list[Request]) -> None:
        """Adds requests that are in order among themselves."""
        key, members = self.key, self.members
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


@dataclass(slots=True)
class _Filed:
    """A running request and where it is, side by side in memory: a cohort has dozens of them."""

    request: Request
    group: _Group | None = None  # None: it is in flight
    reads: int = 0  # tokens of KV that a visit of it on the CPU reads


class RequestIndex:
    """Every running request in one of four groups, by its id: GPU decodes and prefills (oldest
    first), CPU decodes at a token boundary (least recently served first), and what is in flight,
    which is only counted.

    Whoever changes a request calls `touch`; it is filed anew at the next question, with all others
    that were, since a token may be booked in between. A GPU decode that stays where it is needs no
    touch; CPU decodes that were served are told together (`serve`): of hundreds in each plan only
    the turn changes, and the tokens that they read grow by one.
    """

    def __init__(self) -> None:
        self._gpu, self._cpu, self._prefills = _Group(_age), _Group(_turn), _Group(_age)
        self._num_in_flight = 0
        self._filed: dict[int, _Filed] = {}
        self._touched: dict[int, Request] = {}
        self._ages: list[int] = []  # heap of ids that are, or were, CPU decodes at a boundary
        self._in_ages: set[int] = set()
        self._cpu_tokens = 0

    def touch(self, request: Request) -> None:
        self._touched[request.request_id] = request

    def serve(self, request_ids: Iterable[int]) -> None:
        """CPU decodes, in flight until now or not, have had their turn, all the same one, and each
        gains a token before the next question, unless it is discarded. What was touched is left to
        the next question."""
        served, cpu, touched, filed_of = [], self._cpu, self._touched, self._filed
        idle = cpu.members
        for request_id in sorted(request_ids):
            if request_id in touched:
                continue
            filed = filed_of[request_id]
            if filed.group is cpu:
                del idle[request_id]
            else:
                self._num_in_flight -= 1
                filed.group = cpu
                self._note_age(request_id)
            filed.reads += 1
            served.append(filed.request)
        self._cpu_tokens += len(served)
        if served:
            cpu.append(served)

    def park(self, requests: Iterable[Request]) -> None:
        """CPU decodes of theirs have left for a pass: they read what they did."""
        for request in requests:
            self._entry(request).group = None
            self._num_in_flight += 1

    def discard(self, request: Request) -> None:
        """It runs no longer."""
        self._touched.pop(request.request_id, None)
        if request.request_id in self._filed:
            self._cpu_tokens -= self._entry(request).reads
            del self._filed[request.request_id]

    @property
    def gpu_decodes(self) -> dict[int, Request]:
        if self._touched:
            self._file()
        return self._gpu.members

    @property
    def cpu_decodes(self) -> dict[int, Request]:
        """At a token boundary."""
        if self._touched:
            self._file()
        return self._cpu.members

    def cpu_decodes_by_age(self) -> Iterator[Request]:
        """At a token boundary, oldest first. To be read before anything changes."""
        if self._touched:
            self._file()
        while self._ages and self._ages[0] not in self._cpu.members:
            self._in_ages.remove(heappop(self._ages))
        if not self._ages:
            return
        yield self._cpu.members[self._ages[0]]  # who asks mostly wants no more
        ages = self._ages.copy()
        heappop(ages)
        while ages:
            request = self._cpu.members.get(heappop(ages))
            if request is not None:
                yield request

    @property
    def cpu_tokens(self) -> int:
        """Tokens of KV that one visit of all requests on the CPU reads, prompts that are on their
        way there included."""
        if self._touched:
            self._file()
        return self._cpu_tokens

    @property
    def prefills(self) -> dict[int, Request]:
        if self._touched:
            self._file()
        return self._prefills.members

    def counts(self) -> tuple[int, int, int]:
        """GPU decodes, CPU decodes at a token boundary, requests in flight."""
        if self._touched:
            self._file()
        return len(self._gpu.members), len(self._cpu.members), self._num_in_flight

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises AssertionError unless all that run, and nothing else, is where a look at each of
        them would put it, and in order."""
        if self._touched:
            self._file()
        groups: dict[_Group | None, list[Request]] = {}
        for request in running:
            groups.setdefault(self._group(request), []).append(request)
        for group in (self._gpu, self._cpu, self._prefills):
            expected = sorted(groups.pop(group, []), key=group.key)
            assert list(group.members.values()) == expected, "requests are not where they belong"
            assert list(group.members) == [request.request_id for request in expected]
        assert self._num_in_flight == len(groups.get(None, []))
        assert self._filed.keys() == {request.request_id for request in running}
        on_cpu = [request.num_tokens for request in running if request.placement is not GPU]
        assert self._cpu_tokens == sum(on_cpu) == sum(each.reads for each in self._filed.values())
        assert len(self._ages) == len(self._in_ages) and self._in_ages >= self._cpu.members.keys()

    def _file(self) -> None:
        groups: dict[_Group, list[Request]] = {}
        for request in self._touched.values():
            filed = self._entry(request)
            filed.group = group = self._group(request)
            tokens = 0 if request.placement is GPU else request.num_tokens
            self._cpu_tokens += tokens - filed.reads
            filed.reads = tokens
            if group is None:
                self._num_in_flight += 1
                continue
            groups.setdefault(group, []).append(request)
            if group is self._cpu:
                self._note_age(request.request_id)
        self._touched.clear()
        for group, requests in groups.items():
            group.add(requests)

    def _entry(self, request: Request) -> _Filed:
        """A new one, or the one that there is, taken out of its group."""
        filed = self._filed.get(request.request_id)
        if filed is None:
            filed = self._filed[request.request_id] = _Filed(request)
        elif filed.group is None:
            self._num_in_flight -= 1
        else:
            del filed.group.members[request.request_id]
        return filed

    def _note_age(self, request_id: int) -> None:
        if request_id not in self._in_ages:
            self._in_ages.add(request_id)
            heappush(self._ages, request_id)

    def _group(self, request: Request) -> _Group | None:
        if request.in_flight:
            return None
        if not request.is_decoding:
            return self._prefills
        return self._gpu if request.placement is GPU else self._cpu
