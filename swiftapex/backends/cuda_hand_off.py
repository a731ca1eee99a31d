"""The stream's half of a hand-off to the CPU side, launched or recorded. No Python thread takes
part, and the launching thread waits for neither side.

A hand-off, in the order of the compute stream and of the words in kernels_cpu/task_lane.h:

    stream   gather_rows   Q, K, V into pinned memory, then arrival = 1
    CPU      attention     takes the task (arrival = 0), appends, attends, then done = 1
    stream   wait_word     for done == 1, at the layer that merges the result
    stream   scatter_rows  O into device memory, then done = 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import swiftapex._kernels_cuda as kernels
from swiftapex.backends.cpu_lane import CpuLane, LaneTicket
from swiftapex.backends.cuda_ops import stream_handle, word_pair
from swiftapex.core.ops import AttentionBatch, AttentionShape


@dataclass(frozen=True, slots=True)
class Slot:
    """Pinned memory of one hand-off after the other."""

    qkv: Tensor  # [capacity, q_heads + 2 * kv_heads, head_dim]
    out: Tensor  # [capacity, q_heads * head_dim]
    arrival: Tensor  # [1] int32
    done: Tensor  # [1] int32
    counter: Tensor  # [1] int32 on the device, of all hand-offs of a stream

    @staticmethod
    def make(capacity: int, shape: AttentionShape, dtype: torch.dtype, counter: Tensor) -> Slot:
        heads, dim = shape.num_q_heads + 2 * shape.num_kv_heads, shape.head_dim
        qkv = torch.empty(capacity, heads, dim, dtype=dtype, pin_memory=True)
        out = torch.empty(capacity, shape.num_q_heads * dim, dtype=dtype, pin_memory=True)
        return Slot(qkv, out, *word_pair(), counter)

    @property
    def row_bytes(self) -> int:
        """Of Q, K, V and O, which cross the link."""
        return self.qkv[0].nbytes + self.out[0].nbytes

    def first(self, rows: int) -> dict[str, Tensor]:
        """What a task of so many rows works on, as `CpuLane.submit` takes it."""
        return {
            "qkv": self.qkv[:rows],
            "out": self.out[:rows],
            "arrival": self.arrival,
            "done": self.done,
        }

    def send(self, qkv: Tensor) -> None:
        """qkv [rows, q_heads + 2 * kv_heads, head_dim] on the device, rows of any stride."""
        row_bytes = qkv[0].nbytes
        kernels.gather_rows(
            qkv.data_ptr(),
            self.qkv.data_ptr(),
            qkv.shape[0],
            row_bytes,
            qkv.stride(0) * qkv.element_size(),
            row_bytes,
            self.arrival.data_ptr(),
            self.counter.data_ptr(),
            stream_handle(),
        )

    def fetch(self, rows: int) -> Tensor:
        """O [rows, q_heads * head_dim] on the device, once the stream has waited for it."""
        stream = stream_handle()
        device = self.counter.device
        out = torch.empty(rows, self.out.shape[1], dtype=self.out.dtype, device=device)
        kernels.wait_word(self.done.data_ptr(), 1, stream)
        row_bytes = out[0].nbytes
        kernels.scatter_rows(
            self.out.data_ptr(),
            out.data_ptr(),
            rows,
            row_bytes,
            row_bytes,
            row_bytes,
            self.done.data_ptr(),
            self.counter.data_ptr(),
            stream,
        )
        return out


class RecordedHandOffs:
    """The hand-offs of a pass that is one graph: the stream's half is in the graph, the tasks are
    queued anew for each replay, of the batches of that pass.

    A slot per sub-batch serves all its layers, and the next replay too, which may be launched
    before this one is done: each of its hand-offs begins behind the end of the one before on the
    stream, so that an arrival is the first queued task's (task_lane.h), and a task touches the slot
    only between its arrival and its done.
    """

    def __init__(
        self,
        batches: Sequence[AttentionBatch | None],
        shape: AttentionShape,
        dtype: torch.dtype,
        counter: Tensor,
    ) -> None:
        """batches: what stands for the CPU decodes of each sub-batch while the pass is recorded.
        Allocates all that it needs, which a recording could not."""
        self._batches = batches
        self._slots = [
            None if batch is None else Slot.make(batch.num_decodes, shape, dtype, counter)
            for batch in batches
        ]
        self._calls: list[tuple[int, int, Tensor, AttentionShape]] = []
        self.link_bytes = 0  # that cross in each replay, padding included

    def submit(
        self, layer: int, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> RecordedTicket:
        """While the pass is recorded, in the place of `CudaCpuLane.submit`."""
        (index,) = [i for i, mine in enumerate(self._batches) if mine is batch]
        slot = self._slots[index]
        assert slot is not None and len(qkv) == len(slot.qkv)
        slot.send(qkv)
        self._calls.append((index, layer, kv, shape))
        self.link_bytes += slot.row_bytes * len(slot.qkv)
        return RecordedTicket(slot)

    def queue(
        self, lane: CpuLane, batches: Sequence[AttentionBatch | None]
    ) -> list[LaneTicket[Tensor]]:
        """The tasks of one replay, in the order of the recorded calls."""
        memory = [
            {} if slot is None or batch is None else slot.first(batch.num_decodes)
            for slot, batch in zip(self._slots, batches, strict=True)
        ]
        tasks = []
        for index, layer, kv, shape in self._calls:
            batch = batches[index]
            assert batch is not None
            tasks.append(lane.submit(layer, kv, batch, shape, **memory[index]))
        return tasks


class RecordedTicket:
    """Nothing is in flight yet."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def ready(self) -> bool:
        return False

    def wait(self) -> Tensor:
        """O [padded rows, q_heads * head_dim]."""
        return self._slot.fetch(len(self._slot.out))
