"""Tiny random checkpoints for tests, each built once per pytest session in a temporary folder."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ABSENT = object()  # in `edit_config`: delete the key
SMALL = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
T0 = SMALL | dict(  # larger, so that it tells RoPE variants and precisions apart
    vocab_size=512,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=4096,
)


@functools.cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="swiftapex-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def checkpoint(family: str = "llama", seed: int = 0, std: float = 0.1, **config: Any) -> Path:
    """A folder that transformers saved: `family` (llama, mistral, qwen2, qwen3) with SMALL sizes
    and `config` over them. Do not change its files: `copy_of` first."""
    key = json.dumps([family, seed, std, config], sort_keys=True)
    return _build(key)


@functools.cache
def _build(key: str) -> Path:
    import torch
    import transformers

    family, seed, std, config = json.loads(key)
    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config_class = getattr(transformers, f"{prefix}Config")
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(config_class(**(SMALL | {"initializer_range": std} | config))).eval()
    with torch.no_grad():  # transformers starts these at 0 and 1, which would hide them
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, std)
            elif "norm" in name:
                parameter.normal_(1, std)
    folder = _session_folder() / f"{family}-{len(list(_session_folder().iterdir()))}"
    model.save_pretrained(folder)
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    """A copy at `to` that a test may change."""
    return Path(shutil.copytree(folder, to))


def edit_config(folder: Path, **changes: Any) -> Path:
    """Sets keys of config.json, or deletes those that are ABSENT."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ABSENT:
            values.pop(key, None)
        else:
            values[key] = value
    path.write_text(json.dumps(values))
    return folder


def settings(path: Path | str | None = None, **fields: Any) -> SimpleNamespace:
    """What `open_model` takes, float32 unless said otherwise."""
    defaults = dict(architecture=None, weights=None, num_layers=None, dtype="float32")
    return SimpleNamespace(path=None if path is None else str(path), **(defaults | fields))
