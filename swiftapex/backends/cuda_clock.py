"""`Clock` of a CUDA stream, and its progress as the host sees it."""

from __future__ import annotations

import time

import torch

import swiftapex._kernels_cuda as kernels
from swiftapex.backends.cuda_ops import stream_handle


class CudaClock:
    """Events of the current stream, against one that was recorded while the device was idle."""

    costs = True

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start_s = 0.0

    def restart(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()
        self._start_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        return self._start_s + 1e-3 * float(self._start.elapsed_time(mark))


class CudaProgress:
    """A word in pinned memory that counts steps of the current stream."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._seen = self._word.numpy()

    def post(self, count: int) -> None:
        kernels.write_word(self._word.data_ptr(), count & 0x7FFFFFFF, stream_handle())

    def reached(self) -> int:
        return int(self._seen[0])
