"""Checkpoint files: each parameter exactly once, from the file that the index names, or an error
that names the tensor and the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from forward import Forward
from oracle import TransformersOracle
from safetensors.torch import load_file, save_file
from tiny import ABSENT, checkpoint, copy_of, edit_config, settings

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.source import open_model

PROMPT = list(range(3, 40))
SHARD = "model-00002-of-00003.safetensors"


def logits(path: Path, **fields) -> torch.Tensor:
    return Forward(path, **fields).run(PROMPT)


def load(path: Path | None, **fields):
    return open_model(settings(path, **fields)).load()


def change_tensors(path: Path, drop: str = "", **added: torch.Tensor) -> None:
    """Rewrites a safetensors file without `drop` and with `added`."""
    tensors = {k: v.clone() for k, v in load_file(path).items() if k != drop}
    save_file(tensors | added, path, metadata={"format": "pt"})


@pytest.fixture
def single(tmp_path) -> Path:
    return copy_of(checkpoint(), tmp_path / "single")


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Three shards and an index: embedding and head apart from the layers."""
    folder = copy_of(checkpoint(), tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {n: 1 if "embed" in n else 2 if ".layers." in n else 3 for n in tensors}
    for i in (1, 2, 3):
        part = {n: t for n, t in tensors.items() if files[n] == i}
        save_file(part, folder / f"model-{i:05}-of-00003.safetensors")
    index = {n: f"model-{i:05}-of-00003.safetensors" for n, i in files.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_shards_with_and_without_an_index(sharded) -> None:
    expected = logits(checkpoint())
    assert torch.equal(logits(sharded), expected)
    (sharded / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(sharded), expected)


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named(sharded, index) -> None:
    (sharded / SHARD).unlink()
    if not index:
        (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=SHARD):
        load(sharded)


def test_shards_of_two_sets_are_refused(sharded) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    shutil.copy(sharded / SHARD, sharded / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelLoadError, match="another set of shards"):
        load(sharded)


def test_files_beside_the_index_are_ignored(sharded) -> None:
    """L10: a stray single file, a tensor in the wrong shard, Mistral's consolidated file."""
    wrong = {n: t + 1 for n, t in load_file(checkpoint() / "model.safetensors").items()}
    save_file(wrong, sharded / "model.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(2)}, sharded / "consolidated.safetensors")
    extra = {"model.embed_tokens.weight": torch.zeros(128, 64)}
    change_tensors(sharded / SHARD, **extra)
    assert torch.equal(logits(sharded), logits(checkpoint()))


def test_tensor_in_two_shards_without_index_is_refused(sharded) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    change_tensors(sharded / SHARD, **{"model.norm.weight": torch.ones(64)})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is both in"):
        load(sharded)


def test_index_naming_an_absent_tensor_is_refused(sharded) -> None:
    change_tensors(sharded / SHARD, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelLoadError, match=rf"{SHARD}.*layers\.1\.mlp\.up_proj"):
        load(sharded)


def test_truncated_file_is_named(single) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated"):
        load(single)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_named(single, name) -> None:
    change_tensors(single / "model.safetensors", drop=name)
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        load(single)


def test_unexpected_and_misshapen_tensors_are_named(single) -> None:
    path = single / "model.safetensors"
    change_tensors(path, **{"model.layers.0.mlp.router.weight": torch.ones(3)})
    with pytest.raises(ModelLoadError, match=r"unexpected tensor .*mlp\.router"):
        load(single)
    wrong = {"model.norm.weight": torch.ones(3)}
    change_tensors(path, drop="model.layers.0.mlp.router.weight", **wrong)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[3\].*\[64\]"):
        load(single)


def test_layers_beyond_the_config_are_refused(single) -> None:
    edit_config(single, num_hidden_layers=1)
    with pytest.raises(ModelLoadError, match=r"unexpected tensor model\.layers\.1"):
        load(single)


def test_old_rotary_constants_are_ignored(single) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(single / "model.safetensors", **{name: torch.ones(8)})
    assert torch.equal(logits(single), logits(checkpoint()))


def test_bias_without_a_flag_is_refused(tmp_path) -> None:
    """L12: never dropped."""
    path = copy_of(checkpoint(attention_bias=True), tmp_path / "bias")
    edit_config(path, attention_bias=ABSENT)
    with pytest.raises(ModelLoadError, match=r"unexpected tensor .*_proj\.bias .*no such bias"):
        load(path)


def test_flag_without_bias_is_refused(single) -> None:
    edit_config(single, attention_bias=True)
    with pytest.raises(ModelLoadError, match=r"_proj\.bias is missing"):
        load(single)


@pytest.mark.parametrize("index", [True, False])
def test_bin_files(tmp_path, index) -> None:
    """L11: .bin shards beside other pickles, with old rotary constants."""
    folder = copy_of(checkpoint(), tmp_path / "bin")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save({"lr": 1.0}, folder / "training_args.bin")
    names = sorted(tensors)
    files = {n: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(names)}
    for file in set(files.values()):
        torch.save({n: tensors[n] for n in names if files[n] == file}, folder / file)
    if index:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(logits(folder), logits(checkpoint()))
    (folder / "pytorch_model-00002-of-00002.bin").write_bytes(b"PK nonsense")
    with pytest.raises(ModelLoadError, match=r"pytorch_model-00002-of-00002\.bin: cannot be read"):
        load(folder)


def test_pickled_code_is_not_run(tmp_path) -> None:
    folder = copy_of(checkpoint(), tmp_path / "evil")
    (folder / "model.safetensors").unlink()
    torch.save({"x": shutil.rmtree}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="weights_only"):
        load(folder)


@pytest.mark.parametrize("flag", [True, False, ABSENT])
@pytest.mark.parametrize("present", [True, False])
def test_tied_embeddings_by_flag_and_presence(single, flag, present) -> None:
    edit_config(single, tie_word_embeddings=flag)
    if not present:
        change_tensors(single / "model.safetensors", drop="lm_head.weight")
    if flag is False and not present:
        with pytest.raises(ModelLoadError, match=r"lm_head\.weight is missing"):
            load(single)
        return
    weights = load(single)
    assert (weights.head is weights.embedding) == (not present)
    if flag is not ABSENT:
        expected = TransformersOracle(single).logits(PROMPT)
        torch.testing.assert_close(logits(single), expected, atol=2e-4, rtol=1e-4)


def test_equal_head_of_a_tied_model_takes_no_memory(single) -> None:
    edit_config(single, tie_word_embeddings=True)
    embedding = load_file(single / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(single / "model.safetensors", **{"lm_head.weight": embedding.clone()})
    weights = load(single)
    assert weights.head is weights.embedding


def test_dtype_auto(tmp_path) -> None:
    """L7 c and d: null beside a name is no answer; neither means the tensors' own type."""
    folder = copy_of(checkpoint(), tmp_path / "dtype")
    edit_config(folder, torch_dtype=None, dtype="bfloat16")
    assert load(folder, dtype="auto").dtype == torch.bfloat16
    edit_config(folder, dtype=ABSENT)
    assert load(folder, dtype="auto").dtype == torch.float32
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.half() for n, t in tensors.items()}, folder / "model.safetensors")
    assert load(folder, dtype="auto").dtype == torch.float16
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_values_beyond_float16_are_refused(single) -> None:
    change_tensors(single / "model.safetensors", **{"model.norm.weight": torch.full((64,), 1e6)})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight .*float16"):
        load(single, dtype="float16")


def test_unsupported_tensor_type_is_named(single) -> None:
    codes = torch.ones(64, dtype=torch.int8)
    change_tensors(single / "model.safetensors", **{"model.norm.weight": codes})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has type I8"):
        load(single)


def test_what_is_not_a_model(tmp_path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        open_model(settings(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        open_model(settings(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: not valid JSON"):
        open_model(settings(tmp_path))
    shutil.copy(checkpoint() / "config.json", tmp_path)
    with pytest.raises(ModelLoadError, match="no weights"):
        load(tmp_path)
    with pytest.raises(ModelLoadError, match="no package"):
        open_model(settings("package:surely_not_there"))
    with pytest.raises(ModelLoadError, match="exactly one"):
        open_model(settings())
    with pytest.raises(ModelLoadError, match="dummy"):
        load(None, architecture="tiny")


def test_eos_is_the_union_of_all_files(single) -> None:
    (single / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 77, 91]}))
    assert open_model(settings(single)).config.eos_token_ids == (2, 77, 91)


def test_dummy_weights() -> None:
    fields = dict(architecture="tiny", weights="dummy", num_layers=2)
    first, again = load(None, **fields), load(None, **fields)
    assert torch.equal(first.layers[1].down, again.layers[1].down)
    assert not torch.equal(first.layers[0].down, first.layers[1].down)
    other = open_model(settings(**fields), seed=1).load()
    assert not torch.equal(first.embedding, other.embedding)
    out = Forward(None, **fields).run(PROMPT)
    assert torch.isfinite(out).all()
    assert 0.3 < out.std() < 3
    assert len(set(out.argmax(-1).tolist())) > 5


def test_dummy_weights_of_a_checkpoint_folder() -> None:
    path = checkpoint()
    assert load(path, weights="dummy").num_bytes == load(path).num_bytes
