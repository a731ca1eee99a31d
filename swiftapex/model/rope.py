"""Rotary position embedding: positions to cosines and sines, in float32.

The five types are those of transformers' `modeling_rope_utils` (default, linear, dynamic, yarn,
llama3) and give the same numbers beyond the original length too.

Dynamic scaling depends on a sequence length, and a token's K in the cache keeps the base that it
was rotated with. The rule here: a prompt's token uses the length of the whole prompt, a generated
token at position p uses p + 1, and neither less than the original length. transformers' `generate`
does the same for one request with a cache of its own; batching, chunked prefill and preemption do
not change it, since the prompt's length never changes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swiftapex.model.config import RopeConfig


def rope_length(position: int, prompt_len: int) -> int:
    """Sequence length, in tokens, that dynamic scaling uses for the token at `position`."""
    return max(prompt_len, position + 1)


class Rope:
    """One model's rotation. `needs_lengths` says whether `rotation` reads `rope_lengths`."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu"):
        self.config = config
        self.head_dim = head_dim
        self.needs_lengths = config.type == "dynamic"
        self.scale = config.attention_factor if config.type == "yarn" else 1.0
        self.exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.inverse_frequencies = _inverse_frequencies(config, self.exponents).to(device)
        self.exponents = self.exponents.to(device)
        self._table: Tensor | None = None  # [positions, head_dim]

    def keep(self, num_positions: int) -> None:
        """Computes the rotations of positions below `num_positions` once and for all, which is one
        read in place of five calls in every pass; dynamic ones differ from request to request.
        Rotations of later positions are then an error."""
        if not self.needs_lengths:
            positions = torch.arange(num_positions, device=self.inverse_frequencies.device)
            self._table = self.rotation(positions)

    def rotation(self, positions: Tensor, rope_lengths: Tensor | None = None) -> Tensor:
        """positions [n] integers -> [n, head_dim] float32: cos in the first half of each row, sin
        in the second. rope_lengths [n] integers (see `rope_length`); only dynamic reads them, and
        None there means that no sequence exceeds the original length."""
        if self._table is not None:
            return self._table[positions]
        frequencies = self.inverse_frequencies
        if self.needs_lengths and rope_lengths is not None:
            frequencies = self._dynamic(rope_lengths)
        angles = positions.to(torch.float32)[:, None] * frequencies
        half = self.head_dim // 2
        out = torch.empty((len(positions), self.head_dim), device=angles.device)
        torch.cos(angles, out=out[:, :half])
        torch.sin(angles, out=out[:, half:])
        return out if self.scale == 1.0 else out.mul_(self.scale)

    def _dynamic(self, lengths: Tensor) -> Tensor:
        """lengths [n] -> inverse frequencies [n, head_dim / 2]: the base grows with the length."""
        config = self.config
        ratio = lengths.double().clamp_min(config.original_length) / config.original_length
        growth = (config.factor * ratio - (config.factor - 1)) ** (
            self.head_dim / (self.head_dim - 2)
        )
        base = (config.theta * growth).float()
        return 1.0 / base[:, None] ** self.exponents


def _inverse_frequencies(config: RopeConfig, exponents: Tensor) -> Tensor:
    """Radians per token of each pair of dimensions, [head_dim / 2] float32."""
    plain = 1.0 / config.theta**exponents
    if config.frequency_factors is not None:
        return plain / torch.tensor(config.frequency_factors, dtype=torch.float32)
    if config.type == "linear":
        return plain / config.factor
    if config.type == "yarn":
        return _yarn(config, plain)
    if config.type == "llama3":
        return _llama3(config, plain)
    return plain


def _yarn(config: RopeConfig, plain: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): dimensions that turn often keep their frequency, those
    that turn seldom are interpolated, with a linear ramp between."""
    dim = 2 * len(plain)

    def dimension(turns: float) -> float:  # that turns `turns` times within the original length
        wavelength = config.original_length / (2 * math.pi * turns)
        return dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, smooth between."""
    turns = config.original_length * plain / (2 * math.pi)  # within the original length
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / config.factor + smooth * plain
