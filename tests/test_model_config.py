"""config.json and named architectures to ModelConfig: spellings, nulls, defaults, refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

import pytest

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.config import named_architecture
from swiftapex.model.hf_config import config_from_hf

LLAMA = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=1000,
    hidden_size=320,
    intermediate_size=640,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=2048,
)


def read(**changes):
    return config_from_hf(LLAMA | changes)


def test_defaults_and_nulls() -> None:
    expected = read()
    assert (expected.num_kv_heads, expected.head_dim, expected.rope.theta) == (4, 80, 10000.0)
    nulls = dict(num_key_value_heads=None, head_dim=None, rope_theta=None, rope_scaling=None)
    assert read(**nulls, rope_parameters=None, quantization_config=None, auto_map=None) == expected


def test_explicit_head_dim() -> None:
    assert read(head_dim=128).head_dim == 128


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [
        (dict(torch_dtype="bfloat16"), "bfloat16"),
        (dict(dtype="float16"), "float16"),
        (dict(torch_dtype=None, dtype="bfloat16"), "bfloat16"),
        (dict(torch_dtype="bfloat16", dtype=None), "bfloat16"),
        (dict(torch_dtype="torch.float32"), "float32"),
        (dict(torch_dtype=None), None),
        ({}, None),
    ],
)
def test_dtype(entries, dtype) -> None:
    assert read(**entries).dtype == dtype


def test_eos_is_a_number_a_list_or_nothing() -> None:
    assert read(eos_token_id=2).eos_token_ids == (2,)
    assert read(eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_bias_spellings_and_families() -> None:
    assert (read(bias=True).qkv_bias, read(bias=True).o_bias) == (True, True)
    qwen2 = read(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)
    assert read(model_type="qwen3", architectures=["Qwen3ForCausalLM"]).qk_norm
    assert read(model_type=None).family == "llama"


def test_sliding_window_ends_the_context() -> None:
    mistral = dict(model_type="mistral", architectures=["MistralForCausalLM"])
    assert read(**mistral, sliding_window=1024).max_length == 1024
    assert read(**mistral, sliding_window=None).max_length == 4096
    qwen = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], sliding_window=1024)
    assert read(**qwen, use_sliding_window=False).max_length == 4096
    assert read(**qwen, use_sliding_window=True).max_length == 1024


def test_rope_spellings() -> None:
    new = read(rope_parameters=LLAMA3 | dict(rope_theta=500000))
    old = read(rope_theta=500000.0, rope_scaling=dict(LLAMA3, type="llama3"))
    assert new == old
    assert new.rope.theta == 500000.0
    condensed = read(rope_condense_ratio=8)  # longchat
    assert condensed.rope == read(rope_scaling=dict(type="linear", factor=8)).rope
    assert read(rope_scaling=dict(type=None, rope_type="default")).rope == read().rope


def test_context_length_under_scaling() -> None:
    assert read(rope_scaling=dict(type="dynamic", factor=2.0)).max_length == 8192
    assert read(rope_scaling=dict(type="linear", factor=4)).max_length == 16384
    assert read(rope_scaling=LLAMA3).max_length == 4096
    yarn = dict(type="yarn", factor=16.0, original_max_position_embeddings=256, finetuned=True)
    assert read(rope_scaling=yarn).max_length == 4096  # not multiplied again
    yarn["original_max_position_embeddings"] = 4096
    assert read(rope_scaling=yarn).max_length == 65536


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"]), "gemma2"),
        (dict(model_type=None, architectures=["FalconForCausalLM"]), "FalconForCausalLM"),
        (dict(architectures=["LlamaForSequenceClassification"]), "SequenceClassification"),
        (dict(model_type=None, architectures=None), "model_type"),
        (dict(quantization_config=dict(quant_method="gptq")), "gptq"),
        (dict(auto_map=dict(AutoModel="modeling.Model")), "auto_map"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(rope_scaling=dict(type="longrope", factor=2)), "longrope"),
        (dict(rope_scaling=dict(type="linear")), "factor"),
        (dict(rope_scaling=dict(type="linear", factor="2")), "factor"),
        (dict(rope_scaling={k: v for k, v in LLAMA3.items() if "low" not in k}), "low_freq_factor"),
        (
            dict(rope_scaling={k: v for k, v in LLAMA3.items() if "original" not in k}),
            "original_max_position_embeddings",
        ),
        (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "rope_parameters"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(hidden_size=None), "hidden_size"),
        (dict(hidden_size="big"), "hidden_size"),
        (dict(num_key_value_heads=3), "key-value"),
        (dict(num_key_value_heads=0), "num_kv_heads"),
        (dict(head_dim=33), "head_dim"),
        (dict(torch_dtype="float8_e4m3fn"), "float8"),
        (dict(attention_bias="yes"), "attention_bias"),
    ],
)
def test_refused_by_name(changes, names) -> None:
    with pytest.raises(ModelLoadError, match=names):
        read(**changes)


def test_named_architectures() -> None:
    seven = named_architecture("llama2-7b")
    assert seven.num_parameters == pytest.approx(6.74e9, rel=0.01)
    assert named_architecture("llama3.1-70b").num_parameters == pytest.approx(70.6e9, rel=0.01)
    assert named_architecture("smollm2-135m").num_parameters == pytest.approx(135e6, rel=0.01)
    assert seven.kv_bytes_per_token("float16") == 512 * 1024
    assert seven.kv_bytes_per_token("int8") == 264 * 1024  # with 4 bytes of scale per 128 elements
    assert asdict(named_architecture("llama2-7b", 4)) == asdict(seven) | dict(num_layers=4)
    with pytest.raises(ModelLoadError, match="llama2-13b"):
        named_architecture("llama2-13")
    with pytest.raises(ModelLoadError, match="num_layers"):
        named_architecture("tiny", 0)


def test_reading_a_config_needs_no_torch() -> None:
    code = (
        "import sys; import swiftapex.model.hf_config, swiftapex.model.gguf_config, "
        "swiftapex.model.source, swiftapex.model.tokenizer; assert 'torch' not in sys.modules; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
