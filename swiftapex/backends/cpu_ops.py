"""`swiftapex.core.ops.Ops` on native CPU kernels. The only place where their arguments are checked:
the kernels take addresses and believe what they are told."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

import swiftapex._kernels_cpu as kernels

DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class CpuOps:
    """n: tokens of the batch. Tensors lie in host memory, in one of the dtypes float32, float16
    and bfloat16 that all arguments share; the last dimension is dense, others may have any stride.
    Anything else raises ValueError. Results are new dense tensors."""

    def __init__(self, pool: kernels.ThreadPool) -> None:
        self._pool = pool
        self._native_rows = native_linear_rows()

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """[n] integer ids, [vocab, hidden] -> [n, hidden]; an id out of range is an IndexError."""
        return F.embedding(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [n, dim] or [n, heads, dim], weight [dim]. The normalised x is rounded to the dtype
        before it is multiplied by the weight."""
        number = DTYPE_NUMBERS.get(x.dtype)
        y = torch.empty(x.shape, dtype=x.dtype)
        if x.dim() == 2:
            n, dim = x.shape
            heads, head_stride = 1, 0
            y_strides = (dim, 0)
        else:
            n, heads, dim = x.shape
            head_stride = x.stride(1)
            y_strides = (heads * dim, dim)
        if (
            number is None
            or weight.dtype is not x.dtype
            or weight.shape != (dim,)
            or not (x.stride(-1) == weight.stride(0) == 1)
            or not (x.is_cpu and weight.is_cpu)
        ):
            reject("rms_norm", x=x, weight=weight)
        kernels.rms_norm(
            self._pool,
            number,
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            n,
            heads,
            dim,
            x.stride(0),
            head_stride,
            *y_strides,
            eps,
        )
        return y

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [n, in] @ weight [out, in]^T + bias [out] + residual [n, out]. float32 sums; the
        result is rounded to the dtype before the residual is added. Few rows are bound by reading
        the weight and take the native kernel; many rows go to torch."""
        dtype = x.dtype
        number = DTYPE_NUMBERS.get(dtype)
        if (
            number is None
            or x.dim() != 2
            or weight.dim() != 2
            or weight.dtype is not dtype
            or x.shape[1] != weight.shape[1]
            or not (x.stride(1) == weight.stride(1) == 1)
            or not (x.is_cpu and weight.is_cpu)
        ):
            reject("linear", x=x, weight=weight)
        n, inner = x.shape
        if n > self._native_rows[number]:
            y = F.linear(x, weight, bias)
            return y if residual is None else y.add_(residual)
        out = weight.shape[0]
        bias_address = residual_address = residual_stride = 0
        if bias is not None:
            if bias.dtype is not dtype or bias.shape != (out,) or bias.stride(0) != 1:
                reject("linear", x=x, weight=weight, bias=bias)
            bias_address = bias.data_ptr()
        if residual is not None:
            if residual.dtype is not dtype or residual.shape != (n, out) or residual.stride(1) != 1:
                reject("linear", x=x, weight=weight, residual=residual)
            residual_address, residual_stride = residual.data_ptr(), residual.stride(0)
        y = torch.empty((n, out), dtype=dtype)
        kernels.linear(
            self._pool,
            number,
            x.data_ptr(),
            weight.data_ptr(),
            bias_address,
            residual_address,
            y.data_ptr(),
            n,
            inner,
            out,
            x.stride(0),
            weight.stride(0),
            residual_stride,
            out,
        )
        return y

    def rope(self, x: Tensor, rotation: Tensor) -> None:
        """Rotates x [n, heads, head_dim] in place; rotation [n, head_dim] float32."""
        number = DTYPE_NUMBERS.get(x.dtype)
        n, heads, dim = x.shape
        if (
            number is None
            or rotation.dtype is not torch.float32
            or rotation.shape != (n, dim)
            or dim % 2 != 0
            or not (x.stride(2) == rotation.stride(1) == 1)
            or not (x.is_cpu and rotation.is_cpu)
        ):
            reject("rope", x=x, rotation=rotation)
        kernels.rope(
            self._pool,
            number,
            x.data_ptr(),
            rotation.data_ptr(),
            n,
            heads,
            dim,
            x.stride(0),
            x.stride(1),
            rotation.stride(0),
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * inner] -> silu(first half) * second half, [n, inner]; silu is rounded to the
        dtype before the product."""
        number = DTYPE_NUMBERS.get(gate_up.dtype)
        n, width = gate_up.shape
        if number is None or width % 2 != 0 or gate_up.stride(1) != 1 or not gate_up.is_cpu:
            reject("silu_mul", gate_up=gate_up)
        inner = width // 2
        y = torch.empty((n, inner), dtype=gate_up.dtype)
        kernels.silu_mul(
            self._pool,
            number,
            gate_up.data_ptr(),
            y.data_ptr(),
            n,
            inner,
            gate_up.stride(0),
            inner,
        )
        return y


def native_linear_rows() -> tuple[int, int, int]:
    """Up to how many rows the native linear is the faster one, by dtype number."""
    return (64, 64, 64)


def reject(operation: str, **tensors: Tensor) -> NoReturn:
    """Raises ValueError that describes the tensors which do not fit the operation or each other."""
    described = ", ".join(
        f"{name} {list(t.shape)} {t.dtype} strides {list(t.stride())} on {t.device}"
        for name, t in tensors.items()
    )
    raise ValueError(
        f"{operation}: arguments do not fit: {described}; expected one dtype of float32, float16, "
        "bfloat16, matching shapes, a dense last dimension, host memory"
    )
