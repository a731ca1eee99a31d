"""Reading a GGUF file: metadata, the table of tensors, one dequantised tensor at a time.

The format is that of the GGUF specification (ggml/docs/gguf.md), versions 2 and 3, little-endian.
`gguf.GGUFReader` is not used because it builds several Python objects per vocabulary entry, which
takes seconds; its dequantisation is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swiftapex.core.errors import ModelLoadError

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_PLAIN_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml types that are not quantised


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major ([out, in]), the reverse of the file's order."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the start of the data section

    @property
    def dtype(self) -> str | None:
        """Name of the float type, None where the tensor is quantised."""
        return _PLAIN_TYPES.get(self.ggml_type)


class GgufFile:
    """A GGUF file, mapped. `metadata` holds Python values, numeric arrays as numpy arrays.

    Raises ModelLoadError where the file is not GGUF, is of another version or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from error
        self._view = self._bytes.data
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path}: truncated or damaged in its header: {error}") from error

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor `name`, row-major: float32 if quantised, else its own type, bfloat16 as
        uint16 words. Raises ModelLoadError where the file ends before the tensor does."""
        import gguf

        info = self.tensors[name]
        kind = gguf.GGMLQuantizationType(info.ggml_type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        elements = int(np.prod(info.shape, dtype=np.int64))
        begin = self._data + info.offset
        end = begin + elements // block * block_bytes
        if end > len(self._bytes):
            raise ModelLoadError(
                f"{self.path}: truncated: tensor {name} ends at byte {end}, "
                f"the file at {len(self._bytes)}"
            )
        raw = self._bytes[begin:end]
        plain = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
        if info.dtype is not None:
            return raw.view(plain[info.dtype]).reshape(info.shape)
        rows = raw.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)
        try:
            return np.asarray(gguf.dequantize(rows, kind)).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has type {kind.name}, which is not supported"
            ) from error

    def _read_header(self) -> None:
        if bytes(self._view[:4]) != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path}: GGUF version {version}, expected 2 or 3")
        num_tensors, num_pairs = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        for _ in range(num_tensors):
            name = self._string()
            dims = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
            info = TensorInfo(tuple(reversed(dims)), self._scalar("<I"), self._scalar("<Q"))
            if name in self.tensors:
                raise ModelLoadError(f"{self.path}: tensor {name} appears twice")
            self.tensors[name] = info
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    def _scalar(self, layout: str) -> Any:
        value = struct.unpack_from(layout, self._view, self._at)[0]
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        begin, self._at = self._at, self._at + length
        if self._at > len(self._view):
            raise IndexError(f"a string of {length} bytes at byte {begin}")
        return str(self._view[begin : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        dtype = np.dtype(_SCALARS[kind])
        begin, self._at = self._at, self._at + count * dtype.itemsize
        if self._at > len(self._view):
            raise IndexError(f"an array of {count} numbers at byte {begin}")
        return np.frombuffer(self._view[begin : self._at], dtype)
