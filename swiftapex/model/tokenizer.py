"""Text to token ids and back, for folders and GGUF files alike. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from swiftapex.core.errors import ModelLoadError, RequestError
from swiftapex.model.chat import ChatTemplate
from swiftapex.model.gguf_config import eos_token_ids
from swiftapex.model.gguf_file import GgufFile
from swiftapex.model.gguf_tokenizer import adds_bos, tokenizer_from_gguf


class Tokenizer:
    """A tokenizer of the `tokenizers` library with the model's own rules around it."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        adds_bos: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._core = core
        self._chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.adds_bos = adds_bos and bos_token_id is not None
        added = core.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text; the model's vocabulary may be larger."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a prompt, with BOS once where the model wants one. chat: the text is one
        user message; the template writes the special tokens, so none are added.

        Raises RequestError where chat is asked of a model without a template.
        """
        if chat:
            if self._chat_template is None:
                raise RequestError("chat was asked for, but the model has no chat template")
            text = self._chat_template.render(text)
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        if not chat and self.adds_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._core.decode(list(token_ids), skip_special_tokens=True))

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the vocabulary lacks (<0xE4>)."""
        token = self._core.id_to_token(token_id)
        return token is not None and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token) is not None


class IncrementalDetokenizer:
    """Text as tokens come. The pieces joined, with `flush` at the end, are `decode` of all tokens.

    A piece is held back while it may still change: a character whose bytes are not all there, and
    a run of byte tokens, whose characters are only decided at its end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the tokens before the held ones: decides leading spaces
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is certain now; often that of this token, sometimes ''."""
        if token_id in self._tokenizer.special_token_ids:
            return ""
        self._held.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._held_text()
        return "" if text.endswith("\ufffd") else self._release(text)

    def flush(self) -> str:
        """What is held back, incomplete characters as U+FFFD, as `decode` gives them."""
        return self._release(self._held_text())

    def _held_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]

    def _release(self, text: str) -> str:
        if self._held:
            self._context, self._held = self._held, []
        return text


def tokenizer_from_gguf_file(file: GgufFile) -> Tokenizer:
    """Raises ModelLoadError where the file's tokenizer is of an unsupported kind."""
    core = tokenizer_from_gguf(file)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    eos = eos_token_ids(file)
    source = file.metadata.get("tokenizer.chat_template")
    chat = None
    if source is not None:
        named = {"bos_token": bos, "eos_token": eos[0] if eos else None}
        texts = {k: core.id_to_token(int(i)) or "" for k, i in named.items() if i is not None}
        chat = ChatTemplate(source, texts)
    return Tokenizer(core, None if bos is None else int(bos), eos, adds_bos(file), chat)


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """From tokenizer.json, else from a SentencePiece tokenizer.model by way of transformers.
    None where the folder has neither. Raises ModelLoadError where they cannot be read.

    Whether BOS is added: `add_bos_token` of tokenizer_config.json, else what tokenizer.json does by
    itself, else (SentencePiece) yes, as Llama's own code does."""
    defaults: dict[str, Any] = {}
    if (folder / "tokenizer.json").is_file():
        try:
            core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"{folder / 'tokenizer.json'}: cannot be read: {error}") from error
    elif (folder / "tokenizer.model").is_file():
        core, defaults = _convert_sentencepiece(folder)
    else:
        return None
    core.no_truncation()
    core.no_padding()
    settings = _read_json(folder / "tokenizer_config.json")
    special = {**defaults, **_read_json(folder / "special_tokens_map.json"), **settings}
    texts = {name: _token_text(special.get(name)) for name in ("bos_token", "eos_token")}
    ids = {name: core.token_to_id(text) for name, text in texts.items() if text is not None}
    with_special = core.encode("", add_special_tokens=True).ids  # what the file itself adds
    bos = ids.get("bos_token", with_special[0] if with_special else None)
    adds = settings.get("add_bos_token", defaults.get("add_bos_token"))
    if adds is None:
        adds = bool(with_special) and with_special[0] == bos
    eos_id = ids.get("eos_token")
    eos = () if eos_id is None else (eos_id,)
    template = _chat_template_text(folder, settings)
    known = {name: text for name, text in texts.items() if text is not None}
    chat = None if template is None else ChatTemplate(template, known)
    return Tokenizer(core, bos, eos, bool(adds), chat)


def _convert_sentencepiece(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and what the SentencePiece model says where no settings file does."""
    from transformers import AutoTokenizer  # slow to import, and needed only here

    try:
        converted = AutoTokenizer.from_pretrained(str(folder))
        core: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as error:
        raise ModelLoadError(
            f"{folder / 'tokenizer.model'}: cannot be read (it must be a SentencePiece model, and "
            f"the packages sentencepiece and protobuf must be installed): {error}"
        ) from error
    names = dict(bos_token=converted.bos_token, eos_token=converted.eos_token)
    return core, names | dict(add_bos_token=True)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def _token_text(entry: Any) -> str | None:
    """A special token in a settings file: its text, or an object that holds it."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _chat_template_text(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    template = template or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, each under a name
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template
