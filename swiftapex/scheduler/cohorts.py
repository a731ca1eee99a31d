"""Cohorts of CPU decodes in flight: which there are, and how large a new one should be."""

from __future__ import annotations

from collections.abc import Iterable

from swiftapex.core.errors import ConfigError

_ROWS_PER_COHORT = 16  # less of the CPU's work in a task, and its fixed cost shows
_ENOUGH = 8
_MOST_ROWS = 64
_FEWEST, _MOST = 2, 32


class CohortBook:
    """The cohorts that have been planned and not all come back. Only their requests: what they
    wait for is the workers' concern."""

    def __init__(self) -> None:
        self._members: list[frozenset[int]] = []
        self._num_settled = 0  # of them, the first ones: all members were in flight at `settle`
        self.largest = 0  # rows of the largest one: so many may join a batch at any layer

    def __len__(self) -> int:
        return len(self._members)

    def add(self, request_ids: Iterable[int]) -> None:
        members = frozenset(request_ids)
        if members:
            self._members.append(members)
            self.largest = max(self.largest, len(members))

    def settle(self, in_flight: frozenset[int], returned: frozenset[int]) -> None:
        """Forgets those that have come back. `returned`: what was in flight before and is no longer
        in `in_flight`; new ones may have come back at once. An aborted member counts until its
        cohort does."""
        if not returned and self._num_settled == len(self._members):
            return
        settled, new = self._members[: self._num_settled], self._members[self._num_settled :]
        left = [m if m.isdisjoint(returned) else m - returned for m in settled]
        left += [members & in_flight for members in new]
        self._members = [members for members in left if members]
        self._num_settled = len(self._members)
        self.largest = max(map(len, self._members), default=0)

    def check_integrity(self, in_flight: frozenset[int]) -> None:
        """Raises AssertionError unless, between two plans, it holds exactly what is in flight."""
        assert self._num_settled == len(self._members)
        assert sorted(i for members in self._members for i in members) == sorted(in_flight)
        assert self.largest == max(map(len, self._members), default=0)


def check_cohorts(setting: int | None) -> None:
    """ConfigError for a policy's argument `cohorts` that is out of bounds."""
    if setting is not None and not _FEWEST <= setting <= _MOST:
        raise ConfigError(
            f"cohorts: expected an integer from {_FEWEST} to {_MOST} or null, got {setting}"
        )


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
