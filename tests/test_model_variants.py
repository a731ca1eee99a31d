"""Every variant of the model against transformers in float32: logits of prefill and of decoding."""

from __future__ import annotations

import pytest
import torch
from forward import Forward
from oracle import TransformersOracle
from tiny import ABSENT, checkpoint, copy_of, edit_config

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=10000.0,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)

VARIANTS = {
    "mha": dict(num_key_value_heads=4),
    "gqa 1": dict(num_attention_heads=8, num_key_value_heads=1),
    "gqa 3": dict(num_attention_heads=6, num_key_value_heads=2, head_dim=16, hidden_size=96),
    "gqa 5": dict(num_attention_heads=5, num_key_value_heads=1, head_dim=16, hidden_size=80),
    "gqa 7": dict(num_attention_heads=7, num_key_value_heads=1, head_dim=16, hidden_size=112),
    "gqa 8": dict(num_attention_heads=8, num_key_value_heads=1, head_dim=32),
    "head_dim is not hidden / heads": dict(head_dim=32, num_attention_heads=4),
    "tied": dict(tie_word_embeddings=True),
    "attention and mlp bias": dict(attention_bias=True, mlp_bias=True),
    "qwen2": dict(family="qwen2"),
    "qwen2 tied": dict(family="qwen2", tie_word_embeddings=True),
    "qwen3": dict(family="qwen3", head_dim=32),
    "qwen3 with bias": dict(family="qwen3", attention_bias=True),
    "mistral": dict(family="mistral", sliding_window=None, head_dim=32),
    "mistral within its window": dict(family="mistral", sliding_window=128),
}
ROPES = {
    "linear": dict(rope_type="linear", factor=2.0, rope_theta=10000.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0),
    "yarn": YARN,
    "yarn, all options": YARN | dict(beta_fast=16.0, beta_slow=2.0, truncate=False),
    "yarn, explicit attention factor": YARN | dict(attention_factor=1.25),
    "yarn, mscale": YARN | dict(mscale=0.707, mscale_all_dim=1.0),
    "llama3": LLAMA3,
}


def prompt_of(n: int, vocab: int = 128) -> list[int]:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def assert_same(path, prompt_len: int, decodes: int = 6) -> None:
    """Logits of a prompt and of greedy decoding after it, and the tokens."""
    oracle, model = TransformersOracle(path), Forward(path)
    prompt = prompt_of(prompt_len)
    expected = oracle.logits(prompt)
    torch.testing.assert_close(model.run(prompt), expected, atol=2e-4, rtol=1e-4)
    tokens, rows = oracle.greedy(prompt, decodes)
    model.reset()
    logits = [model.run(prompt)[-1]]
    logits += [model.run([t])[-1] for t in tokens[:-1]]
    torch.testing.assert_close(torch.stack(logits), rows, atol=2e-4, rtol=1e-4)
    assert [int(row.argmax()) for row in logits] == tokens
    assert model.greedy(prompt, decodes) == tokens


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    options = dict(VARIANTS[name])
    assert_same(checkpoint(options.pop("family", "llama"), **options), prompt_len=40)


@pytest.mark.parametrize("prompt_len", [20, 90, 150])
@pytest.mark.parametrize("name", ROPES)
def test_rope_type(name: str, prompt_len: int) -> None:
    """Original length 64, so 90 and 150 are beyond it."""
    path = checkpoint(rope_parameters=ROPES[name], max_position_embeddings=64)
    assert_same(path, prompt_len)


@pytest.mark.parametrize("name", sorted(ROPES))
def test_kept_rotations_are_those_computed_anew(name: str) -> None:
    rope = Forward(checkpoint(rope_parameters=ROPES[name])).stages.rope
    positions = torch.tensor([0, 5, 63, 64, 199, 5])
    anew = rope.rotation(positions)
    rope.keep(200)
    torch.testing.assert_close(rope.rotation(positions), anew, rtol=0, atol=1e-6)
    if not rope.needs_lengths:
        with pytest.raises(IndexError):
            rope.rotation(torch.tensor([200]))


