"""What a backend offers to the layer math and to attention routing.

Only types: nothing here imports torch at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from torch import device as torch_device
    from torch import dtype as torch_dtype

    from swiftapex.core.records import DeviceMemory


class Ops(Protocol):
    """Tensor operations of the layer math. n: tokens of the batch. Activations have the model's
    dtype, are row-major, and may have a row stride larger than the row."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """[n] integer ids, [vocab, hidden] -> [n, hidden]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.
        Written to `out` if it is given, which may be x itself."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [n, in] @ weight[out, in]^T + bias [out] + residual [n, out]; float32 accumulation."""

    def rope(self, x: Tensor, rotation: Tensor) -> None:
        """Rotates x [n, heads, head_dim] in place (half-split pairs: i with i + head_dim/2).
        rotation [n, head_dim] float32: cos in the first half of a row, sin in the second."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * inner] -> silu(first half) * second half, [n, inner]."""

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        rotation: Tensor | None = None,
        num_rotated: int = 0,
    ) -> Tensor:
        """linear(rms_norm(x, norm, eps), weight, bias) as one call; the first `num_rotated` heads
        of the result [n, heads * head_dim] are rotated as by `rope`."""

    def proj_ffn(
        self,
        o: Tensor,
        proj: Tensor,
        proj_bias: Tensor | None,
        x: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        """h + linear(silu_mul(norm_linear(h, norm, eps, gate_up, gate_up_bias)), down, down_bias)
        as one call, where h = linear(o, proj, proj_bias, residual=x). o [n, width], x [n, hidden],
        proj [hidden, width], gate_up [2 * inner, hidden], down [hidden, inner]."""

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, dim] -> indices [n] int64, the lowest one of each row's largest element, and
        invalid [n] bool: that element is NaN, as it is if any is, or infinite; the index is 0."""


class Group(Protocol):
    """The ranks of tensor parallelism, which call these in the same order. In stream order on a
    device that works beside the host."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits on every rank; written over x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, part] of each rank -> [n, ranks * part], side by side in the order of ranks."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Fixed facts of a rank's attention: heads are those of this rank."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the KV of a sub-batch's requests lies. Decodes come first, one token each; then
    prefill chunks of `chunk_lens` tokens. Blocks exist for all tokens of this pass. It serves one
    pass, or a recorded one from its first layer on."""

    num_decodes: int
    chunk_lens: tuple[int, ...]
    block_table: Tensor  # [requests, width] int32, contiguous; entries past the context are unread
    context_lens: Tensor  # [requests] int32: tokens in the KV cache after this pass's append
    chunk_contexts: tuple[int, ...]  # those of the chunks, known to the host
    slots: Tensor | None = None  # [tokens] int64, where a backend `rotates`; None: appended
    # What a backend has found out about it at the pass's first layer, for those that follow.
    kept: dict[str, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def num_requests(self) -> int:
        return self.num_decodes + len(self.chunk_lens)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.chunk_lens)


class Memory(Protocol):
    """Of a device beside the host."""

    def settle(self) -> None:
        """Waits for the device, gives back what no tensor uses, and begins a new peak."""

    def now(self) -> DeviceMemory:
        """What the device's memory holds at this moment."""


class Download(Protocol):
    """A tensor on its way to the host."""

    def is_here(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Tensor:
        """The tensor. Waits for nothing that was launched later."""


class Backend(Protocol):
    """One side's kernels. KV of one layer: [block][kv_head][K|V][token][head_dim]."""

    ops: Ops
    device: torch_device
    rotates: bool
    """Whether it rotates Q and K as it appends (`rotate_append`), in one kernel. The layer math
    then leaves the rotation out, and tokens come with slots: block * block_size + offset."""

    @property
    def notes(self) -> Sequence[str]:
        """What users should know of how its memory was had, a line each."""

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Each array as a tensor where this backend computes. The arrays are not changed later."""

    def download(self, tensor: Tensor) -> Download:
        """Starts to bring a tensor to the host."""

    def allocate_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch_dtype
    ) -> Tensor:
        """[num_layers, num_blocks, kv_heads, 2, block_size, head_dim], zeroed lazily or not."""

    def allocate_host_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch_dtype
    ) -> Tensor:
        """As `allocate_kv`, for the CPU side: host memory that copies from here reach."""

    def allocate_weight(self, shape: tuple[int, ...], dtype: torch_dtype) -> Tensor:
        """Memory for a weight, not filled, where this backend reads it best."""

    def rotate_append(
        self,
        kv: Tensor | None,
        slots: Tensor | None,
        qkv: Tensor,
        rotation: Tensor,
        shape: AttentionShape,
    ) -> None:
        """Of a backend that `rotates`: rotates Q and K of qkv [tokens, heads, head_dim] in place by
        rotation [tokens, head_dim], and appends K and V of the tokens whose slot is not -1."""

    def attend(
        self, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> Tensor:
        """Appends this pass's K and V to `kv` (one layer), if not done, and attends causally.
        qkv [tokens, q_heads + 2 * kv_heads, head_dim] -> [tokens, q_heads * head_dim]."""

    def close(self) -> None:
        """Stops the backend's threads."""
