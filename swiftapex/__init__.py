"""swiftapex: a small, readable research engine for hybrid CPU-GPU LLM inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swiftapex.core.request import SamplingParams

if TYPE_CHECKING:
    from swiftapex.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch with it and is imported when it is first asked for."""
    if name == "LLM":
        from swiftapex.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'swiftapex' has no attribute {name!r}")
