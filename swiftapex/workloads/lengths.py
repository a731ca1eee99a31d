"""Prompt and output lengths: fixed, uniform around a mean, or as in published traces.

The named distributions are piecewise linear fits, by quantiles, to the lengths in
- osc: OpenAI's summarize-from-feedback comparisons, as the NEO artifact (MLSys'25) uses them;
- azure_conv, azure_code: the Azure LLM inference traces of 2023 (Patel et al., ISCA'24).
Mean, median and 90th percentile agree with the originals within 5 %. The ends do not: of
azure_conv's 19,366 inputs 140 are longer than the fit's 4,200 (up to 14,050), of azure_code's 8,819
outputs 22 are longer than its 600 (up to 1,899). A trace as it is needs `kind: trace`.

Two more stand for reasoning workloads of APEX's evaluation, short prompts and long outputs. They
are NOT fitted to those data sets: their quantiles are assumptions, log-normal but for the cut at
the end, so that prompt and output together fit Llama-2's 4096 tokens:
- livebench: questions of some hundred tokens (median 350), answers with a medium-length chain of
  thought (median 600, a spread of 1.8 per standard deviation);
- dolphin_r1: short questions (median 120), chains of thought as of DeepSeek-R1 (median 1100).

Prompt and output lengths are drawn independently of each other.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Literal

from swiftapex.config.schema import Length, LengthRange

_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_FITS = {
    ("osc", "input"): (29, 201, 290, 371, 459, 514, 536, 555, 589),
    ("osc", "output"): (15, 33, 39, 45, 51, 56, 59, 65, 100),
    ("azure_conv", "input"): (2, 181, 396, 1020, 1189, 2735, 4083, 4142, 4200),
    ("azure_conv", "output"): (7, 41, 85, 129, 370, 424, 451, 601, 1000),
    ("azure_code", "input"): (3, 75, 500, 1469, 2600, 5194, 7302, 7436, 7437),
    ("azure_code", "output"): (6, 6, 9, 13, 24, 55, 90, 200, 600),
    ("livebench", "input"): (60, 115, 222, 350, 552, 833, 1066, 1500, 1600),
    ("livebench", "output"): (60, 228, 404, 600, 892, 1274, 1578, 2100, 2400),
    ("dolphin_r1", "input"): (15, 34, 71, 120, 202, 324, 427, 600, 640),
    ("dolphin_r1", "output"): (150, 418, 740, 1100, 1635, 2336, 2893, 3300, 3400),
}


def draw_length(length: Length, side: Literal["input", "output"], rng: random.Random) -> int:
    """One length in tokens, at least 1."""
    if isinstance(length, int):
        return length
    if isinstance(length, LengthRange):
        low = max(1, round(length.mean * (1 - length.spread)))
        high = max(low, round(length.mean * (1 + length.spread)))
        return low + int(rng.random() * (high - low + 1))
    return _interpolate(_FITS[length, side], rng.random())


def _interpolate(values: tuple[int, ...], quantile: float) -> int:
    index = min(bisect_right(_QUANTILES, quantile), len(_QUANTILES) - 1)
    below, above = _QUANTILES[index - 1], _QUANTILES[index]
    part = (quantile - below) / (above - below)
    return round(values[index - 1] + part * (values[index] - values[index - 1]))
