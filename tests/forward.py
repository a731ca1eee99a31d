"""The shortest forward pass over `Stages` and the reference backend: one request at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import settings
from torch import Tensor

from swiftapex.backends.reference import ReferenceBackend
from swiftapex.core.ops import AttentionBatch, AttentionShape
from swiftapex.model.rope import rope_length
from swiftapex.model.source import ModelSource, open_model
from swiftapex.model.stages import Stages


class Forward:
    """One request with a KV cache of its own. `prompt_len` is that of the first `run`."""

    def __init__(self, path: Path | str, max_tokens: int = 512, **fields: Any) -> None:
        self.source: ModelSource = open_model(settings(path, **fields))
        self.config = self.source.config
        backend = ReferenceBackend()
        weights = self.source.load()
        self.stages = Stages(self.config, weights, backend.ops)
        c, block = self.config, 16
        self.shape = AttentionShape(c.num_q_heads, c.num_kv_heads, c.head_dim, block)
        num_blocks = -(-max_tokens // block)
        self.kv = backend.allocate_kv(c.num_layers, num_blocks, self.shape, weights.dtype)
        self.backend = backend
        self.table = torch.arange(num_blocks, dtype=torch.int32).flip(0)[None]
        self.reset()

    def reset(self) -> None:
        self.length = self.prompt_len = 0

    def run(self, token_ids: list[int]) -> Tensor:
        """Appends tokens; logits [len(token_ids), vocab] at their positions."""
        start, n = self.length, len(token_ids)
        self.prompt_len = self.prompt_len or n
        self.length += n
        lens = torch.tensor([self.length], dtype=torch.int32)
        batch = AttentionBatch(0, (n,), self.table, lens, (self.length,))
        positions = torch.arange(start, self.length)
        lengths = torch.tensor([rope_length(p, self.prompt_len) for p in positions.tolist()])
        stages = self.stages
        rotation = stages.rotation(positions, lengths)
        x = stages.embed(torch.tensor(token_ids))
        for layer in range(self.config.num_layers):
            qkv = stages.pre_attn(layer, x, rotation)
            o = self.backend.attend(self.kv[layer], batch, self.shape, qkv)
            x = stages.post_attn(layer, o, x)
        return stages.logits(x)

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        """n greedy tokens after the prompt."""
        self.reset()
        logits = self.run(prompt)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < n:
            tokens.append(int(self.run(tokens[-1:])[-1].argmax()))
        return tokens
