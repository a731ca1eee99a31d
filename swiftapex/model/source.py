"""Finding a model: a checkpoint folder, a .gguf file, one inside a package, or a named shape."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.config import ModelConfig, named_architecture

if TYPE_CHECKING:
    import torch

    from swiftapex.model.tokenizer import Tokenizer
    from swiftapex.model.weights import ModelWeights


class ModelSettings(Protocol):
    """The `model` section of an experiment (or anything with its fields)."""

    @property
    def path(self) -> str | None: ...
    @property
    def architecture(self) -> str | None: ...
    @property
    def weights(self) -> str | None: ...
    @property
    def num_layers(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...


class ModelSource(Protocol):
    """A model that can be described, and loaded. Making one reads no weights."""

    name: str

    @property
    def config(self) -> ModelConfig:
        """`eos_token_ids` is the union of all the files that name one."""

    @property
    def dtype(self) -> str:
        """float32, float16 or bfloat16: as asked for, or for `auto` as the checkpoint says."""

    def tokenizer(self) -> Tokenizer | None:
        """None where the model has none: prompts must then be token ids."""

    def load(
        self, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
    ) -> ModelWeights:
        """Reads the weights (dtype None: `self.dtype`). Raises ModelLoadError."""


class DummySource:
    """A named shape with random weights, deterministic by seed."""

    def __init__(self, settings: ModelSettings, seed: int = 0) -> None:
        assert settings.architecture is not None
        self.name = settings.architecture
        self.seed = seed
        self._settings = settings

    @cached_property
    def config(self) -> ModelConfig:
        return named_architecture(self.name, self._settings.num_layers)

    @property
    def dtype(self) -> str:
        asked = self._settings.dtype
        return asked if asked != "auto" else (self.config.dtype or "float32")

    def tokenizer(self) -> Tokenizer | None:
        return None

    def load(
        self, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
    ) -> ModelWeights:
        from swiftapex.model.weights import dummy_weights

        return dummy_weights(self.config, as_torch_dtype(dtype or self.dtype), device, self.seed)


def as_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from itself or from its name."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]


def open_model(settings: ModelSettings, seed: int = 0) -> ModelSource:
    """Finds the model that `settings` name. `seed` is that of dummy weights.

    Raises ModelLoadError where there is none, or where it is of an unsupported kind.
    """
    if settings.path is not None:
        raise ModelLoadError(f"{settings.path}: not readable yet")
    if settings.architecture is None:
        raise ModelLoadError("a model needs either `path` or `architecture`")
    return DummySource(settings, seed)
