"""The tokenizer that a GGUF file describes in its metadata, as a `tokenizers.Tokenizer`.

Built directly from the metadata: going through transformers takes several seconds.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from swiftapex.core.errors import ModelLoadError
from swiftapex.model.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types of the GGUF specification

# How text is cut before merging, by `tokenizer.ggml.pre`. The expressions belong to the models'
# own tokenizers and decide their tokens.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
_ONE_DIGIT = _WORDS.replace("DIGITS", r"\p{N}")
_SPLITS = {
    "llama-bpe": _THREE_DIGITS,
    "llama3": _THREE_DIGITS,
    "llama-v3": _THREE_DIGITS,
    "smaug-bpe": _THREE_DIGITS,
    "qwen2": _ONE_DIGIT,
    "deepseek-r1-qwen": _ONE_DIGIT,
}
_GPT2 = ("default", "gpt-2", "olmo")
_GPT2_WITH_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")  # a word in the vocabulary is not merged


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Raises ModelLoadError naming a kind of tokenizer or pre-tokenizer that is not supported."""
    metadata = _tokenizer_metadata(file)
    kind = metadata.get("model")
    if "tokens" not in metadata or kind not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"{file.path}: tokenizer {kind!r} is not supported: gpt2 and llama are"
        )
    tokenizer = _byte_level(file, metadata) if kind == "gpt2" else _sentencepiece(metadata)
    _add_special_tokens(tokenizer, metadata)
    return tokenizer


def adds_bos(file: GgufFile) -> bool:
    """Whether a prompt starts with BOS: the file's flag, else what its kind of tokenizer does."""
    metadata = _tokenizer_metadata(file)
    default = metadata.get("model") == "llama" or metadata.get("pre") in _WHOLE_WORDS_FIRST
    return bool(metadata.get("add_bos_token", default))


def _tokenizer_metadata(file: GgufFile) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    return {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}


def _byte_level(file: GgufFile, metadata: dict[str, Any]) -> Tokenizer:
    pre = metadata.get("pre", "default")
    vocab = {token: i for i, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("merges", ())]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SPLITS:
        steps = [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    elif pre in _GPT2_WITH_SINGLE_DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), words]
    elif pre in _GPT2:
        steps = [words]
    else:
        raise ModelLoadError(f"{file.path}: pre-tokenizer {pre!r} is not supported")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece's BPE: the pair with the best score merges first, bytes stand in for what the
    vocabulary lacks, and a space is put in front."""
    tokens, scores = metadata["tokens"], metadata["scores"].tolist()
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                pairs.append((-score, vocab[left], vocab[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    unknown = tokens[int(metadata.get("unknown_token_id", 0))]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(metadata.get("add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if prefixed else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps
    )
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Control tokens and user-defined ones are matched whole in a text; the former, and the
    unknown token, are special: decoding leaves them out."""
    types = metadata.get("token_type")
    if types is None:
        return
    tokens, kinds = metadata["tokens"], types.tolist()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    defined = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in defined])
