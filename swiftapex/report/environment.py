"""Where an experiment ran: versions, processor, memory, GPUs and the package's sources."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftapex.backends.threads import cpu_threads
from swiftapex.profiler.fingerprint import cpu_model, sources

_PACKAGES = (
    "swiftapex",
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "ray",
)
_ROOT = Path(__file__).resolve().parents[1]


def describe_environment() -> dict[str, Any]:
    """Plain values for `environment.json`; what this machine does not tell is None."""
    threads = cpu_threads("auto")
    gpus = _gpus()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_revision": git_revision(_ROOT),
        "sources": sources(),
        "cpu": {
            "model": cpu_model(),
            "usable_threads": threads.count,
            "limited_by": threads.limited_by,
            "instruction_set": _instruction_set(),
        },
        "memory": {
            "total_bytes": _meminfo("MemTotal"),
            "available_bytes": _meminfo("MemAvailable"),
        },
        "gpus": [text for _, text in gpus],
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "visible_gpus": _visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")),
    }


def gpus_of(environment: Mapping[str, Any], count: int) -> list[str]:
    """The GPUs that a process with so many ranks takes: the first ones that it sees."""
    return list(environment["visible_gpus"][:count])


def git_revision(folder: Path) -> str | None:
    """Commit of the repository that tracks `folder`, with "-dirty" where files differ from it.
    None outside a repository, also inside one that does not track the folder."""
    tracked = _output("git", "-C", str(folder), "ls-files", "--", "__init__.py")
    if not tracked:
        return None
    revision = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "-uno", "--", ".")
    return f"{revision}-dirty" if revision and changed else revision


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _instruction_set() -> str | None:
    """The best one that the native CPU kernels have for this processor."""
    try:
        kernels = importlib.import_module("swiftapex._kernels_cpu")
    except ImportError:
        return None
    isas = kernels.available_isas()
    return str(isas[-1]) if isas else None


def _meminfo(field: str) -> int | None:
    kibibytes = _first_match("/proc/meminfo", rf"{field}:\s*(\d+) kB")
    return None if kibibytes is None else int(kibibytes) * 1024


def _gpus() -> list[tuple[str, str]]:
    """UUID, then name, driver and memory of every NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=uuid,name,driver_version,memory.total"
    lines = (_output("nvidia-smi", query, "--format=csv,noheader") or "").splitlines()
    return [(uuid, text) for uuid, _, text in (line.partition(", ") for line in lines)]


def _visible(gpus: Sequence[tuple[str, str]], wanted: str | None) -> list[str]:
    """GPUs that CUDA shows under CUDA_VISIBLE_DEVICES, each with its number or UUID: it names them
    by either, and what follows a stranger is not seen. None: all."""
    if wanted is None:
        return [f"{number}: {text}" for number, (_, text) in enumerate(gpus)]
    found = []
    for word in filter(None, map(str.strip, wanted.split(","))):
        named = [
            text
            for number, (uuid, text) in enumerate(gpus)
            if word == str(number) or (len(word) > 4 and uuid.startswith(word))
        ]
        if len(named) != 1:
            break
        found.append(f"{word}: {named[0]}")
    return found


def _first_match(path: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[1].strip() if match else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
