"""What a list of a GPU's activities says: how long it worked, how long it idled and before what,
and how many launches a pass takes. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_SHORT_US, _LONG_US = 5.0, 50.0  # between them: a late launch; longer: somebody is waited for
_NOT_WORK = ("wait_word", "write_word")  # kernels that only look at a word or set it
_CLASSES = {  # the first whose part is in a kernel's name
    "attention": ("decode_attention", "prefill"),
    "rotate and append": ("rope_append",),
    "norm": ("rms_norm",),
    "SiLU": ("silu_mul",),
    "hand-off": ("copy_rows",),  # gather and scatter
    "moves": ("copy_blocks",),
    "sampling": ("argmax",),
    "embedding": ("embedding",),
    "matrix products": ("gemm", "gemv", "nvjet", "xmma", "cutlass", "splitK", "cublas"),
    "torch": ("at::",),
}
_LAUNCHES = ("Launch", "Memcpy", "Memset", "StreamWaitValue", "StreamWriteValue")


@dataclass(frozen=True, slots=True)
class Activity:
    """`kind`: a kernel, a copy or fill of memory, or a call of the host's. Times in ns, of one
    clock; `num_bytes` of a copy, None where unknown."""

    kind: Literal["kernel", "copy", "call"]
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int | None = None


def kernel_class(name: str) -> str:
    for label, parts in _CLASSES.items():
        if any(part in name for part in parts):
            return label
    return "other"


def analyse(
    activities: Sequence[Activity], wall_s: float, passes: int, layers: int
) -> dict[str, Any]:
    """Of `passes` passes through `layers` layers, which took `wall_s` seconds.

    gpu_busy: the time in which at least one kernel ran, over the wall time. idle_share: one minus
    the sum of kernel durations over the wall time; kernels at the same time count twice, copies and
    waiting for words not at all. idle: where the time without a kernel lies, as shares of the wall
    time, by the length of the gap; `ends` is what is left before the first kernel and after the
    last. idle_before: µs per pass of gaps, by the kernel that ended them (a late hand-off is
    waiting for the CPU side, or for its launch). Numbers per layer are those of a pass over its
    layers, so that embedding and sampling are spread over them.
    """
    kernels = [
        a for a in activities if a.kind == "kernel" and not any(n in a.name for n in _NOT_WORK)
    ]
    wall_ns = wall_s * 1e9
    worked = sum(k.end_ns - k.start_ns for k in kernels)
    gaps, covered = _gaps(kernels)
    shares, before = Counter[str](), Counter[str]()
    for gap, name in gaps:
        us = gap / 1e3
        long = "over_50us" if us > _LONG_US else "5_to_50us"
        shares["under_5us" if us < _SHORT_US else long] += gap
        before[kernel_class(name)] += gap
    shares["ends"] = round(wall_ns) - covered - sum(gap for gap, _ in gaps)
    bins = ("under_5us", "5_to_50us", "over_50us", "ends")
    return {
        "gpu_busy": round(covered / wall_ns, 4),
        "idle_share": round(1 - worked / wall_ns, 4),
        "idle": {name: round(shares[name] / wall_ns, 4) for name in bins},
        "idle_before_us_per_pass": {
            name: round(ns / 1e3 / passes, 1) for name, ns in before.most_common()
        },
        "kernel_ms_per_pass": round(worked / 1e6 / passes, 4),
        "kernels_per_pass": round(len(kernels) / passes, 2),
        "kernels_per_layer": round(len(kernels) / passes / layers, 2),
        "kernels": _by_class(kernels, passes, layers),
        "launches_per_pass": _launches(activities, passes),
        "copies": _copies([a for a in activities if a.kind == "copy"], passes),
    }


def _gaps(kernels: Sequence[Activity]) -> tuple[list[tuple[int, str]], int]:
    """(ns without any kernel, name of the one that came next) each, and the ns covered."""
    gaps, covered = [], 0
    end: int | None = None
    for kernel in sorted(kernels, key=lambda k: k.start_ns):
        if end is not None and kernel.start_ns > end:
            gaps.append((kernel.start_ns - end, kernel.name))
        begin = kernel.start_ns if end is None else max(kernel.start_ns, end)
        covered += max(0, kernel.end_ns - begin)
        end = kernel.end_ns if end is None else max(end, kernel.end_ns)
    return gaps, covered


def _by_class(kernels: Sequence[Activity], passes: int, layers: int) -> dict[str, Any]:
    counts, times = Counter[str](), Counter[str]()
    for kernel in kernels:
        label = kernel_class(kernel.name)
        counts[label] += 1
        times[label] += kernel.end_ns - kernel.start_ns
    return {
        label: {
            "per_pass": round(count / passes, 2),
            "per_layer": round(count / passes / layers, 2),
            "us_per_pass": round(times[label] / 1e3 / passes, 1),
        }
        for label, count in counts.most_common()
    }


def _launches(activities: Sequence[Activity], passes: int) -> dict[str, float]:
    """Calls by which the host hands work to the GPU; a graph is one. Words by stream operations
    are left out where the tracing library does not show them."""
    calls = Counter(
        a.name for a in activities if a.kind == "call" and any(part in a.name for part in _LAUNCHES)
    )
    return {name: round(count / passes, 2) for name, count in calls.most_common()}


def _copies(copies: Sequence[Activity], passes: int) -> dict[str, Any]:
    known = [copy.num_bytes for copy in copies if copy.num_bytes is not None]
    return {
        "per_pass": round(len(copies) / passes, 2),
        "us_per_pass": round(sum(c.end_ns - c.start_ns for c in copies) / 1e3 / passes, 1),
        "bytes_per_pass": round(sum(known) / passes) if len(known) == len(copies) else None,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: launches and kernels per layer and host time, a line per result of a GPU."""
    labels = [*_CLASSES, "other"]
    used = [s for s in labels if any(s in (r["gpu"] or {}).get("kernels", ()) for r in results)]
    head = ["strategy", "launches per layer", "kernels per layer", *used]
    head += ["kernels per pass", "host µs per layer", "host µs per pass"]
    lines = [head, ["---"] * len(head)]
    for result in results:
        gpu, host = result["gpu"], result["host"]
        if gpu is None:
            continue
        launches = sum(gpu["launches_per_pass"].values()) / result["num_layers"]
        per_class = [gpu["kernels"].get(label, {}).get("per_layer", 0) for label in used]
        numbers = [round(launches, 2), gpu["kernels_per_layer"], *per_class]
        numbers += [gpu["kernels_per_pass"], host["us_per_layer"], host["us_per_pass"]]
        lines.append([result["strategy"], *map(str, numbers)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
