"""What a model looks like: the one description that the engine, the cost model and Stages read.

No torch here. `hf_config.py` and `gguf_config.py` read a `ModelConfig` from files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swiftapex.config.explain import nearest
from swiftapex.core.errors import ModelLoadError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields that a type does not use keep their defaults.

    `original_length` is the length of pretraining, before scaling, in tokens.
    `frequency_factors` (GGUF only, head_dim / 2 numbers) divide the inverse frequencies: llama.cpp
    stores the llama3 scaling in this form.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as the borders of the ramp
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMSNorm, GQA with RoPE, SwiGLU.

    `max_length` is the longest context in tokens for which this engine computes what the model
    defines: scaled RoPE lengthens it, a sliding window ends it (within one window sliding
    attention and full attention are the same, and this engine only has full attention).
    `tied` None: the file does not say, so the presence of the head's tensor decides.
    `dtype` None: the file does not say, so the tensors' own type decides.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tied: bool | None = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head before RoPE (Qwen3)
    sliding_window: int | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_qkv_heads(self) -> int:
        return self.num_q_heads + 2 * self.num_kv_heads

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer's matrices: what a pass reads of each layer."""
        attention = (self.num_qkv_heads + self.num_q_heads) * self.head_dim * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Parameters of all matrices, norms and biases left out."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * self.num_layer_parameters + embeddings

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token in all layers. int8 has a float32 scale per head."""
        row = self.head_dim + 4 if dtype == "int8" else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * row

    def check(self, where: str) -> ModelConfig:
        """Returns itself, or raises ModelLoadError naming the first impossible field."""
        positive = (
            "vocab_size hidden_size intermediate_size num_layers num_q_heads num_kv_heads "
            "head_dim max_length"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ModelLoadError(
                    f"{where}: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_q_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{where}: {self.num_q_heads} query heads do not divide into "
                f"{self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"{where}: head_dim must be even for RoPE, got {self.head_dim}")
        return self


def with_layers(config: ModelConfig, num_layers: int | None) -> ModelConfig:
    """The same model cut to, or for dummy weights grown to, `num_layers` layers (None: as is)."""
    if num_layers is None:
        return config
    if num_layers < 1:
        raise ModelLoadError(f"num_layers must be at least 1, got {num_layers}")
    return replace(config, num_layers=num_layers)


def scaled_length(rope: RopeConfig, max_positions: int) -> int:
    """Longest context of a model whose file says `max_positions`, in tokens. Files with llama3 or
    yarn scaling usually name the extended length already, those with linear or dynamic do not."""
    if rope.type in ("linear", "dynamic"):
        return int(max_positions * rope.factor)
    if rope.type == "yarn":
        return max(max_positions, int(rope.original_length * rope.factor))
    return max_positions


_LLAMA31_ROPE = RopeConfig("llama3", 500000.0, 8.0, 8192, 1.0, 4.0)
_ARCHITECTURES = {
    "llama2-7b": ModelConfig(
        "llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e-5, dtype="float16",
        bos_token_id=1, eos_token_ids=(2,),
    ),
    "llama2-13b": ModelConfig(
        "llama", 32000, 5120, 13824, 40, 40, 40, 128, 4096, 1e-5, dtype="float16",
        bos_token_id=1, eos_token_ids=(2,),
    ),
    "llama3-8b": ModelConfig(
        "llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, 1e-5, RopeConfig(theta=500000.0),
        dtype="bfloat16", bos_token_id=128000, eos_token_ids=(128001,),
    ),
    "llama3.1-8b": ModelConfig(
        "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, _LLAMA31_ROPE,
        dtype="bfloat16", bos_token_id=128000, eos_token_ids=(128001,),
    ),
    "llama3.1-70b": ModelConfig(
        "llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072, 1e-5, _LLAMA31_ROPE,
        dtype="bfloat16", bos_token_id=128000, eos_token_ids=(128001,),
    ),
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, RopeConfig(theta=100000.0),
        tied=True, dtype="bfloat16", bos_token_id=1, eos_token_ids=(2,),
    ),
    "tiny": ModelConfig(
        "llama", 512, 256, 688, 4, 8, 2, 32, 4096, 1e-5, dtype="float32",
        bos_token_id=1, eos_token_ids=(2,),
    ),
}  # fmt: skip


def named_architecture(name: str, num_layers: int | None = None) -> ModelConfig:
    """The published shape called `name`. Raises ModelLoadError that lists the known names."""
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelLoadError(
            f"unknown architecture {name!r}: expected one of {known}; "
            f"nearest known name: {nearest(name, _ARCHITECTURES)}"
        )
    return with_layers(_ARCHITECTURES[name], num_layers)
