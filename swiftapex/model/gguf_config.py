"""GGUF metadata to a `ModelConfig`. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.config import ModelConfig, RopeConfig, scaled_length
from swiftapex.model.gguf_file import GgufFile

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # Mistral is "llama" there


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Reads the shape, RoPE and end-of-sequence tokens; presence of tensors decides biases, QK norm
    and tying. Raises ModelLoadError naming the architecture or the key."""
    where = str(file.path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _FAMILIES:
        raise ModelLoadError(
            f"{where}: architecture {architecture!r} is not supported: {', '.join(_FAMILIES)} are"
        )

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{where}: metadata {architecture}.{key} is missing")
        return value

    def integer(key: str, default: int | None = None) -> int:
        value = get(key, default)
        if np.ndim(value) != 0:
            raise ModelLoadError(f"{where}: layers differ in {architecture}.{key}")
        return int(value)

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // max(heads, 1))
    unsupported = {
        "keys and values of different sizes": integer("attention.value_length", head_dim)
        != head_dim,
        "partial rotation": integer("rope.dimension_count", head_dim) != head_dim,
        "a mixture of experts": integer("expert_count", 0) > 0,
        "a model split over several files": int(file.metadata.get("split.count", 1)) > 1,
    }
    for what, present in unsupported.items():
        if present:
            raise ModelLoadError(f"{where}: {what} is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{where}: tensor token_embd.weight is missing")
    positions = integer("context_length")
    rope = _rope(file, get, positions, head_dim)
    window = integer("attention.sliding_window", 0) or None
    length = scaled_length(rope, positions) if rope.type != "linear" else positions
    return ModelConfig(
        family=_FAMILIES[architecture],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_layers=integer("block_count"),
        num_q_heads=heads,
        num_kv_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_length=length if window is None else min(length, window),
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=window,
        dtype=_dtype(file),
        bos_token_id=_token(file, "bos"),
        eos_token_ids=eos_token_ids(file),
    ).check(where)


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The end-of-sequence token and, where named, the end-of-turn token."""
    ids = (_token(file, "eos"), _token(file, "eot"))
    return tuple(sorted({i for i in ids if i is not None}))


def _token(file: GgufFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if value is None else int(value)


def _dtype(file: GgufFile) -> str:
    """What the matrices need: their own type, float16 where they are quantised."""
    return file.tensors["token_embd.weight"].dtype or "float16"


def _rope(file: GgufFile, get: Any, positions: int, head_dim: int) -> RopeConfig:
    theta = float(get("rope.freq_base", 10000.0))
    factors = None
    if "rope_freqs.weight" in file.tensors:  # the llama3 scaling, one divisor per frequency
        factors = tuple(float(x) for x in np.asarray(file.array("rope_freqs.weight")).ravel())
        if len(factors) != head_dim // 2:
            raise ModelLoadError(
                f"{file.path}: rope_freqs.weight has {len(factors)} numbers, "
                f"expected head_dim / 2 = {head_dim // 2}"
            )
    kind = get("rope.scaling.type", "none")
    factor = float(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
    original = int(get("rope.scaling.original_context_length", positions))
    if kind == "none" and factor == 1.0:
        return RopeConfig(theta=theta, original_length=positions, frequency_factors=factors)
    if kind in ("none", "linear"):
        return RopeConfig("linear", theta, factor, original, frequency_factors=factors)
    if kind == "yarn":
        attention = float(get("rope.scaling.attn_factor", 1.0)) * (0.1 * np.log(factor) + 1.0)
        return RopeConfig(
            "yarn",
            theta,
            factor,
            original,
            attention_factor=float(attention),
            beta_fast=float(get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(get("rope.scaling.yarn_beta_slow", 1.0)),
        )
    raise ModelLoadError(f"{file.path}: RoPE scaling type {kind!r} is not supported")
