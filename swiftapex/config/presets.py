"""Smaller GPUs that a large one stands in for: what `engine.gpu.preset` fills in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """Values for `sm_count` and `memory` (bytes) where the configuration gives none. `words` says
    what is emulated and what is not."""

    sm_count: int | None
    memory: int | None
    words: str


_GIB = 2**30
_EIGHT = (
    "8 multiprocessors of an H200 multiply bfloat16 at 47 to 55 TFLOP/s and read weights at 875 "
    "GB/s (measured; fewer break cuBLAS)"
)
PRESETS: dict[str, Preset] = {
    "none": Preset(None, None, "the GPU as it is"),
    "t4": Preset(
        8,
        16 * _GIB,
        f"Emulates a T4's memory and about its arithmetic (65 TFLOP/s in float16): {_EIGHT}. Not "
        "emulated: its 320 GB/s, so that the GPU side is 2.7 times too fast against the CPU; no "
        "bfloat16 there.",
    ),
    "a10g": Preset(
        8,
        24 * _GIB,
        f"Emulates an A10G's memory and about its arithmetic (70 TFLOP/s) and bandwidth (600 "
        f"GB/s): {_EIGHT}.",
    ),
    "l4": Preset(
        8,
        24 * _GIB,
        f"Emulates an L4's memory: {_EIGHT}. Not emulated: its 300 GB/s, and half of its 121 "
        "TFLOP/s.",
    ),
    "h100": Preset(
        None,
        80 * _GIB,
        "Emulates an H100's memory. An H200 has its arithmetic, but reads 4.8 TB/s where an H100 "
        "(SXM) reads 3.35.",
    ),
}
"""Figures of the emulated GPUs are from their makers' data sheets (dense)."""
