"""Running requests by what they do next, so that no plan has to look through all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from swiftapex.core.request import Placement, Request


def _age(request: Request) -> int:
    return request.request_id


def _turn(request: Request) -> tuple[int, int]:
    return request.last_served, request.request_id


class _Group:
    """Requests in the order of `key`. Those that come last go to the end; others make it sort."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self.members: dict[int, Request] = {}
        self._key = key
        self._sorted = True

    def add(self, request: Request) -> None:
        members = self.members
        if members and self._sorted:
            self._sorted = self._key(next(reversed(members.values()))) < self._key(request)
        members[request.request_id] = request

    def ordered(self) -> Iterable[Request]:
        if not self._sorted:
            self.members = {r.request_id: r for r in sorted(self.members.values(), key=self._key)}
            self._sorted = True
        return self.members.values()


class RequestIndex:
    """Every running request in one of four groups: GPU decodes and prefills (oldest first), CPU
    decodes at a token boundary (least recently served first), and what is in flight.

    Whoever changes a request calls `touch`; it is filed anew at the next question, since a token
    may be booked in between. A decode that stays where it is needs no touch, unless its turn
    (`last_served`) is what its group is ordered by.
    """

    def __init__(self) -> None:
        self._gpu, self._cpu = _Group(_age), _Group(_turn)
        self._prefills, self._in_flight = _Group(_age), _Group(_age)
        self._group_of: dict[int, _Group] = {}
        self._touched: dict[int, Request] = {}

    def touch(self, request: Request) -> None:
        self._touched[request.request_id] = request

    def discard(self, request: Request) -> None:
        """It runs no longer."""
        self._touched.pop(request.request_id, None)
        group = self._group_of.pop(request.request_id, None)
        if group is not None:
            del group.members[request.request_id]

    @property
    def gpu_decodes(self) -> Iterable[Request]:
        self._file()
        return self._gpu.ordered()

    @property
    def cpu_decodes(self) -> Iterable[Request]:
        """At a token boundary."""
        self._file()
        return self._cpu.ordered()

    @property
    def prefills(self) -> Iterable[Request]:
        self._file()
        return self._prefills.ordered()

    @property
    def in_flight(self) -> Iterable[Request]:
        self._file()
        return self._in_flight.ordered()

    def counts(self) -> tuple[int, int, int]:
        """GPU decodes, CPU decodes at a token boundary, requests in flight."""
        self._file()
        groups = self._gpu, self._cpu, self._in_flight
        return len(groups[0].members), len(groups[1].members), len(groups[2].members)

    def _file(self) -> None:
        if not self._touched:
            return
        for request in sorted(self._touched.values(), key=_turn):
            old = self._group_of.get(request.request_id)
            if old is not None:
                del old.members[request.request_id]
            group = self._group(request)
            group.add(request)
            self._group_of[request.request_id] = group
        self._touched.clear()

    def _group(self, request: Request) -> _Group:
        if request.in_flight:
            return self._in_flight
        if not request.is_decoding:
            return self._prefills
        return self._gpu if request.placement is Placement.GPU else self._cpu
