"""The layer math. No placement, no streams, no order of execution: pipelines call these."""

from __future__ import annotations

from torch import Tensor

from swiftapex.core.ops import Group, Ops
from swiftapex.model.config import ModelConfig
from swiftapex.model.rope import Rope
from swiftapex.model.weights import ModelWeights


class Stages:
    """A model as stages around attention. n: tokens of the batch, in any order and of any requests.

    x [n, hidden] is the residual stream in the weights' dtype.

    With a `group`, `config` and `weights` are those of this rank (model/shard.py): heads are its
    own, x and logits are whole and the same on all ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        rotates: bool = True,
        group: Group | None = None,
    ) -> None:
        self.config = config
        self.rotates = rotates  # False: the attention backend does, as it appends K and V
        self.weights = weights
        self.ops = ops
        self.group = group
        self.rope = Rope(config.rope, config.head_dim, weights.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [n] integers below vocab_size -> x [n, hidden]."""
        return self.ops.embedding(token_ids, self.weights.embedding)

    def rotation(self, positions: Tensor, rope_lengths: Tensor | None = None) -> Tensor:
        """positions [n] integers -> [n, head_dim] float32, cos then sin; once per pass.
        rope_lengths [n] integers are read only where `rope.needs_lengths` (see model/rope.py)."""
        return self.rope.rotation(positions, rope_lengths)

    def pre_attn(self, layer: int, x: Tensor, rotation: Tensor) -> Tensor:
        """Norm, QKV, RoPE: x [n, hidden] -> qkv [n, q_heads + 2 * kv_heads, head_dim]."""
        c, w, ops = self.config, self.weights.layers[layer], self.ops
        num_rotated = c.num_q_heads + c.num_kv_heads
        if self.rotates and (w.q_norm is None or w.k_norm is None):
            qkv = ops.norm_linear(
                x, w.attn_norm, c.norm_eps, w.qkv, w.qkv_bias, rotation, num_rotated
            )
            return qkv.view(-1, c.num_qkv_heads, c.head_dim)
        qkv = ops.norm_linear(x, w.attn_norm, c.norm_eps, w.qkv, w.qkv_bias)
        qkv = qkv.view(-1, c.num_qkv_heads, c.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = qkv[:, : c.num_q_heads], qkv[:, c.num_q_heads : num_rotated]
            ops.rms_norm(q, w.q_norm, c.norm_eps, out=q)  # each head by itself
            ops.rms_norm(k, w.k_norm, c.norm_eps, out=k)
        if self.rotates:
            ops.rope(qkv[:, :num_rotated], rotation)
        return qkv

    def post_attn(self, layer: int, o: Tensor, x: Tensor) -> Tensor:
        """Output projection, residual, norm, FFN, residual.
        o [n, q_heads * head_dim], x [n, hidden] -> x [n, hidden]."""
        w, eps, ops = self.weights.layers[layer], self.config.norm_eps, self.ops
        if self.group is None:
            ffn = (w.ffn_norm, eps, w.gate_up, w.gate_up_bias, w.down, w.down_bias)
            return ops.proj_ffn(o, w.o, w.o_bias, x, *ffn)
        # The residual is added to the whole sum: what is small is summed before it is rounded.
        h = self.group.all_reduce(ops.linear(o, w.o, w.o_bias)).add_(x)
        inner = ops.silu_mul(ops.norm_linear(h, w.ffn_norm, eps, w.gate_up, w.gate_up_bias))
        return self.group.all_reduce(ops.linear(inner, w.down, w.down_bias)).add_(h)

    def logits(self, x: Tensor) -> Tensor:
        """x [n, hidden] (only the rows that sample) -> [n, vocab] in the model's dtype."""
        w = self.weights
        logits = self.ops.norm_linear(x, w.norm, self.config.norm_eps, w.head)
        if self.group is None:
            return logits
        return self.group.all_gather(logits)[:, : self.config.vocab_size]  # without the padding
