"""Cohorts of CPU decodes in flight: which there are, and how large a new one should be."""

from __future__ import annotations

from collections.abc import Iterable

_ROWS_PER_COHORT = 16  # less of the CPU's work in a task, and its fixed cost shows
_ENOUGH = 8
_MOST_ROWS = 64
_FEWEST, _MOST = 2, 32


class CohortBook:
    """The cohorts that have been planned and not all come back. Only their requests: what they
    wait for is the workers' concern."""

    def __init__(self) -> None:
        self._members: list[frozenset[int]] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def largest(self) -> int:
        """Rows of the largest one: so many may join a batch at any layer."""
        return max(map(len, self._members), default=0)

    def add(self, request_ids: Iterable[int]) -> None:
        members = frozenset(request_ids)
        if members:
            self._members.append(members)

    def settle(self, in_flight: frozenset[int]) -> None:
        """Forgets those that have come back. An aborted member counts until its cohort does."""
        if not all(members <= in_flight for members in self._members):
            left = (members & in_flight for members in self._members)
            self._members = [members for members in left if members]


def cohorts_wanted(num_cpu: int, setting: int | None) -> int:
    """How many cohorts `num_cpu` CPU decodes should form: the setting, or one per 16, but not more
    than 8 unless those had more than 64 each; within [2, 32]. A cohort that has come back waits for
    the GPU to be where it joins: one alone leaves the CPU idle meanwhile, and of three there are
    times when none is left to work on (docs/results/gpu_idle.json); many pay a task's fixed cost
    each, and gain little."""
    if setting is not None:
        return setting
    wanted = max(min(num_cpu // _ROWS_PER_COHORT, _ENOUGH), num_cpu // _MOST_ROWS)
    return min(max(wanted, _FEWEST), _MOST)
