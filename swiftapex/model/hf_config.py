"""`config.json` of a Hugging Face checkpoint to a `ModelConfig`. Plain JSON in, no transformers.

A key that is null counts as absent throughout: real files have both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.config import (
    DTYPE_BYTES,
    FAMILIES,
    ROPE_TYPES,
    ModelConfig,
    RopeConfig,
    scaled_length,
)

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "InternLMForCausalLM": "llama",  # the first generation: Llama with biases
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MODEL_TYPE_ALIASES = {"internlm": "llama"}


class Fields:
    """A JSON object in which null means absent, with errors that name file and key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = {k: v for k, v in values.items() if v is not None}
        self.where = where

    def get(self, *names: str) -> Any:
        """The value under the first of `names` that is there, or None."""
        return next((self.values[n] for n in names if n in self.values), None)

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.number(*names, default=default)
        if value != int(value):
            raise ModelLoadError(f"{self.where}: {names[0]} must be a whole number, got {value}")
        return int(value)

    def number(self, *names: str, default: float | None = None) -> float:
        value = self.get(*names)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{self.where}: {names[0]} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{self.where}: {names[0]} must be a number, got {value!r}")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.where}: {names[0]} must be true or false, got {value!r}")
        return value


def config_from_hf(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads a parsed config.json. Raises ModelLoadError naming `where` and what is unsupported."""
    f = Fields(values, where)
    family = _family(f)
    _refuse_unsupported(f)
    heads = f.integer("num_attention_heads")
    hidden = f.integer("hidden_size")
    positions = f.integer("max_position_embeddings", default=2048)
    rope = rope_from_hf(f, positions)
    window = _sliding_window(f, family)
    length = scaled_length(rope, positions)
    attention_bias = f.flag("attention_bias", "bias")
    tied = f.flag("tie_word_embeddings") if f.get("tie_word_embeddings") is not None else None
    return ModelConfig(
        family=family,
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size"),
        num_layers=f.integer("num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=f.integer("num_key_value_heads", default=heads),
        head_dim=f.integer("head_dim", default=hidden // max(heads, 1)),
        max_length=length if window is None else min(length, window),
        norm_eps=f.number("rms_norm_eps", default=1e-6),
        rope=rope,
        tied=tied,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias and family != "qwen2",
        mlp_bias=f.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_window=window,
        dtype=dtype_name(f.get("dtype", "torch_dtype"), where),
        bos_token_id=f.get("bos_token_id"),
        eos_token_ids=token_ids(f.get("eos_token_id")),
    ).check(where)


def token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id` entry: null, a number or a list of numbers."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def dtype_name(value: Any, where: str) -> str | None:
    """The name in a `dtype` or `torch_dtype` entry, None where it says nothing."""
    name = str(value).removeprefix("torch.")
    if value is None or name == "auto":
        return None
    if name not in DTYPE_BYTES:
        expected = ", ".join(DTYPE_BYTES)
        raise ModelLoadError(f"{where}: dtype {name!r} is not supported: expected {expected}")
    return name


def _family(f: Fields) -> str:
    architectures = f.get("architectures") or ()
    model_type = f.get("model_type")
    if model_type is None and architectures:
        model_type = _ARCHITECTURES.get(architectures[0], architectures[0])
    model_type = _MODEL_TYPE_ALIASES.get(model_type, model_type)
    if model_type not in FAMILIES:
        named = "no model_type" if model_type is None else f"model_type {model_type!r}"
        supported = ", ".join(FAMILIES)
        raise ModelLoadError(f"{f.where}: {named}: supported are {supported}")
    other = [a for a in architectures if a not in _ARCHITECTURES]
    if other:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelLoadError(
            f"{f.where}: architecture {other[0]!r} is not supported: supported are {supported}"
        )
    return str(model_type)


def _refuse_unsupported(f: Fields) -> None:
    quantization = f.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelLoadError(
            f"{f.where}: quantization_config ({method or 'no quant_method'}) is not supported: "
            "use an unquantised checkpoint or a GGUF file"
        )
    if f.get("auto_map"):
        raise ModelLoadError(f"{f.where}: auto_map asks for remote code, which is never run")
    activation = f.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise ModelLoadError(
            f"{f.where}: hidden_act {activation!r} is not supported: expected silu"
        )


def _sliding_window(f: Fields, family: str) -> int | None:
    """Tokens that a layer sees, where that is limited. Qwen files name a window they do not use."""
    if family.startswith("qwen") and not f.flag("use_sliding_window"):
        return None
    if family == "llama" or f.get("sliding_window") is None:
        return None
    return f.integer("sliding_window")


def rope_from_hf(f: Fields, positions: int) -> RopeConfig:
    """RoPE of a config.json, from `rope_parameters` (transformers 5) or from `rope_theta` and
    `rope_scaling`. `positions` is its max_position_embeddings."""
    new, old = f.get("rope_parameters") or {}, f.get("rope_scaling") or {}
    for name, values in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
            raise ModelLoadError(f"{f.where}: {name} must be one flat object, got {values!r}")
    r = Fields(old or new, f"{f.where}: {'rope_scaling' if old else 'rope_parameters'}")
    default = Fields(new, f.where).number("rope_theta", default=10000.0)
    theta = float(r.number("rope_theta", default=f.number("rope_theta", default=default)))
    rope_type = r.get("rope_type", "type") or "default"
    if not old and rope_type == "default" and f.get("rope_condense_ratio") is not None:
        # longchat, from before rope_scaling existed
        rope_type = "linear"
        r.values["factor"] = f.number("rope_condense_ratio")
    if rope_type not in ROPE_TYPES:
        expected = ", ".join(ROPE_TYPES)
        raise ModelLoadError(f"{r.where}: RoPE type {rope_type!r} is not supported: {expected} are")
    partial = r.get("partial_rotary_factor") or f.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelLoadError(f"{r.where}: partial_rotary_factor {partial} is not supported")
    original = f.get("original_max_position_embeddings")
    return _scaled_rope(r, rope_type, theta, positions, original)


def _scaled_rope(
    r: Fields, rope_type: str, theta: float, positions: int, outer_original: int | None
) -> RopeConfig:
    if rope_type == "default":
        return RopeConfig(theta=theta, original_length=positions)
    if rope_type == "linear" or rope_type == "dynamic":
        factor = _factor(r)
        return RopeConfig(rope_type, theta, factor, original_length=positions)
    if rope_type == "llama3":
        return RopeConfig(
            rope_type,
            theta,
            _factor(r),
            original_length=outer_original or r.integer("original_max_position_embeddings"),
            low_freq_factor=r.number("low_freq_factor"),
            high_freq_factor=r.number("high_freq_factor"),
        )
    original = outer_original or r.integer("original_max_position_embeddings", default=positions)
    factor = _factor(r, default=positions / original)
    return RopeConfig(
        rope_type,
        theta,
        factor,
        original_length=original,
        attention_factor=_yarn_attention_factor(r, factor),
        beta_fast=r.number("beta_fast", default=32.0),
        beta_slow=r.number("beta_slow", default=1.0),
        truncate=r.flag("truncate", default=True),
    )


def _factor(r: Fields, default: float | None = None) -> float:
    factor = float(r.number("factor", default=default))
    if not factor >= 1.0:
        raise ModelLoadError(f"{r.where}: factor must be at least 1, got {factor}")
    return factor


def _yarn_attention_factor(r: Fields, factor: float) -> float:
    """Explicit, or YaRN's 0.1 ln(factor) + 1; DeepSeek's files give a ratio of two such terms."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    explicit = r.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    above, below = r.get("mscale"), r.get("mscale_all_dim")
    return temperature(above) / temperature(below) if above and below else temperature(1.0)
