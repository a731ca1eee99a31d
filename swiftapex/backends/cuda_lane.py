"""Between a GPU and the CPU side: decode rows handed over (cuda_hand_off.py says how), and copies
of KV."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

import swiftapex._kernels_cuda as kernels
from swiftapex.backends.cpu_lane import CpuLane, LaneTicket
from swiftapex.backends.cpu_ops import DTYPE_NUMBERS
from swiftapex.backends.cuda_bounce import Bounce
from swiftapex.backends.cuda_hand_off import RecordedHandOffs, RecordedTicket, Slot
from swiftapex.backends.cuda_ops import current_stream
from swiftapex.backends.threads import ThreadPlan
from swiftapex.core.ops import AttentionBatch, AttentionShape
from swiftapex.core.plan import CpuWork

_COPY_BLOCKS = 16  # thread blocks of a copy that converts: few beside the computing ones
# What the stream uses until the event, and the tasks that it awaits before.
_Returning = tuple[torch.cuda.Event, Slot | RecordedHandOffs, Sequence[LaneTicket[Tensor]]]


class CudaTicket:
    """A hand-off in flight. `wait` is ordered by the stream: its result is there for whatever is
    launched afterwards, and the host goes on at once."""

    def __init__(self, lane: CudaCpuLane, slot: Slot, rows: int, task: LaneTicket[Tensor]) -> None:
        self._lane = lane
        self._slot: Slot | None = slot
        self._rows = rows
        self._task = task

    def ready(self) -> bool:
        """Whether the done word is set. False once the result was taken."""
        return self._slot is not None and self._task.ready()

    def wait(self) -> Tensor:
        """O [rows, q_heads * head_dim] on the device, once. RuntimeError the second time."""
        if self._slot is None:
            raise RuntimeError("the attention result has been taken already")
        slot, self._slot = self._slot, None
        return self._lane.take(slot, self._rows, self._task)

    def span(self) -> tuple[float, float]:
        """Start and end of the work, in seconds of time.perf_counter, once it is done."""
        return self._task.span()


class CudaCpuLane:
    """`CpuLane` behind the compute stream. Used by the launching thread alone."""

    def __init__(
        self,
        threads: ThreadPlan,
        device: torch.device,
        kernel: Literal["tuned", "plain"] = "tuned",
    ) -> None:
        self._lane = CpuLane(threads, kernel=kernel)
        self._device = device
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.link_bytes = 0  # of Q, K, V and O, that crossed or are about to
        self._free: dict[tuple[int, int, int, torch.dtype], list[Slot]] = {}
        self._returning: deque[_Returning] = deque()
        self._recording: RecordedHandOffs | None = None

    def submit(
        self, layer: int, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> CudaTicket | RecordedTicket:
        """qkv [rows, q_heads + 2 * kv_heads, head_dim] on the device, rows of any stride. kv and
        the batch's tensors lie in host memory."""
        if self._recording is not None:
            return self._recording.submit(layer, kv, batch, shape, qkv)
        rows = batch.num_decodes
        slot = self._take_slot(rows, shape, qkv.dtype)
        self.link_bytes += rows * slot.row_bytes
        slot.send(qkv)
        task = self._lane.submit(layer, kv, batch, shape, **slot.first(rows))
        return CudaTicket(self, slot, rows, task)

    def take(self, slot: Slot, rows: int, task: LaneTicket[Tensor]) -> Tensor:
        """The stream waits for the result and fetches it."""
        out = slot.fetch(rows)
        self._note_launched(slot, [task])
        return out

    @contextlib.contextmanager
    def recording(
        self, batches: Sequence[AttentionBatch | None], shape: AttentionShape, dtype: torch.dtype
    ) -> Iterator[RecordedHandOffs]:
        """Inside, calls for `batches` are recorded on the stream and not handed over."""
        self._recording = RecordedHandOffs(batches, shape, dtype, self._counter)
        try:
            yield self._recording
        finally:
            self._recording = None

    def replay(
        self,
        recorded: RecordedHandOffs,
        batches: Sequence[AttentionBatch | None],
        launch: Callable[[], None],
    ) -> None:
        """`launch` replays the graph of `recorded`, for these CPU decodes. The tasks are queued
        first: a stream must not come to wait for one that could not be. Where this raises, tasks
        may be left that nothing sets off, and `recorded` must not be used again."""
        self.check()
        tasks = recorded.queue(self._lane, batches)
        launch()
        self.link_bytes += recorded.link_bytes
        self._note_launched(recorded, tasks)

    @property
    def work(self) -> CpuWork:
        """What calls have attended so far, those in progress not included."""
        return self._lane.work

    def close(self) -> None:
        """Lets calls that the stream waits for finish, and cancels the others."""
        try:
            torch.cuda.synchronize(self._device)
        finally:
            self._lane.close()
        self._returning.clear()
        self._free.clear()

    def _note_launched(
        self, memory: Slot | RecordedHandOffs, tasks: Sequence[LaneTicket[Tensor]]
    ) -> None:
        event = torch.cuda.Event()
        event.record(current_stream())
        self._returning.append((event, memory, tasks))

    def check(self) -> None:
        """Takes back memory that nothing uses any more; raises what went wrong in its tasks."""
        while self._returning and self._returning[0][0].query():
            _, memory, tasks = self._returning.popleft()
            for task in tasks:  # done long since
                task.check()
            if isinstance(memory, Slot):
                self._free[self._key(memory)].append(memory)

    def _take_slot(self, rows: int, shape: AttentionShape, dtype: torch.dtype) -> Slot:
        """A slot's capacity is a power of two."""
        self.check()
        heads = shape.num_q_heads + 2 * shape.num_kv_heads
        width = shape.num_q_heads * shape.head_dim
        capacity = 1 << (rows - 1).bit_length()
        free = self._free.setdefault((capacity, heads * shape.head_dim, width, dtype), [])
        return free.pop() if free else Slot.make(capacity, shape, dtype, self._counter)

    @staticmethod
    def _key(slot: Slot) -> tuple[int, int, int, torch.dtype]:
        capacity, heads, dim = slot.qkv.shape
        return (capacity, heads * dim, slot.out.shape[1], slot.out.dtype)


