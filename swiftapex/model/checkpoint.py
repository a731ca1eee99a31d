"""Files of tensors behind one interface, under the names that Hugging Face checkpoints use.

Tensors are mapped, not read: who takes a slice of one touches only the slice's pages (GGUF tensors
that are quantised are dequantised whole).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.gguf_file import GgufFile

_SAFETENSORS_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_BIN_INDEX, _BIN_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"


class TensorSource(Protocol):
    """A checkpoint's tensors by name."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Name of the type it is stored in."""

    def tensor(self, name: str) -> Tensor:
        """On the CPU, in the stored type, often read-only memory: copy from it, never write."""

    def where(self, name: str) -> str:
        """The file that holds it, for messages."""


class SafetensorsSource:
    """Safetensors files. `files` names the file of each tensor."""

    def __init__(self, files: dict[str, Path], handles: dict[Path, Any]) -> None:
        self._files = files
        self._handles = handles

    def names(self) -> Iterable[str]:
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[self._files[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        kind = self._handles[self._files[name]].get_slice(name).get_dtype()
        return _SAFETENSORS_TYPES.get(kind, str(kind))

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[self._files[name]].get_tensor(name)
        return tensor

    def where(self, name: str) -> str:
        return str(self._files[name])


class BinSource:
    """PyTorch .bin files, loaded with weights_only and mapped where their format allows."""

    def __init__(self, tensors: dict[str, tuple[Path, Tensor]]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1].shape)

    def dtype(self, name: str) -> str:
        return str(self._tensors[name][1].dtype).removeprefix("torch.")

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name][1]

    def where(self, name: str) -> str:
        return str(self._tensors[name][0])


class GgufSource:
    """A GGUF file. In those of architecture llama the rows of Q and K are stored in the order of
    interleaved RoPE (pair i: rows 2i, 2i + 1 of a head) and are put back here."""

    def __init__(self, file: GgufFile, num_q_heads: int, num_kv_heads: int) -> None:
        self._file = file
        self._names = {gguf_to_hf_name(n): n for n in file.tensors if n != "rope_freqs.weight"}
        permuted = file.metadata["general.architecture"] == "llama"
        self._heads = {"q_proj": num_q_heads, "k_proj": num_kv_heads} if permuted else {}

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def dtype(self, name: str) -> str:
        return self._file.tensors[self._names[name]].dtype or "float32"

    def tensor(self, name: str) -> Tensor:
        info = self._file.tensors[self._names[name]]
        array = self._file.array(self._names[name])
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if info.dtype == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        heads = next((h for part, h in self._heads.items() if f".{part}." in name), None)
        if heads is None:
            return tensor
        pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])  # head, pair, which of the two
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def where(self, name: str) -> str:
        return f"{self._file.path} ({self._names[name]})"


_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gguf_to_hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None and layer[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_GGUF_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_GGUF_NAMES[stem]}.{kind}" if stem in _GGUF_NAMES else name


def open_folder(folder: Path) -> TensorSource:
    """The weights in a Hugging Face folder. An index decides, tensor by tensor; without one, the
    single file; without that, all shards. Raises ModelLoadError naming the file that is missing,
    truncated, or holds a tensor for the second time."""
    if (folder / _INDEX).is_file():
        return _open_safetensors(_read_index(folder / _INDEX))
    if (folder / _SINGLE).is_file():
        return _open_safetensors(_list_tensors([folder / _SINGLE]))
    shards = _shards(folder, "safetensors")
    if shards:
        return _open_safetensors(_list_tensors(shards))
    if (folder / _BIN_INDEX).is_file():
        wanted = _read_index(folder / _BIN_INDEX)
        return _open_bin(sorted(set(wanted.values())), wanted)
    if (folder / _BIN_SINGLE).is_file():
        return _open_bin([folder / _BIN_SINGLE], None)
    shards = _shards(folder, "bin")
    if shards:
        return _open_bin(shards, None)
    raise ModelLoadError(
        f"{folder}: no weights: expected {_INDEX}, {_SINGLE}, model-*-of-*.safetensors or "
        f"{_BIN_SINGLE} (consolidated.* files are of another layout and are not read)"
    )


def _read_index(path: Path) -> dict[str, Path]:
    """The file of each tensor, as an index says. Every file must be there."""
    try:
        files = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path}: not a checkpoint index: {error!r}") from error
    for file in sorted(set(files.values())):
        if not (path.parent / file).is_file():
            raise ModelLoadError(f"{path.parent / file} is missing: {path.name} names it")
    return {name: path.parent / file for name, file in files.items()}


def _shards(folder: Path, suffix: str) -> list[Path]:
    """Shards `STEM-i-of-n.SUFFIX` without an index. All n must be there."""
    found: dict[int, Path] = {}
    stem, width, total = "", 0, 0
    for path in sorted(folder.glob(f"*-of-*.{suffix}")):
        part = re.fullmatch(r"(model|pytorch_model)-(\d+)-of-(\d+)", path.stem)
        if part is None:
            continue
        if found and int(part[3]) != total:
            raise ModelLoadError(f"{path}: belongs to another set of shards than the rest")
        found[int(part[2])] = path
        stem, width, total = part[1], len(part[2]), int(part[3])
    if found and sorted(found) != list(range(1, total + 1)):
        lost = next(i for i in range(1, total + 1) if i not in found)
        raise ModelLoadError(
            f"{folder / f'{stem}-{lost:0{width}}-of-{total:0{width}}.{suffix}'} is missing: "
            f"{len(found)} of {total} shards are there"
        )
    return list(found.values())


def _safe_open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: truncated or damaged: {error}") from error


def _list_tensors(paths: list[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        for name in _safe_open(path).keys():  # noqa: SIM118 (not a mapping)
            if name in files:
                raise ModelLoadError(f"tensor {name} is both in {files[name]} and in {path}")
            files[name] = path
    return files


def _open_safetensors(files: dict[str, Path]) -> SafetensorsSource:
    handles = {path: _safe_open(path) for path in sorted(set(files.values()))}
    held = {path: set(handle.keys()) for path, handle in handles.items()}
    for name, path in files.items():
        if name not in held[path]:
            raise ModelLoadError(f"{path}: tensor {name} is missing: the index says it is there")
    return SafetensorsSource(files, handles)


def _open_bin(paths: list[Path], wanted: dict[str, Path] | None) -> BinSource:
    tensors: dict[str, tuple[Path, Tensor]] = {}
    for path in paths:
        for name, tensor in _load_bin(path).items():
            if wanted is not None and wanted.get(name) != path:
                continue
            if name in tensors:
                raise ModelLoadError(f"tensor {name} is both in {tensors[name][0]} and in {path}")
            tensors[name] = (path, tensor)
    for name, path in (wanted or {}).items():
        if name not in tensors:
            raise ModelLoadError(f"{path}: tensor {name} is missing: the index says it is there")
    return BinSource(tensors)


def _load_bin(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            mapped = file.read(2) == b"PK"  # zip, the format since torch 1.6; older ones cannot be
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # the unpickler raises nearly anything on damaged files
        raise ModelLoadError(f"{path}: cannot be read with weights_only: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path}: expected a state dict, got {type(loaded).__name__}")
    return {name: t for name, t in loaded.items() if isinstance(t, Tensor)}
