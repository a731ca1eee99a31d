"""`swiftapex.core.ops.Ops` on native CPU kernels. The only place where their arguments are checked:
the kernels take addresses and believe what they are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

import swiftapex._kernels_cpu as kernels

DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
KV_DTYPE_NUMBERS = {**DTYPE_NUMBERS, torch.int8: 3}


class CpuOps:
    """n: tokens of the batch. Tensors lie in host memory, in one of the dtypes float32, float16
    and bfloat16 that all arguments share; the last dimension is dense, others may have any stride.
    Anything else raises ValueError. Results are new dense tensors.

    A decode pass makes a few hundred calls of a few microseconds each, so their order of checks
    matters: what is true of dense tensors is asked first. What is known of a weight is kept with
    the weight, until `clear`.
    """

    def __init__(self, pool: kernels.ThreadPool) -> None:
        self._pool = pool
        self._weights: dict[tuple[int, int], _Weight] = {}
        self._native_rows = native_linear_rows()

    def clear(self) -> None:
        """Lets go of all weights."""
        self._weights.clear()

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """[n] integer ids, [vocab, hidden] -> [n, hidden]; an id out of range is an IndexError."""
        return F.embedding(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x [n, dim] or [n, heads, dim], weight [dim]. The normalised x is rounded to the dtype
        before it is multiplied by the weight. out: of the same shape, x itself or apart from it."""
        known = self._weights.get((id(weight), 0)) or self._remember(weight, None)
        shape = x.shape
        dim = shape[-1]
        n, heads = (shape[0], 1) if len(shape) == 2 else shape[:2]
        if x.dtype is not known.dtype or known.shape != (dim,) or not x.is_cpu:
            reject("rms_norm", x=x, weight=weight)
        x_strides = (heads * dim, dim)
        if not x.is_contiguous():
            if x.stride(-1) != 1:
                reject("rms_norm", x=x, weight=weight)
            x_strides = (x.stride(0), x.stride(1))
        y_strides = (heads * dim, dim)
        if out is None:
            y = torch.empty(shape, dtype=known.dtype)
        else:
            y = out
            if y.dtype is not known.dtype or y.shape != shape or y.stride(-1) != 1 or not y.is_cpu:
                reject("rms_norm", x=x, weight=weight, out=y)
            y_strides = (y.stride(0), y.stride(1))
        kernels.rms_norm(
            self._pool,
            known.number,
            x.data_ptr(),
            known.address,
            y.data_ptr(),
            n,
            heads,
            dim,
            *x_strides,
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
        key = (id(weight), 0 if bias is None else id(bias))
        known = self._weights.get(key) or self._remember(weight, bias)
        dtype = known.dtype
        n, inner = x.shape
        if x.dtype is not dtype or inner != known.inner or not x.is_cpu:
            reject("linear", x=x, weight=weight)
        out = known.shape[0]
        residual_address = 0
        x_stride, residual_stride = inner, out
        if not x.is_contiguous():
            x_stride = row_stride("linear", x)
        if residual is not None:
            if residual.dtype is not dtype or residual.shape != (n, out) or not residual.is_cpu:
                reject("linear", x=x, weight=weight, residual=residual)
            if not residual.is_contiguous():
                residual_stride = row_stride("linear", residual)
            residual_address = residual.data_ptr()
        if n > self._native_rows[known.number]:
            with torch_threads(self._pool.num_threads, n * inner * out):
                y = F.linear(x, weight, bias)
                return y if residual is None else y.add_(residual)
        y = torch.empty(n, out, dtype=dtype)
        kernels.linear(
            self._pool,
            known.number,
            x.data_ptr(),
            known.address,
            known.bias_address,
            residual_address,
            y.data_ptr(),
            n,
            inner,
            out,
            x_stride,
            known.stride,
            residual_stride,
            out,
        )
        return y

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
        """linear(rms_norm(x, norm, eps), weight, bias) of x [n, in]; its first `num_rotated` heads
        are rotated by rotation [n, head_dim] float32."""
        n, inner = x.shape
        known_norm = self._weights.get((id(norm), 0)) or self._remember(norm, None)
        key = (id(weight), 0 if bias is None else id(bias))
        known = self._weights.get(key) or self._remember(weight, bias)
        if n > self._native_rows[known.number]:
            y = self.linear(self.rms_norm(x, norm, eps), weight, bias)
            if rotation is not None:
                heads = y.view(n, -1, rotation.shape[1])
                self.rope(heads[:, :num_rotated], rotation)
            return y
        dtype = known.dtype
        if (
            x.dtype is not dtype
            or known_norm.dtype is not dtype
            or known_norm.shape != (inner,)
            or inner != known.inner
            or not x.is_cpu
        ):
            reject("norm_linear", x=x, norm=norm, weight=weight)
        out = known.shape[0]
        rotation_address = head_dim = 0
        if rotation is not None:
            head_dim = rotation.shape[1]
            if (
                rotation.dtype is not torch.float32
                or rotation.shape[0] != n
                or head_dim % 2 != 0
                or num_rotated * head_dim > out
                or not (rotation.is_contiguous() and rotation.is_cpu)
            ):
                reject("norm_linear", weight=weight, rotation=rotation)
            rotation_address = rotation.data_ptr()
        y = torch.empty(n, out, dtype=dtype)
        kernels.norm_linear(
            self._pool,
            known.number,
            x.data_ptr(),
            known_norm.address,
            eps,
            known.address,
            known.bias_address,
            y.data_ptr(),
            rotation_address,
            n,
            inner,
            out,
            num_rotated * head_dim,
            head_dim,
            inner if x.is_contiguous() else row_stride("norm_linear", x),
            known.stride,
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
        """h + linear(silu_mul(norm_linear(h, norm, eps, gate_up, gate_up_bias)), down, down_bias),
        where h = x + linear(o, proj, proj_bias). o [n, width], x [n, hidden], proj [hidden, width],
        gate_up [2 * inner, hidden], down [hidden, inner]."""
        n, hidden = x.shape
        key = (id(gate_up), 0 if gate_up_bias is None else id(gate_up_bias))
        up = self._weights.get(key) or self._remember(gate_up, gate_up_bias)
        if n > self._native_rows[up.number]:
            h = self.linear(o, proj, proj_bias, residual=x)
            product = self.silu_mul(self.norm_linear(h, norm, eps, gate_up, gate_up_bias))
            return self.linear(product, down, down_bias, residual=h)
        key = (id(proj), 0 if proj_bias is None else id(proj_bias))
        front = self._weights.get(key) or self._remember(proj, proj_bias)
        known_norm = self._weights.get((id(norm), 0)) or self._remember(norm, None)
        key = (id(down), 0 if down_bias is None else id(down_bias))
        back = self._weights.get(key) or self._remember(down, down_bias)
        dtype = up.dtype
        if (
            not (o.dtype is x.dtype is known_norm.dtype is front.dtype is back.dtype is dtype)
            or known_norm.shape != (hidden,)
            or o.shape != (n, front.inner)
            or front.shape[0] != hidden
            or up.inner != hidden
            or back.shape != (hidden, up.shape[0] // 2)
            or up.shape[0] % 2 != 0
            or not (o.is_cpu and x.is_cpu)
        ):
            reject("proj_ffn", o=o, proj=proj, x=x, norm=norm, gate_up=gate_up, down=down)
        y = torch.empty(n, hidden, dtype=dtype)
        kernels.proj_ffn(
            self._pool,
            up.number,
            o.data_ptr(),
            front.address,
            front.bias_address,
            x.data_ptr(),
            known_norm.address,
            eps,
            up.address,
            up.bias_address,
            back.address,
            back.bias_address,
            y.data_ptr(),
            n,
            front.inner,
            hidden,
            back.inner,
            front.inner if o.is_contiguous() else row_stride("proj_ffn", o),
            front.stride,
            hidden if x.is_contiguous() else row_stride("proj_ffn", x),
            up.stride,
            back.stride,
        )
        return y

    def rope(self, x: Tensor, rotation: Tensor) -> None:
        """Rotates x [n, heads, head_dim] in place; rotation [n, head_dim] float32."""
        number = DTYPE_NUMBERS.get(x.dtype)
        n, heads, dim = x.shape
        stride_n, stride_head, stride = x.stride()
        if (
            number is None
            or rotation.dtype is not torch.float32
            or rotation.shape != (n, dim)
            or dim % 2 != 0
            or stride != 1
            or not (rotation.is_contiguous() and x.is_cpu and rotation.is_cpu)
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
            stride_n,
            stride_head,
            dim,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * inner] -> silu(first half) * second half, [n, inner]; silu is rounded to the
        dtype before the product."""
        dtype = gate_up.dtype
        number = DTYPE_NUMBERS.get(dtype)
        n, width = gate_up.shape
        if number is None or width % 2 != 0 or not gate_up.is_cpu:
            reject("silu_mul", gate_up=gate_up)
        stride = width if gate_up.is_contiguous() else row_stride("silu_mul", gate_up)
        inner = width // 2
        y = torch.empty(n, inner, dtype=dtype)
        kernels.silu_mul(
            self._pool, number, gate_up.data_ptr(), y.data_ptr(), n, inner, stride, inner
        )
        return y

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, dim] -> indices [n] int64, invalid [n] bool; see `Ops.argmax`."""
        number = DTYPE_NUMBERS.get(x.dtype)
        n, dim = x.shape
        if number is None or dim == 0 or not x.is_cpu:
            reject("argmax", x=x)
        stride = dim if x.is_contiguous() else row_stride("argmax", x)
        indices, invalid = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.bool)
        kernels.argmax(
            self._pool,
            number,
            x.data_ptr(),
            indices.data_ptr(),
            invalid.data_ptr(),
            n,
            dim,
            stride,
        )
        return indices, invalid

    def _remember(self, weight: Tensor, bias: Tensor | None) -> _Weight:
        number = DTYPE_NUMBERS.get(weight.dtype)
        if number is None or not weight.is_cpu or weight.dim() not in (1, 2):
            reject("weight", weight=weight)
        stride = weight.stride(0) if weight.dim() == 1 else row_stride("weight", weight)
        if weight.dim() == 1 and stride != 1:
            reject("weight", weight=weight)
        shape = tuple(weight.shape)
        if bias is not None and (
            bias.dtype is not weight.dtype or bias.shape != shape[:1] or not bias.is_contiguous()
        ):
            reject("linear", weight=weight, bias=bias)
        known = _Weight(
            tensors=(weight, bias),
            dtype=weight.dtype,
            number=number,
            shape=shape,
            inner=shape[1] if len(shape) == 2 else -1,
            stride=stride,
            address=weight.data_ptr(),
            bias_address=0 if bias is None else bias.data_ptr(),
        )
        self._weights[id(weight), 0 if bias is None else id(bias)] = known
        return known


@dataclass(frozen=True, slots=True)
class _Weight:
    tensors: tuple[Tensor, Tensor | None]  # kept alive: the key is made of their ids
    dtype: torch.dtype
    number: int
    shape: tuple[int, ...]
    inner: int  # -1: a vector
    stride: int  # elements between rows
    address: int
    bias_address: int  # 0: no bias


@contextmanager
def torch_threads(count: int, products: int) -> Iterator[None]:
    """torch's operations in the block may use `count` threads if the block is worth waking them:
    `products` multiplications take a core some 100 us. Those outside use one."""
    if products >= 1_000_000:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def row_stride(operation: str, x: Tensor) -> int:
    """Elements from one row of x [n, d] to the next; ValueError unless the rows are dense."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        reject(operation, x=x)
    return x.stride(0)


def native_linear_rows() -> tuple[int, int, int]:
    """Up to how many rows the native linear is the faster one, by dtype number. Measured against
    torch 2.13 on one core with AMX: float32 and float16 break even between 32 and 64 rows; tiles
    hold out to 256 rows of bfloat16."""
    return (48, 48, 256 if kernels.isa() == "amx_bf16" else 48)


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
