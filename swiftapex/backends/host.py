"""What backends have in common that compute in host memory, when they are called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftapex.core.ops import AttentionShape


@dataclass(frozen=True, slots=True)
class _Here:
    tensor: Tensor

    def is_here(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self.tensor


class HostBackend(ABC):
    """Nothing has to be brought anywhere. The layer math rotates, attention appends."""

    device = torch.device("cpu")
    rotates = False
    notes: Sequence[str] = ()

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The arrays' own memory."""
        return [torch.from_numpy(array) for array in arrays]

    def download(self, tensor: Tensor) -> _Here:
        return _Here(tensor)

    def rotate_append(
        self,
        kv: Tensor | None,
        slots: Tensor | None,
        qkv: Tensor,
        rotation: Tensor,
        shape: AttentionShape,
    ) -> None:
        raise NotImplementedError("the layer math rotates, attention appends")

    @abstractmethod
    def allocate_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
    ) -> Tensor: ...

    def allocate_host_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
    ) -> Tensor:
        return self.allocate_kv(num_layers, num_blocks, shape, dtype)
