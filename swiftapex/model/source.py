"""Finding a model: a checkpoint folder, a .gguf file, one inside a package, or a named shape."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.config import DTYPE_BYTES, ModelConfig, named_architecture, with_layers
from swiftapex.model.gguf_config import config_from_gguf
from swiftapex.model.gguf_file import GgufFile
from swiftapex.model.hf_config import config_from_hf, token_ids
from swiftapex.model.shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch

    from swiftapex.model.checkpoint import TensorSource
    from swiftapex.model.tokenizer import Tokenizer
    from swiftapex.model.weights import Allocate, ModelWeights


class ModelSettings(Protocol):
    """The `model` section of an experiment, or anything with its fields."""

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


class ModelSource:
    """A model that can be described, and loaded. Making one reads no weights.

    `name` is short, for reports. Subclasses say where config, tokenizer and tensors come from.
    """

    def __init__(self, name: str, settings: ModelSettings, seed: int) -> None:
        if settings.dtype not in ("auto", *DTYPE_BYTES):
            expected = ", ".join(("auto", *DTYPE_BYTES))
            raise ModelLoadError(f"dtype {settings.dtype!r} is unknown: expected {expected}")
        self.name = name
        self._settings = settings
        self._seed = seed

    @cached_property
    def config(self) -> ModelConfig:
        """`eos_token_ids` is the union of all that config, generation config and tokenizer name."""
        tokenizer = self.tokenizer()
        named = () if tokenizer is None else tokenizer.eos_token_ids
        eos = tuple(sorted({*self.shape.eos_token_ids, *named}))
        return replace(self.shape, eos_token_ids=eos)

    @property
    def shape(self) -> ModelConfig:
        """As `config`, but for what only the tokenizer knows: reads none."""
        return with_layers(self._file_config(), self._num_layers)

    @cached_property
    def dtype(self) -> str:
        """float32, float16 or bfloat16: as asked for, or for `auto` as the checkpoint says: by its
        config, else by its embedding's type; float16 for quantised GGUF files."""
        if self._settings.dtype != "auto":
            return self._settings.dtype
        return self._file_config().dtype or self._stored_dtype()

    def tokenizer(self) -> Tokenizer | None:
        """None where the model has none: prompts must then be token ids."""
        return self._tokenizer

    def load(
        self,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        allocate: Allocate | None = None,
        shard: Shard = WHOLE,
    ) -> ModelWeights:
        """The weights of a shard (dtype None: `self.dtype`), the large ones in memory from
        `allocate` (None: torch's, on `device`). Raises ModelLoadError naming file and tensor."""
        kind = as_torch_dtype(dtype or self.dtype)
        if self._settings.weights == "dummy":
            from swiftapex.model.dummy import dummy_weights

            return dummy_weights(self.shape, kind, device, self._seed, allocate, shard)
        from swiftapex.model.load import load_weights

        tensors = self._tensors()
        return load_weights(self.shape, tensors, kind, device, self._num_layers, allocate, shard)

    @property
    def _num_layers(self) -> int | None:
        return self._settings.num_layers

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return None

    def _stored_dtype(self) -> str:
        return "float32"

    def _file_config(self) -> ModelConfig:
        raise NotImplementedError

    def _tensors(self) -> TensorSource:
        raise ModelLoadError(f"{self.name} has no weights: set weights to dummy")


class ArchitectureSource(ModelSource):
    """A published shape without a checkpoint: its weights are random."""

    def _file_config(self) -> ModelConfig:
        return named_architecture(self.name)


class FolderSource(ModelSource):
    """A Hugging Face checkpoint folder."""

    def __init__(self, folder: Path, settings: ModelSettings, seed: int) -> None:
        super().__init__(folder.resolve().name, settings, seed)
        self.folder = folder
        self._read_config = self._read()

    def _read(self) -> ModelConfig:
        path = self.folder / "config.json"
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing: {self.folder} is not a checkpoint folder")
        config = config_from_hf(_read_json(path), str(path))
        generation = self.folder / "generation_config.json"
        more = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        return replace(config, eos_token_ids=config.eos_token_ids + token_ids(more))

    def _file_config(self) -> ModelConfig:
        return self._read_config

    def _stored_dtype(self) -> str:
        tensors = self._tensors()
        name = "model.embed_tokens.weight"
        stored = tensors.dtype(name) if name in tensors.names() else "float32"
        return stored if stored in DTYPE_BYTES else "float32"

    def _tensors(self) -> TensorSource:
        from swiftapex.model.checkpoint import open_folder

        return open_folder(self.folder)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        from swiftapex.model.tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self.folder)


class GgufModelSource(ModelSource):
    """A GGUF file: config, tokenizer and weights in one."""

    def __init__(self, path: Path, settings: ModelSettings, seed: int) -> None:
        super().__init__(path.stem, settings, seed)
        self.file = GgufFile(path)
        self._read_config = config_from_gguf(self.file)

    def _file_config(self) -> ModelConfig:
        return self._read_config

    def _tensors(self) -> TensorSource:
        from swiftapex.model.checkpoint import GgufSource

        config = self._read_config
        return GgufSource(self.file, config.num_q_heads, config.num_kv_heads)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        from swiftapex.model.tokenizer import tokenizer_from_gguf_file

        if "tokenizer.ggml.tokens" not in self.file.metadata:
            return None
        return tokenizer_from_gguf_file(self.file)


def open_model(settings: ModelSettings, seed: int = 0) -> ModelSource:
    """Finds the model that `settings` name. `seed` is that of dummy weights.

    Raises ModelLoadError where there is none, or where it is of an unsupported kind.
    """
    if (settings.path is None) == (settings.architecture is None):
        raise ModelLoadError("a model needs exactly one of `path` and `architecture`")
    if settings.architecture is not None:
        named_architecture(settings.architecture, settings.num_layers)
        return ArchitectureSource(settings.architecture, settings, seed)
    assert settings.path is not None
    path = find_model(settings.path)
    if path.is_dir():
        return FolderSource(path, settings, seed)
    if path.suffix == ".gguf":
        return GgufModelSource(path, settings, seed)
    raise ModelLoadError(f"{path}: expected a checkpoint folder or a .gguf file")


def find_model(path: str) -> Path:
    """The file or folder of a `path` setting; `package:NAME` is the .gguf file in that package."""
    if not path.startswith("package:"):
        found = Path(path).expanduser()
        if not found.exists():
            raise ModelLoadError(f"{path}: no such file or folder (models are not downloaded)")
        return found
    name = path.removeprefix("package:")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None  # does not import it
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(f"{path}: no package {name!r} is installed")
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(f"{path}: expected one .gguf file in {folders[0]}, found {len(files)}")
    return files[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return values


def as_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from itself or from its name."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    return {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "int8": torch.int8,
    }[dtype]
