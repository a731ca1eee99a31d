"""The CPU side: decode attention over KV in host memory, and copies between the sides, on native
threads beside the launching thread. The hand-off is described in kernels_cpu/task_lane.h."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

import swiftapex._kernels_cpu as kernels
from swiftapex.backends.cpu import (
    PlannedDecodes,
    attend_chunk,
    decode_arguments,
    kv_row,
    plan_decodes,
    takes_native,
)
from swiftapex.backends.cpu_ops import KV_DTYPE_NUMBERS, reject
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.ops import AttentionBatch, AttentionShape
from swiftapex.core.plan import CpuWork

Result = TypeVar("Result")

_MAX_PLANS = 64  # batches in flight whose plans are kept: 32 cohorts and both sub-batches of a pass


class _Task(Protocol):
    def ready(self) -> bool: ...
    def wait(self) -> None: ...
    def check(self) -> None: ...
    def span(self) -> tuple[float, float]: ...


class LaneTicket(Generic[Result]):
    """One call in flight on a lane. Its memory is kept alive by the lane until the call is done,
    whether or not someone holds the ticket."""

    def __init__(self, task: _Task, result: Result) -> None:
        self._task = task
        self._result: Result = result

    def ready(self) -> bool:
        """Whether the done word is set: `wait` would return at once. Never blocks."""
        return self._task.ready()

    def wait(self) -> Result:
        """The result, once: blocks without the GIL and resets the done word. RuntimeError the
        second time, or if the lane was closed before the call began; what the call raised."""
        self._task.wait()
        return self._result

    def check(self) -> None:
        """In place of `wait`, where a stream awaits and resets the done word, which may be another
        call's by now: blocks until this one is done and raises what it raised."""
        self._task.check()

    def span(self) -> tuple[float, float]:
        """Start and end of the work, in seconds of time.perf_counter. RuntimeError before it is
        done."""
        return self._task.span()


class CpuLane:
    """Decode attention on threads of its own, one call at a time.

    `order`: "fifo", or "deepest_first", which prefers later layers. In both, a call whose data
    have not arrived is overtaken by calls whose data have: they are for other rows or layers and
    do not depend on each other. `kernel`: "tuned", or "plain" for comparisons.
    """

    link_bytes = None

    def __init__(
        self,
        threads: ThreadPlan,
        order: Literal["fifo", "deepest_first"] = "fifo",
        kernel: Literal["tuned", "plain"] = "tuned",
    ) -> None:
        self._runtime = kernels.AttentionRuntime(
            threads.count, list(threads.cpus), order, kernel=kernel
        )
        self._num_threads = threads.count
        self._plans: OrderedDict[int, PlannedDecodes] = OrderedDict()  # by id of their batch

    def submit(
        self,
        layer: int,
        kv: Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        qkv: Tensor,
        *,
        out: Tensor | None = None,
        arrival: Tensor | None = None,
        done: Tensor | None = None,
    ) -> LaneTicket[Tensor]:
        """Starts the attention of decode rows and returns at once; the ticket's result is
        O [rows, q_heads * head_dim].

        kv: one layer. qkv [rows, q_heads + 2 * kv_heads, head_dim], dense. Nobody changes qkv or
        the batch's tensors before the call is done. `out` takes the result, else new memory does.
        `arrival` and `done` are the hand-off's words, one int32 each in host memory; without
        `arrival` the data are taken to be there.

        Shapes that the native kernel does not take are attended here and now.
        """
        if batch.chunk_lens:
            raise ValueError("the CPU side attends to decodes only, not to prefill chunks")
        rows = batch.num_decodes
        if out is None:
            out = torch.empty(rows, shape.num_q_heads * shape.head_dim, dtype=qkv.dtype)
        words = (_word_address("arrival", arrival), _word_address("done", done))
        if not takes_native(shape):
            if any(words) or kv.dtype is torch.int8:
                raise ValueError(f"no native attention for {shape}")
            start_s = time.perf_counter()
            _attend_here(kv, batch, shape, qkv, out)
            return LaneTicket(_Ran(start_s), out)
        planned = self._plan(batch, shape)
        task = self._runtime.submit(
            (planned, kv, qkv, out, arrival, done),
            *words,
            layer,
            planned.plan,
            *decode_arguments(planned, kv, qkv, out),
        )
        return LaneTicket(task, out)

    def _plan(self, batch: AttentionBatch, shape: AttentionShape) -> PlannedDecodes:
        """Made at the first layer that a batch reaches, kept for the others."""
        key = id(batch)
        planned = self._plans.get(key)
        if planned is None or planned.batch is not batch or planned.shape != shape:
            planned = self._plans[key] = plan_decodes(batch, shape, self._num_threads)
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return planned

    def check(self) -> None:
        """Nothing: the host takes all results, by tickets that raise it."""

    @property
    def busy_s(self) -> float:
        """Seconds that calls took so far, those in progress not included."""
        return 1e-9 * float(self._runtime.busy_ns)

    @property
    def work(self) -> CpuWork:
        """What calls have attended so far, by the time that `busy_s` counts."""
        return CpuWork(self.busy_s, *self._runtime.attended)

    def close(self) -> None:
        """Lets the running call finish, cancels the others, ends the threads."""
        self._runtime.close()
        self._plans.clear()


