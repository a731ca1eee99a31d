"""Cohorts whose CPU attention is in flight. They belong to the worker and outlive pipelines.

A cohort is a set of CPU decodes that stays together until its tokens are complete. Its state is
its layer, its residual, its ticket and its rows' positions (in the bound batch). A ticket is
consumed once, at the layer where the cohort parked: a stale result cannot be taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftapex.attention import Attention, BoundBatch, Ticket
from swiftapex.pipelines.readiness import LaunchAhead, Readiness
from swiftapex.sending import send


@dataclass(slots=True)
class ParkedCohort:
    batch: BoundBatch
    layer: int
    residual: Tensor  # x [rows, hidden] from before the layer's attention
    ticket: Ticket


class ParkedCohorts:
    """In the order of submission. Every pipeline asks `rejoin` at each layer's post-projection."""

    def __init__(
        self, attention: Attention, readiness: Readiness, launch_ahead: LaunchAhead
    ) -> None:
        self._attention = attention
        self._readiness = readiness
        self._launch_ahead = launch_ahead
        self._parked: list[ParkedCohort] = []
        self._dropped: set[int] = set()

    def __bool__(self) -> bool:
        """Whether any cohort is parked."""
        return bool(self._parked)

    @property
    def request_ids(self) -> frozenset[int]:
        """Requests in flight. Those that were dropped count until their cohort rejoins."""
        return frozenset(i for cohort in self._parked for i in cohort.batch.request_ids)

    def park(self, layer: int, batch: BoundBatch, residual: Tensor, qkv: Tensor) -> None:
        """Starts the cohort's attention at `layer`; it waits there for its result."""
        ticket = self._attention.submit(layer, batch, qkv)
        self._parked.append(ParkedCohort(batch, layer, residual, ticket))

    def rejoin(self, layer: int) -> Iterator[tuple[ParkedCohort, Tensor]]:
        """The cohorts parked at `layer` whose result is there, and O [rows, q_heads * head_dim].
        Never blocks on a ticket, but waits until the device is near enough for the question."""
        here = [cohort for cohort in self._parked if cohort.layer == layer]
        if here:
            self._launch_ahead.wait_until_near()
        for cohort in here:
            if self._readiness.agreed(cohort.ticket):
                self._parked.remove(cohort)
                output = cohort.ticket.wait()
                kept, output = self._without_dropped(cohort, output)
                if kept.batch.request_ids:
                    yield kept, output

    def layer_launched(self) -> None:
        """Pipelines say so after each layer that cohorts could join: see LaunchAhead."""
        self._launch_ahead.layer_launched()

    def wait_for_oldest(self) -> None:
        """Blocks until the longest-submitted ticket is ready; returns at once if none is parked."""
        if self._parked:
            self._readiness.wait(self._parked[0].ticket)

    def drop(self, request_ids: Iterable[int]) -> None:
        """These requests leave their cohort when it rejoins: they were aborted."""
        self._dropped.update(request_ids)

    def close(self) -> None:
        """Waits for all attention in flight, since it reads and writes KV. Its results, and what
        went wrong with it, concern nobody any more."""
        for cohort in self._parked:
            with suppress(Exception):
                cohort.ticket.wait()
        self._parked.clear()

    def _without_dropped(self, cohort: ParkedCohort, output: Tensor) -> tuple[ParkedCohort, Tensor]:
        gone = self._dropped.intersection(cohort.batch.request_ids)
        if not gone:
            return cohort, output
        self._dropped -= gone
        keep = [i for i, r in enumerate(cohort.batch.request_ids) if r not in gone]
        index = send(keep, output.device, torch.int64)
        kept = ParkedCohort(
            cohort.batch.select(keep), cohort.layer, cohort.residual[index], cohort.ticket
        )
        return kept, output[index]