def test_dynamic_rope_decodes_across_the_original_length() -> None:
    path = checkpoint(rope_parameters=ROPES["dynamic"], max_position_embeddings=64)
    assert_same(path, prompt_len=60, decodes=12)


def test_dynamic_rope_does_nothing_up_to_the_original_length() -> None:
    scaled = checkpoint(rope_parameters=ROPES["dynamic"], max_position_embeddings=64)
    plain = checkpoint(max_position_embeddings=64)
    prompt = prompt_of(64)
    assert torch.equal(Forward(scaled).run(prompt), Forward(plain).run(prompt))


def test_dynamic_rope_does_not_depend_on_chunks() -> None:
    path = checkpoint(rope_parameters=ROPES["dynamic"], max_position_embeddings=64)
    model, prompt = Forward(path), prompt_of(100)
    whole = model.run(prompt)
    model.reset()
    model.prompt_len = len(prompt)
    chunks = torch.cat([model.run(prompt[:30]), model.run(prompt[30:70]), model.run(prompt[70:])])
    torch.testing.assert_close(chunks, whole, atol=1e-5, rtol=1e-5)


def test_llama3_rope_does_not_tie_the_head(tmp_path) -> None:
    """L4: an untied checkpoint with a llama3 dictionary uses its own head."""
    path = checkpoint(rope_parameters=LLAMA3, tie_word_embeddings=False)
    weights = Forward(path).stages.weights
    assert weights.head is not weights.embedding
    assert not torch.equal(weights.head, weights.embedding)


def test_num_layers_cuts_the_model() -> None:
    path = checkpoint(num_hidden_layers=3)
    model = Forward(path, num_layers=2)
    assert len(model.stages.weights.layers) == model.config.num_layers == 2
    expected = TransformersOracle(path)
    expected.model.model.layers = expected.model.model.layers[:2]
    prompt = prompt_of(20)
    torch.testing.assert_close(model.run(prompt), expected.logits(prompt), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("value", [ABSENT, None])
def test_missing_shape_fields_have_defaults(tmp_path, value) -> None:
    """L1: heads for num_key_value_heads, hidden / heads for head_dim, 10000 for rope_theta."""
    path = checkpoint(num_key_value_heads=4)
    edited = copy_of(path, tmp_path / "edited")
    absent = dict(num_key_value_heads=value, head_dim=value, rope_theta=value)
    edit_config(edited, rope_parameters=ABSENT, **absent)
    prompt = prompt_of(30)
    assert torch.equal(Forward(edited).run(prompt), Forward(path).run(prompt))


def test_old_and_new_config_keys_mean_the_same(tmp_path) -> None:
    """L7 a and b: transformers 4 and transformers 5 spellings."""
    path = checkpoint(rope_parameters=LLAMA3 | dict(rope_theta=50000.0))
    old = dict(LLAMA3, type="llama3")
    del old["rope_theta"]
    edited = edit_config(
        copy_of(path, tmp_path / "old"),
        rope_parameters=ABSENT,
        dtype=ABSENT,
        torch_dtype="float32",
        rope_scaling=old,
        rope_theta=50000,
    )
    prompt = prompt_of(100)
    assert torch.equal(Forward(edited).run(prompt), Forward(path).run(prompt))


def test_oracle_forgives_only_ties() -> None:
    oracle = TransformersOracle(checkpoint())
    prompt = prompt_of(20)
    tokens = oracle.greedy_tokens(prompt, 4)
    oracle.assert_greedy(prompt, tokens)
    torch.testing.assert_close(
        oracle.logits(prompt, double=True), oracle.logits(prompt).double(), atol=1e-4, rtol=1e-4
    )
    with pytest.raises(AssertionError, match="token 3"):
        oracle.assert_greedy(prompt, [*tokens[:3], tokens[3] + 1])
    with torch.no_grad():  # a head with two equal rows: either of the tokens is right
        for model in (oracle.model, oracle.model64):
            model.lm_head.weight[100] = model.lm_head.weight[tokens[0]]
    oracle.assert_greedy(prompt, [100])
