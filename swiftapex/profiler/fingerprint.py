"""What a profile depends on: a table is read again only where all of this is the same. No torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from swiftapex.backends.threads import cpu_threads, split_threads, threads_beside_launching
from swiftapex.config.schema import EngineConfig
from swiftapex.kv.sizing import KVSizes
from swiftapex.model.config import ModelConfig
from swiftapex.profiler.measure import Points

FORMAT = 2  # of the tables; another number makes all older profiles strangers
_NATIVE = ("swiftapex._kernels_cpu", "swiftapex._kernels_cuda")
# The Python code that a pass runs through: what it launches, and how, is part of what is measured.
_CODE = (
    *("attention.py", "sending.py"),
    *("backends", "costs", "kv", "model", "pipelines", "profiler", "worker"),
)
_PACKAGE = Path(__file__).resolve().parents[1]


def fingerprint(
    config: ModelConfig,
    dtype: str,
    engine: EngineConfig,
    sizes: KVSizes,
    points: Points,
    device_name: str,
) -> dict[str, Any]:
    """Plain values. Model shape and dtypes, the GPU and its caps, the processor and the threads of
    both sides, tensor parallelism, versions and hashes of the code, and the points measured."""
    return {
        "format": FORMAT,
        "model": asdict(config),
        "dtype": dtype,
        "cpu_kv_dtype": sizes.cpu_dtype,
        "block_size": engine.block_size,
        "device": engine.device,
        "gpu": {
            "name": device_name,
            "sm_count": engine.gpu.sm_count,
            "memory": engine.gpu.memory,
        },
        "cpu": {
            "model": cpu_model(),
            "threads": _threads(engine, sizes.cpu_blocks > 0),
            "attention_kernel": engine.cpu.attention_kernel,
        },
        "tensor_parallel_size": engine.tensor_parallel_size,
        "versions": {name: _version(name) for name in ("swiftapex", "torch")},
        "native": {name: _native_hash(name) for name in _NATIVE},
        "code": _code_hash(),
        "points": asdict(points),
    }


def normal(value: Mapping[str, Any]) -> Any:
    """As it is after a way through JSON: tuples are lists there."""
    return json.loads(json.dumps(value, sort_keys=True))


def digest(value: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that stand for a fingerprint."""
    text = json.dumps(normal(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Keys under which two fingerprints differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        pairs = [(key, one.get(key), other.get(key)) for key in keys]
        return [d for key, a, b in pairs for d in differences(a, b, f"{where}.{key}".lstrip("."))]
    return [] if one == other else [f"{where}: {one!r} against {other!r}"]


def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"(?:model name|Hardware)\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _threads(engine: EngineConfig, with_cpu_side: bool) -> dict[str, int]:
    """Of each side that computes on the host."""
    asked = engine.cpu.threads
    if engine.device == "cuda":
        return {"cpu": threads_beside_launching(asked).count} if with_cpu_side else {}
    if not with_cpu_side:
        return {"gpu": cpu_threads(asked).count}
    gpu, cpu = split_threads(asked)
    return {"gpu": gpu.count, "cpu": cpu.count}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _native_hash(module: str) -> str | None:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


def sources() -> dict[str, Any]:
    """What stands for the package where no revision is known: its version, and hashes of all its
    Python code and of its native modules."""
    return {
        "version": _version("swiftapex"),
        "code": _hash(sorted(_PACKAGE.rglob("*.py"))),
        "native": {name: _native_hash(name) for name in _NATIVE},
    }


def _code_hash() -> str:
    paths = [_PACKAGE / name for name in _CODE]
    return _hash(
        file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])
    )


def _hash(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.relative_to(_PACKAGE).as_posix().encode() + file.read_bytes())
    return total.hexdigest()[:16]