class CudaCopyTicket:
    """A copy on the copy stream. `wait` is ordered by the compute stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """What is launched afterwards, and CPU attention that it sets off, sees the copy."""
        self._event.wait(current_stream())


class CudaCopies:
    """Copies KV blocks between device and host memory, on a stream beside the computing one and in
    the order of submission. A copy begins after what was launched before. The GPU's copy engines do
    it, and a kernel only where the sides hold different dtypes; host memory that is not pinned is
    reached through a piece that is (cuda_bounce.py)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.link_bytes = 0  # of KV, that crossed or are about to
        self._is_pinned: bool | None = None  # the host's KV, all of it or nothing; None: not asked
        self._bounce: Bounce | None = None
        self._ids: deque[tuple[Sequence[int], Sequence[int], Tensor]] = deque(maxlen=8)

    def submit(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> CudaCopyTicket:
        """source and target [blocks, kv_heads, 2, block_size, head_dim], dense. Block
        source_blocks[i] goes to target_blocks[i]."""
        host = source if source.is_cpu else target
        self.link_bytes += len(source_blocks) * host[0].nbytes
        launched, event = torch.cuda.Event(), torch.cuda.Event()
        launched.record(current_stream())
        self._stream.wait_event(launched)
        if self._is_pinned is None:
            self._is_pinned = host.is_pinned()
        if not self._is_pinned:
            self._bounce = self._bounce or Bounce()
            with torch.cuda.stream(self._stream):
                self._bounce.copy(source, source_blocks, target, target_blocks)
        elif source.dtype is target.dtype:
            kernels.transfer_blocks(
                source.data_ptr(),
                target.data_ptr(),
                source_blocks,
                target_blocks,
                source[0].nbytes,
                self._stream.cuda_stream,
            )
        else:
            self._convert(source, source_blocks, target, target_blocks)
        event.record(self._stream)
        return CudaCopyTicket(event)

    def _convert(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> None:
        with torch.cuda.stream(self._stream):
            ids = self._device_ids(source_blocks, target_blocks)
        kernels.copy_blocks(
            DTYPE_NUMBERS[source.dtype],
            DTYPE_NUMBERS[target.dtype],
            source.data_ptr(),
            target.data_ptr(),
            ids[0].data_ptr(),
            ids[1].data_ptr(),
            len(source_blocks),
            source[0].numel(),
            _COPY_BLOCKS,
            0,
            0,
            self._stream.cuda_stream,
        )

    def close(self) -> None:
        self._stream.synchronize()
        if self._bounce is not None:
            self._bounce.close()

    def _device_ids(self, source: Sequence[int], target: Sequence[int]) -> Tensor:
        """[2, pairs] int64. The layers of a pass hand in the same sequences again and again."""
        for known_source, known_target, ids in self._ids:
            if known_source is source and known_target is target and ids.shape[1] == len(source):
                return ids
        host = torch.tensor([list(source), list(target)], dtype=torch.int64).pin_memory()
        ids = host.to(self._device, non_blocking=True)
        self._ids.append((source, target, ids))
        return ids
