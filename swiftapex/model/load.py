"""Checkpoint tensors to `ModelWeights`: each parameter exactly once, straight into its fused place.

What a model needs is listed first and held against the checkpoint, so that a wrong checkpoint is
refused before any weight is read. A part is copied from mapped memory into the tensor that stays,
so nothing is held twice, and a rank of tensor parallelism reads no more than its own part.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.checkpoint import TensorSource
from swiftapex.model.config import DTYPE_BYTES, ModelConfig
from swiftapex.model.shard import WHOLE, Shard
from swiftapex.model.weights import Allocate, LayerWeights, ModelWeights, copy_part

_log = logging.getLogger(__name__)

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store this constant


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of one layer, by its name after `model.layers.N.`."""
    c = config
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    matrices = {
        "self_attn.q_proj": (q, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, q, c.o_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
    }
    if c.qk_norm:
        shapes |= {f"self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
    for name, (rows, columns, bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    only_layers: int | None = None,
    allocate: Allocate | None = None,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """The weights of a shard in `dtype` on `device`. only_layers: the checkpoint may hold more
    layers than `config`, cut to that many. Raises ModelLoadError naming a tensor that is missing,
    unexpected, of another shape or type, or too large for float16."""
    has_head = _HEAD in source.names()
    if not has_head and config.tied is False:
        raise ModelLoadError(
            f"tensor {_HEAD} is missing, and config.json says that it is not tied to the embedding"
        )
    _check(config, source, has_head, only_layers)
    reader = _Reader(source, dtype, device, allocate)
    rows = shard.vocab_rows(config)
    embedding = reader.fused([_EMBEDDING], [slice(0, shard.padded_vocab(config))])
    tied = embedding if shard.is_whole else embedding[rows]
    layers = tuple(_load_layer(config, reader, layer, shard) for layer in range(config.num_layers))
    head = reader.fused([_HEAD], [rows]) if has_head else tied
    if has_head and config.tied:
        if torch.equal(head, tied):
            head = tied
        else:
            _log.warning("%s differs from the embedding: used although the config ties it", _HEAD)
    return ModelWeights(embedding, layers, reader.fused([_NORM]), head)


def _check(config: ModelConfig, source: TensorSource, has_head: bool, only: int | None) -> None:
    """Holds names, shapes and types of the checkpoint against what the config needs."""
    table = (config.vocab_size, config.hidden_size)
    expected: dict[str, tuple[int, ...]] = {_EMBEDDING: table, _NORM: (config.hidden_size,)}
    if has_head:
        expected[_HEAD] = table
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            expected[f"model.layers.{layer}.{name}"] = shape
    present = set(source.names())
    for name, shape in expected.items():
        if name not in present:
            raise ModelLoadError(f"tensor {name} is missing from the checkpoint")
        if source.shape(name) != shape:
            raise ModelLoadError(
                f"{source.where(name)}: tensor {name} has shape {list(source.shape(name))}, "
                f"the config asks for {list(shape)}"
            )
        if source.dtype(name) not in DTYPE_BYTES:
            raise ModelLoadError(
                f"{source.where(name)}: tensor {name} has type {source.dtype(name)}: "
                f"expected {', '.join(DTYPE_BYTES)}"
            )
    for name in sorted(present - expected.keys()):
        if _IGNORED.fullmatch(name) or (only is not None and _layer_of(name) >= only):
            continue
        hint = " (the config declares no such bias)" if name.endswith(".bias") else ""
        raise ModelLoadError(f"{source.where(name)}: unexpected tensor {name}{hint}")


def _layer_of(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _load_layer(config: ModelConfig, reader: _Reader, layer: int, shard: Shard) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    qkv = [f"{prefix}.self_attn.{n}_proj" for n in "qkv"]
    gate_up = [f"{prefix}.mlp.{n}_proj" for n in ("gate", "up")]
    o, down = [f"{prefix}.self_attn.o_proj"], [f"{prefix}.mlp.down_proj"]

    kv, inner = shard.kv_rows(config), [shard.inner_rows(config)]
    qkv_rows, gate_up_rows = [shard.q_rows(config), kv, kv], inner * 2

    def weight(names: Sequence[str], parts: Sequence[slice] | None = None, dim: int = 0) -> Tensor:
        return reader.fused([f"{n}.weight" for n in names], parts, dim)

    def bias(
        names: Sequence[str], present: bool, parts: Sequence[slice] | None = None
    ) -> Tensor | None:
        return reader.fused([f"{n}.bias" for n in names], parts) if present else None

    return LayerWeights(
        attn_norm=weight([f"{prefix}.input_layernorm"]),
        qkv=weight(qkv, qkv_rows),
        qkv_bias=bias(qkv, config.qkv_bias, qkv_rows),
        q_norm=weight([f"{prefix}.self_attn.q_norm"]) if config.qk_norm else None,
        k_norm=weight([f"{prefix}.self_attn.k_norm"]) if config.qk_norm else None,
        o=weight(o, qkv_rows[:1], dim=1),
        o_bias=bias(o, config.o_bias and shard.is_first),
        ffn_norm=weight([f"{prefix}.post_attention_layernorm"]),
        gate_up=weight(gate_up, gate_up_rows),
        gate_up_bias=bias(gate_up, config.mlp_bias, gate_up_rows),
        down=weight(down, inner, dim=1),
        down_bias=bias(down, config.mlp_bias and shard.is_first),
    )


class _Reader:
    """Copies tensors of a source into new ones of one dtype on one device."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device | str,
        allocate: Allocate | None,
    ) -> None:
        self.source, self.dtype = source, dtype
        self.allocate = allocate or (
            lambda shape, kind: torch.empty(shape, dtype=kind, device=device)
        )

    def fused(
        self, names: Sequence[str], parts: Sequence[slice] | None = None, dim: int = 0
    ) -> Tensor:
        """The tensors `names`, one under the other; of each only the rows (dim 0) or columns (1)
        in `parts`, which may reach beyond its end: zeros lie there."""
        if parts is None:
            parts = [slice(0, self.source.shape(n)[0]) for n in names]
        sizes = [list(self.source.shape(n)) for n in names]
        for size, part in zip(sizes, parts, strict=True):
            size[dim] = part.stop - part.start
        rows = [size[0] for size in sizes]
        out = self.allocate((sum(rows), *sizes[0][1:]), self.dtype)
        for name, part, piece in zip(names, parts, torch.split(out, rows), strict=True):
            copy_part(piece, self.source.tensor(name), part, dim)
            narrowed = self.dtype == torch.float16 and self.source.dtype(name) != "float16"
            if narrowed and not bool(torch.isfinite(piece).all()):
                raise ModelLoadError(
                    f"{self.source.where(name)}: tensor {name} has values beyond float16's range: "
                    "use bfloat16 or float32"
                )
        return out
