"""What a GPU's memory holds, as torch's allocator and the driver tell it."""

from __future__ import annotations

import torch

from swiftapex.core.records import DeviceMemory


class CudaMemory:
    """`limit`: bytes that this process's tensors may take, None for all of the device's."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device = device
        self._limit = limit

    def settle(self) -> None:
        """Waits for the device, gives back what no tensor uses, and begins a new peak."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def now(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(
            total=total,
            free=free,
            limit=total if self._limit is None else self._limit,
            reserved=torch.cuda.memory_reserved(self._device),
            peak=torch.cuda.max_memory_reserved(self._device),
        )
