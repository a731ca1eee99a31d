"""The tensors of a model, fused as the layer math wants them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from swiftapex.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in] as in `Ops.linear`; None: the model has no such part."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [(q_heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, q_heads * head_dim]
    o_bias: Tensor | None
    ffn_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All layers, the embedding and the head. Tied: `head` is `embedding`."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors, a tied head counted once."""
        tensors = {id(t): t for t in (self.embedding, self.norm, self.head)}
        for layer in self.layers:
            parts = (getattr(layer, f.name) for f in fields(layer))
            tensors.update({id(t): t for t in parts if t is not None})
        return sum(t.numel() * t.element_size() for t in tensors.values())


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> ModelWeights:
    """Random weights of the right shapes, the same for the same seed, dtype and kind of device.

    Matrices are uniform with standard deviation 1 / sqrt(in), so that activations keep their scale
    through any number of layers and logits differ from each other.
    """
    generator = torch.Generator(device).manual_seed(seed)
    c = config

    def matrix(rows: int, columns: int) -> Tensor:
        bound = (3.0 / columns) ** 0.5
        tensor = torch.empty((rows, columns), dtype=dtype, device=device)
        return tensor.uniform_(-bound, bound, generator=generator)

    def vector(size: int, value: float = 1.0) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        return LayerWeights(
            attn_norm=vector(c.hidden_size),
            qkv=matrix(c.num_qkv_heads * c.head_dim, c.hidden_size),
            qkv_bias=vector(c.num_qkv_heads * c.head_dim, 0.01) if c.qkv_bias else None,
            q_norm=vector(c.head_dim) if c.qk_norm else None,
            k_norm=vector(c.head_dim) if c.qk_norm else None,
            o=matrix(c.hidden_size, c.num_q_heads * c.head_dim),
            o_bias=vector(c.hidden_size, 0.01) if c.o_bias else None,
            ffn_norm=vector(c.hidden_size),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=vector(2 * c.intermediate_size, 0.01) if c.mlp_bias else None,
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=vector(c.hidden_size, 0.01) if c.mlp_bias else None,
        )

    embedding = matrix(c.vocab_size, c.hidden_size)
    layers = tuple(layer() for _ in range(c.num_layers))
    head = embedding if c.tied else matrix(c.vocab_size, c.hidden_size)
    return ModelWeights(embedding, layers, vector(c.hidden_size), head)
