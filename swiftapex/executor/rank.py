"""A rank of tensor parallelism: a worker in a process of its own, connected to the driver.

The driver sends requests, each the name of a method of `Rank` and its arguments; `Rank` answers
those that say so. A request that fails is answered with a `Failure`, whether it is answered
otherwise or not. Nothing here knows how the process was started.
"""

from __future__ import annotations

import importlib
import mmap
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from swiftapex.backends.collectives import PeerLostError, TorchGroup, join_store, open_store
from swiftapex.backends.threads import bind_rank
from swiftapex.config.schema import EngineConfig, ModelSection
from swiftapex.core.plan import StepPlan, StepResult, Tokens
from swiftapex.core.records import BusyTimes
from swiftapex.core.trace import Span, TraceRecorder
from swiftapex.kv.sizing import KVSizes
from swiftapex.model.shard import Shard
from swiftapex.model.source import open_model
from swiftapex.pipelines.readiness import (
    Decisions,
    FollowerReadiness,
    LeaderReadiness,
    Readiness,
)
from swiftapex.worker.worker import Membership, Worker


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What every rank builds its worker from."""

    model: ModelSection
    engine: EngineConfig
    sizes: KVSizes
    max_model_len: int
    traced: bool  # whether spans may be asked for


@dataclass(frozen=True, slots=True)
class Launched:
    """Rank 0's answer to `execute`. tokens None: they are still to come."""

    completing: tuple[int, ...]
    in_flight: frozenset[int]
    tokens: Tokens | None
    spans: tuple[Span, ...]
    duration_us: float  # from the request's arrival to this answer


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank could not do what it was asked for."""

    kind: str  # the exception's class
    message: str
    where: str  # file:line
    is_echo: bool  # another rank was lost: the cause is there
    request: str  # the name of what it was asked for


class _Spans(TraceRecorder):
    """Hands its spans over instead of keeping them."""

    def take(self) -> tuple[Span, ...]:
        spans, self._current = tuple(self._current), []
        return spans


class Rank:
    """One of `size` ranks on this machine. `device` as in the engine's settings."""

    def __init__(self, connection: Connection, rank: int, size: int, device: str) -> None:
        self._connection = connection
        self._shard = Shard(rank, size)
        self._device = device
        handle = reduction.recv_handle(connection)
        memory = mmap.mmap(handle, decision_bytes(size))
        os.close(handle)  # the mapping stays
        self._decisions = Decisions(memoryview(memory), size - 1)
        self._store: Any = None
        self._group: TorchGroup | None = None
        self._worker: Worker | None = None
        self._spans: _Spans | None = None
        self._results: list[StepResult] = []  # whose tokens nobody has fetched yet
        bind_rank(rank, size)

    def serve(self) -> None:
        """Until `end`, or until the driver is gone."""
        while True:
            try:
                name, args = pickle.loads(self._connection.recv_bytes())
            except EOFError:
                return
            if name == "end":
                break
            try:
                getattr(self, name)(*args)
            except Exception as error:
                self._send(_failure(error, name))
        self._close_worker()
        if self._group is not None:
            self._group.close()

    def open_store(self) -> None:
        """Rank 0. Answers the port at which the ranks meet."""
        self._store = open_store()
        self._send(self._store.port)

    def join(self, port: int, timeout_s: float) -> None:
        """Forms the group. Answers None."""
        shard = self._shard
        store = self._store if shard.is_first else join_store(port, timeout_s)
        self._group = TorchGroup(store, self._device, shard.rank, shard.size, timeout_s)
        self._send(None)

    def start(self, settings: WorkerSettings) -> None:
        """Builds the worker. Answers whether it runs ahead, its device's name, and notes."""
        assert self._group is not None and self._worker is None
        follower = self._shard.rank - 1
        readiness: Readiness = LeaderReadiness(self._decisions)
        if not self._shard.is_first:
            readiness = FollowerReadiness(self._decisions, follower)
        self._spans = _Spans(0) if settings.traced else None
        self._worker = Worker(
            open_model(settings.model),
            settings.engine,
            settings.sizes,
            settings.max_model_len,
            self._spans,
            Membership(self._shard, self._group, readiness),
        )
        worker = self._worker
        self._send((worker.runs_ahead, worker.device_name, worker.notes))

    def execute(self, plan: StepPlan, with_spans: bool) -> None:
        """Launches an iteration. Rank 0 answers `Launched`, the others nothing."""
        assert self._worker is not None
        begin = time.perf_counter()
        if self._spans is not None:
            self._spans.active = with_spans
        result = self._worker.execute(plan)
        spans = () if self._spans is None else self._spans.take()
        if not self._shard.is_first:
            return
        tokens = None
        if self._worker.runs_ahead:
            self._results.append(result)
        else:
            tokens = result.fetch()
        duration_us = (time.perf_counter() - begin) * 1e6
        self._send(Launched(result.completing, result.in_flight, tokens, spans, duration_us))

    def fetch(self) -> None:
        """Rank 0. Answers the tokens of the oldest iteration whose tokens were not answered."""
        self._send(self._results.pop(0).fetch())

    def touch_kv(self) -> None:
        """Answers None."""
        assert self._worker is not None
        self._worker.touch_kv()
        self._send(None)

    def settle_memory(self) -> None:
        """Answers None."""
        assert self._worker is not None
        self._worker.settle_memory()
        self._send(None)

    def memory(self) -> None:
        """Answers this rank's DeviceMemory, or None."""
        assert self._worker is not None
        self._send(self._worker.memory())

    def resize_gpu_kv(self, sizes: KVSizes) -> None:
        """Answers None."""
        assert self._worker is not None
        self._worker.resize_gpu_kv(sizes)
        self._send(None)

    def busy(self) -> None:
        """Answers this rank's BusyTimes."""
        assert self._worker is not None
        self._send(self._worker.busy())

    def call(self, function: str, *args: Any) -> None:
        """Answers what `package.module:function` returns, given the worker: for tests and
        measurements."""
        module, _, name = function.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        self._send(found(self._worker, *args))

    def stop(self) -> None:
        """Ends the worker; another one may be started. Answers None."""
        self._close_worker()
        self._send(None)

    def _close_worker(self) -> None:
        worker, self._worker = self._worker, None
        self._results.clear()
        if worker is not None:
            worker.close()

    def _send(self, answer: object) -> None:
        self._connection.send_bytes(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))


def decision_bytes(size: int) -> int:
    """Shared memory that `size` ranks need to agree on readiness, zeroed."""
    return max(4, 4 * Decisions.num_words(size - 1))


def mean_busy(times: list[BusyTimes]) -> BusyTimes:
    """On average over the ranks, bytes in all; None where one did not measure it."""

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(values) else None

    crossed = [t.link_bytes for t in times if t.link_bytes is not None]
    return BusyTimes(
        mean([t.gpu_s for t in times]),
        mean([t.cpu_s for t in times]),
        sum(crossed) if len(crossed) == len(times) else None,
    )


def _failure(error: Exception, request: str) -> Failure:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename}:{frame.lineno}"
    is_echo = isinstance(error, PeerLostError)
    return Failure(type(error).__name__, str(error), where, is_echo, request)
