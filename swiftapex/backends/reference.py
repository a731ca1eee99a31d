"""The oracle: every operation in plain PyTorch, one request at a time, in the clearest form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftapex.backends.host import HostBackend
from swiftapex.core.ops import AttentionBatch, AttentionShape, Ops


class ReferenceOps:
    """`swiftapex.core.ops.Ops` in plain PyTorch."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(token_ids.long(), weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        x32 = x.float()
        norm = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        y = weight * norm.to(x.dtype)
        return y if out is None else out.copy_(y)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        return y if residual is None else y + residual

    def rope(self, x: Tensor, rotation: Tensor) -> None:
        cos, sin = rotation[:, None, :].chunk(2, dim=-1)  # [n, 1, head_dim / 2]
        a, b = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

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
        y = self.linear(self.rms_norm(x, norm, eps), weight, bias)
        if rotation is not None:
            n, head_dim = rotation.shape
            self.rope(y.view(n, -1, head_dim)[:, :num_rotated], rotation)
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
        h = self.linear(o, proj, proj_bias, residual=x)
        inner = self.silu_mul(self.norm_linear(h, norm, eps, gate_up, gate_up_bias))
        return self.linear(inner, down, down_bias, residual=h)

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest, indices = x.max(dim=-1)
        invalid = ~torch.isfinite(largest)
        return indices.masked_fill_(invalid, 0), invalid


class ReferenceBackend(HostBackend):
    """Attention over paged KV that gathers each request's K and V and calls a plain softmax."""

    def __init__(self) -> None:
        self.ops: Ops = ReferenceOps()

    def allocate_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
    ) -> Tensor:
        size = (num_layers, num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        return torch.zeros(size, dtype=dtype)

    def allocate_weight(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def attend(
        self, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> Tensor:
        out = torch.empty((batch.num_tokens, shape.num_q_heads * shape.head_dim), dtype=qkv.dtype)
        lens = (1,) * batch.num_decodes + batch.chunk_lens
        begin = 0
        for request, (n, context) in enumerate(zip(lens, batch.context_lens.tolist(), strict=True)):
            q, k, v = split_heads(qkv[begin : begin + n], shape)
            append(kv, batch.block_table[request], context - n, k, v)
            keys, values = gather(kv, batch.block_table[request], context)
            o = causal_attention(q, keys, values, shape.scale)
            out[begin : begin + n] = o.reshape(n, -1)
            begin += n
        return out

    def close(self) -> None:
        pass


class _Done:
    """A ticket whose work was done when it was submitted."""

    def __init__(self, output: Tensor) -> None:
        self._output: Tensor | None = output

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        if self._output is None:
            raise RuntimeError("the attention result has been taken already")
        output, self._output = self._output, None
        return output


class ReferenceLane:
    """CPU attention at the moment of submission, in the launching thread."""

    work = None
    link_bytes = None

    def __init__(self, backend: ReferenceBackend) -> None:
        self._backend = backend

    def submit(
        self, layer: int, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> _Done:
        return _Done(self._backend.attend(kv, batch, shape, qkv))

    def check(self) -> None:
        """Nothing: `submit` raises it."""

    def close(self) -> None:
        pass


class ReferenceCopies:
    """Copies at the moment of submission, in the launching thread."""

    link_bytes = None

    def submit(
        self,
        source: Tensor,
        source_blocks: Sequence[int],
        target: Tensor,
        target_blocks: Sequence[int],
    ) -> _Done:
        target[list(target_blocks)] = source[list(source_blocks)].to(target.dtype)
        return _Done(target)

    def close(self) -> None:
        pass


def split_heads(qkv: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """[n, q_heads + 2 * kv_heads, head_dim] -> q [n, q_heads, .], k and v [n, kv_heads, .]."""
    first_k, first_v = shape.num_q_heads, shape.num_q_heads + shape.num_kv_heads
    return qkv[:, :first_k], qkv[:, first_k:first_v], qkv[:, first_v:]


def append(kv: Tensor, blocks: Tensor, start: int, k: Tensor, v: Tensor) -> None:
    """Writes k, v [n, kv_heads, head_dim] at positions start.. of the request with these blocks."""
    block_size = kv.shape[3]
    positions = torch.arange(start, start + k.shape[0])
    block_ids, offsets = blocks.long()[positions // block_size], positions % block_size
    kv[block_ids, :, 0, offsets] = k.to(kv.dtype)
    kv[block_ids, :, 1, offsets] = v.to(kv.dtype)


def gather(kv: Tensor, blocks: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """K and V [kv_heads, context, head_dim] of one request."""
    block_size = kv.shape[3]
    used = kv[blocks[: -(-context // block_size)].long()]  # [blocks, kv_heads, 2, block_size, d]
    k, v = used.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return k, v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, q_heads, d] at the last n positions of k, v [kv_heads, context, d] -> like q."""
    n, context = q.shape[0], k.shape[1]
    group = q.shape[1] // k.shape[0]
    k, v = k.float().repeat_interleave(group, 0), v.float().repeat_interleave(group, 0)
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale  # [q_heads, n, context]
    future = torch.ones(n, context, dtype=torch.bool, device=q.device).triu(context - n + 1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).to(q.dtype)
