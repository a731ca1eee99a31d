"""Small data of the host's, on its way to where a device computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """[len(values)] on the device, in stream order. `torch.tensor(values, device=...)` would wait
    for all that was launched before: the launching thread would no longer be ahead of the device.
    """
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