class CopyLane:
    """Copies KV blocks from one layer's KV to another's, one request at a time and strictly in the
    order of submission: a later one may write what an earlier one has read."""

    link_bytes = None

    def __init__(self) -> None:
        self._lane = kernels.CopyLane()

    def submit(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
        *,
        arrival: Tensor | None = None,
        done: Tensor | None = None,
    ) -> LaneTicket[None]:
        """source and target [blocks, kv_heads, 2, block_size, head_dim], dense, of any dtypes;
        int8 has longer rows, see `kv_row`, and is quantised from and to the others.
        Block source_blocks[i] goes to target_blocks[i]; one that does not exist is the waiter's
        IndexError, and nothing is copied. Words as in `CpuLane.submit`."""
        source_number = KV_DTYPE_NUMBERS.get(source.dtype)
        target_number = KV_DTYPE_NUMBERS.get(target.dtype)
        head_dim = source.shape[4] - kv_row(0, source.dtype)
        if (
            source_number is None
            or target_number is None
            or source.shape[1:4] != target.shape[1:4]
            or head_dim != target.shape[4] - kv_row(0, target.dtype)
            or not (source.is_contiguous() and target.is_contiguous())
            or not (source.is_cpu and target.is_cpu)
        ):
            reject("copy_blocks", source=source, target=target)
        task = self._lane.submit(
            (source, target, arrival, done),
            _word_address("arrival", arrival),
            _word_address("done", done),
            source.data_ptr(),
            target.data_ptr(),
            source_number,
            target_number,
            source.shape[0],
            target.shape[0],
            source.shape[1:3].numel(),
            source.shape[3],
            head_dim,
            source_blocks,
            target_blocks,
        )
        return LaneTicket(task, None)

    @property
    def busy_s(self) -> float:
        """Seconds that copies took so far, the one in progress not included."""
        return 1e-9 * float(self._lane.busy_ns)

    def close(self) -> None:
        """Lets the running copy finish, cancels the others, ends the thread."""
        self._lane.close()


def _word_address(name: str, word: Tensor | None) -> int:
    """0: no word is given."""
    if word is None:
        return 0
    if word.dtype is not torch.int32 or word.numel() != 1 or not word.is_cpu:
        reject(f"submit: {name} is one int32", word=word)
    return word.data_ptr()


def _attend_here(
    kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor, out: Tensor
) -> None:
    heads = out.view(-1, shape.num_q_heads, shape.head_dim)
    for row, context in enumerate(batch.context_lens.tolist()):
        rows = slice(row, row + 1)
        attend_chunk(kv, batch.block_table[row], context, shape, qkv[rows], heads[rows])


class _Ran:
    """Stands for a task that was done when it was submitted."""

    def __init__(self, start_s: float) -> None:
        self._span = (start_s, time.perf_counter())
        self._taken = False

    def ready(self) -> bool:
        return not self._taken

    def wait(self) -> None:
        if self._taken:
            raise RuntimeError("the result was taken before")
        self._taken = True

    def check(self) -> None:
        self.wait()

    def span(self) -> tuple[float, float]:
        return self._span
