"""Copies of KV between a GPU and host memory that is not pinned, in the order of a stream.

The GPU's copy engines reach pinned memory only, so blocks go through a piece of it; a native thread
copies between there and the KV. Words order the two (kernels_cpu/task_lane.h), and the launching
thread waits for neither. For each piece, on the copy stream, to the host and from it:

    stream   blocks into the piece              arrival = 1
    stream   arrival = 1                        lane: KV into the piece, done = 1
    lane     the piece into KV, done = 1        stream waits for done == 1, done = 0
    stream   waits for done == 1, done = 0      blocks from the piece to the device
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

import swiftapex._kernels_cuda as kernels
from swiftapex.backends.cpu_lane import CopyLane, LaneTicket
from swiftapex.backends.cuda_ops import stream_handle, word_pair

BOUNCE_BYTES = 32 << 20  # of pinned memory, or those of one block of a layer if that is larger
Words = tuple[Tensor, Tensor]  # arrival and done of a task


class Bounce:
    """Works on the current stream, which must be the same one at every call."""

    def __init__(self) -> None:
        self._lane = CopyLane()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._free: list[Words] = []
        self._running: deque[tuple[torch.cuda.Event, Words, LaneTicket[None]]] = deque()

    def copy(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> None:
        """As `Copies.submit`. One of the two lies on the device; the native thread converts."""
        to_host = target.is_cpu
        piece = self._piece(source if to_host else target)
        for begin in range(0, len(source_blocks), len(piece)):
            part = slice(begin, begin + len(piece))
            sources, targets = source_blocks[part], target_blocks[part]
            within = range(len(sources))
            if to_host:
                _transfer(source, sources, piece, within)
                self._hand_over(piece, within, target, targets)
            else:
                self._hand_over(source, sources, piece, within)
                _transfer(piece, within, target, targets)

    def close(self) -> None:
        """Once the stream has nothing left to do."""
        self._lane.close()
        self._running.clear()
        self._free.clear()

    def _hand_over(
        self, source: Tensor, sources: Sequence[int], target: Tensor, targets: Sequence[int]
    ) -> None:
        """The native thread copies after what the stream has to do before, and the stream goes on
        once it has."""
        words = self._take_words()
        arrival, done = words
        task = self._lane.submit(source, sources, target, targets, arrival=arrival, done=done)
        stream = stream_handle()
        kernels.write_word(arrival.data_ptr(), 1, stream)
        kernels.wait_word(done.data_ptr(), 1, stream)
        kernels.write_word(done.data_ptr(), 0, stream)
        event = torch.cuda.Event()
        event.record()
        self._running.append((event, words, task))

    def _take_words(self) -> Words:
        while self._running and self._running[0][0].query():
            _, words, task = self._running.popleft()
            task.wait()  # done long since: raises what went wrong in it
            self._free.append(words)
        if self._free:
            return self._free.pop()
        return word_pair()

    def _piece(self, device_kv: Tensor) -> Tensor:
        """[blocks, ...] of the pinned memory, in the shape of the device's blocks, which are all of
        one size."""
        block = device_kv[0]
        if not len(self._memory):
            size = max(BOUNCE_BYTES, block.nbytes)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        blocks = len(self._memory) // block.nbytes
        used = self._memory[: blocks * block.nbytes].view(device_kv.dtype)
        return used.view(blocks, *block.shape)


def _transfer(
    source: Tensor, sources: Sequence[int], target: Tensor, targets: Sequence[int]
) -> None:
    handle = stream_handle()
    size = source[0].nbytes
    kernels.transfer_blocks(
        source.data_ptr(), target.data_ptr(), list(sources), list(targets), size, handle
    )
