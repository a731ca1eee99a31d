"""What an engine refuses before it loads anything."""

from __future__ import annotations

from swiftapex.config.schema import EngineConfig
from swiftapex.core.errors import ConfigError


def max_model_len(engine: EngineConfig, model_length: int) -> int:
    """ConfigError where the engine is asked for more than the model is made for."""
    if engine.max_model_len == "auto":
        return model_length
    if engine.max_model_len > model_length:
        raise ConfigError(
            f"engine.max_model_len: {engine.max_model_len} is more than the model's {model_length}"
        )
    return engine.max_model_len


def check_supported(engine: EngineConfig) -> None:
    """ConfigError for settings that this engine would not heed: a result must not claim them."""
    defaults = EngineConfig()
    unheeded = ["cpu.numa", "cpu.hugepages", "cpu.mlock"]
    if engine.device != "cuda":
        unheeded = ["gpu.preset", "gpu.sm_count", "gpu.memory", "gpu.memory_share", *unheeded]
    if engine.device == "reference":
        unheeded += ["cpu.attention_kernel"]
    for key in unheeded:
        asked, default = engine, defaults
        for part in key.split("."):
            asked, default = getattr(asked, part), getattr(default, part)
        if asked != default:
            needs = "needs device cuda" if key.startswith("gpu.") else "is not supported"
            raise ConfigError(
                f"engine.{key}: {asked!r} {needs}; with device {engine.device} leave it out"
            )
