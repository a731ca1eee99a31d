"""`swiftapex.core.ops.Ops` on a GPU: linear layers by cuBLAS, the rest by native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

import swiftapex._kernels_cuda as kernels
from swiftapex.backends.cpu_ops import DTYPE_NUMBERS
from swiftapex.backends.reference import ReferenceOps

_WORD_STRIDE = 16  # int32 between words
_streams: dict[int, torch.cuda.Stream] = {}  # seen so far, by handle


def stream_handle() -> int:
    """The stream that torch works on now. Asked for at every launch: `torch.cuda.current_stream`
    takes 5 us to answer."""
    return int(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))


def current_stream() -> torch.cuda.Stream:
    """The same as an object."""
    handle = stream_handle()
    if handle not in _streams:
        _streams[handle] = torch.cuda.current_stream()
    return _streams[handle]


def word_pair() -> tuple[Tensor, Tensor]:
    """Two words [1] int32 in pinned memory, 0, that share no cache line: those of a hand-off."""
    words = torch.zeros(2 * _WORD_STRIDE, dtype=torch.int32, pin_memory=True)
    return words[:1], words[_WORD_STRIDE : _WORD_STRIDE + 1]


class CudaOps(ReferenceOps):
    """Launches on torch's current stream; nothing waits. `proj_ffn` writes its result over `x`:
    no stage needs the residual stream of an earlier one."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        if x.dim() == 3:
            n, heads, dim = x.shape
            strides = (x.stride(0), x.stride(1), y.stride(0), y.stride(1))
        else:
            (n, dim), heads = x.shape, 1
            strides = (x.stride(0), dim, y.stride(0), dim)
        kernels.rms_norm(
            DTYPE_NUMBERS[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            n,
            heads,
            dim,
            *strides,
            eps,
            stream_handle(),
        )
        return y

    def rope(self, x: Tensor, rotation: Tensor) -> None:
        n, heads, head_dim = x.shape
        kernels.rope_append(
            DTYPE_NUMBERS[x.dtype],
            DTYPE_NUMBERS[x.dtype],
            x.data_ptr(),
            rotation.data_ptr(),
            0,
            0,
            n,
            heads,  # all of them are rotated, none is a key or a value
            0,
            head_dim,
            x.stride(0),
            1,
            stream_handle(),
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        n, width = gate_up.shape
        y = torch.empty(n, width // 2, dtype=gate_up.dtype, device=gate_up.device)
        kernels.silu_mul(
            DTYPE_NUMBERS[gate_up.dtype],
            gate_up.data_ptr(),
            y.data_ptr(),
            n,
            width // 2,
            gate_up.stride(0),
            width // 2,
            stream_handle(),
        )
        return y

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
        x = _add_linear(x, o, proj, proj_bias)
        product = self.silu_mul(self.norm_linear(x, norm, eps, gate_up, gate_up_bias))
        return _add_linear(x, product, down, down_bias)

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, dim = x.shape
        indices = torch.empty(n, dtype=torch.int64, device=x.device)
        invalid = torch.empty(n, dtype=torch.bool, device=x.device)
        kernels.argmax(
            DTYPE_NUMBERS[x.dtype],
            x.data_ptr(),
            indices.data_ptr(),
            invalid.data_ptr(),
            n,
            dim,
            x.stride(0),
            stream_handle(),
        )
        return indices, invalid


def _add_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x += y @ weight^T (+ bias), in one matrix product without a bias."""
    x.addmm_(y, weight.t())
    return x if bias is None else x.add_(bias)
