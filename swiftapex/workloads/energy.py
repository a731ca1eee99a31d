"""Energy that the GPUs (NVML) and the processors (RAPL) have used, where this machine tells it.

Both count since some moment in the past: what is used is the difference of two readings.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from swiftapex.config.schema import EngineConfig

_POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"  # comes with NVIDIA's driver


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Joules of each counter by its name; None where the side has no readable counter.

    `cpu_range_j`: where a counter of the processors begins again at 0.
    """

    gpu_j: dict[str, float] | None
    cpu_j: dict[str, float] | None
    cpu_range_j: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Joules between two readings, idle power of the whole devices included; None: not known."""

    gpu_j: float | None
    cpu_j: float | None


def energy_between(begin: EnergyReading, end: EnergyReading) -> EnergyUse:
    """A counter of the processors may begin anew once in between."""
    ranges = end.cpu_range_j or {}
    return EnergyUse(_used(begin.gpu_j, end.gpu_j, {}), _used(begin.cpu_j, end.cpu_j, ranges))


class EnergyMeter:
    """Reads the first `num_gpus` GPUs that this process sees, and all packages and memories of the
    processors for which RAPL is readable (usually only to root)."""

    def __init__(self, num_gpus: int, powercap: Path = _POWERCAP) -> None:
        self._gpus = _nvml_devices(num_gpus) if num_gpus else []
        self._domains = _rapl_domains(powercap)

    def read(self) -> EnergyReading:
        gpu_j = {name: _nvml_joules(device) for name, device in self._gpus}
        ranges = {str(d): 1e-6 * _number(d / "max_energy_range_uj") for d in self._domains}
        return EnergyReading(
            {name: joules for name, joules in gpu_j.items() if joules is not None} or None,
            {str(d): 1e-6 * _number(d / "energy_uj") for d in self._domains} or None,
            ranges or None,
        )


def energy_meter(engine: EngineConfig) -> EnergyMeter:
    """Of the GPUs that an engine uses."""
    return EnergyMeter(engine.tensor_parallel_size if engine.device == "cuda" else 0)


def _used(
    begin: dict[str, float] | None, end: dict[str, float] | None, ranges: dict[str, float]
) -> float | None:
    if not begin or not end or begin.keys() != end.keys():
        return None
    parts = {name: end[name] - begin[name] for name in end}
    return sum(used + ranges.get(name, 0.0) * (used < 0) for name, used in parts.items())


def _rapl_domains(powercap: Path) -> list[Path]:
    """Packages (intel-rapl:0) and their memories (intel-rapl:0:1, named dram): nothing twice."""
    domains = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            _number(folder / "energy_uj"), _number(folder / "max_energy_range_uj")
        except (OSError, ValueError):
            continue
        if name.startswith("package") or name == "dram":
            domains.append(folder)
    return domains


def _number(path: Path) -> int:
    return int(path.read_text())


def _nvml_devices(count: int) -> list[tuple[str, ctypes.c_void_p]]:
    """Handles of the first GPUs of CUDA_VISIBLE_DEVICES, by index or UUID. Empty without NVML."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = []
    for name in visible.split(",")[:count]:
        handle = ctypes.c_void_p()
        if name.strip().isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.strip().encode(), ctypes.byref(handle))
        if failed == 0:
            devices.append((name.strip(), handle))
    return devices


def _nvml_joules(device: ctypes.c_void_p) -> float | None:
    """None where the GPU has no such counter (before Volta)."""
    millijoules = ctypes.c_ulonglong()
    failed = ctypes.CDLL(_NVML).nvmlDeviceGetTotalEnergyConsumption(
        device, ctypes.byref(millijoules)
    )
    return None if failed else 1e-3 * millijoules.value
