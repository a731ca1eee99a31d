"""Workloads in files: prompts as JSONL, lengths and arrival times as Azure CSV or JSON.

Every malformed line is a ConfigError that names the file and the line.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from swiftapex.config.explain import nearest, shorten
from swiftapex.config.values import MAX_TOKENS
from swiftapex.core.errors import ConfigError

_PROMPT_KEYS = ("prompt", "chat", "output_len")
_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Seven digits of fraction, which datetime does not read; a zone, which one trace never changes.
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(?:Z|[+-]\d\d:?\d\d)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompts file. None: the workload's own setting."""

    prompt: str | tuple[int, ...]
    chat: bool | None
    output_len: int | None


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace. `time_s` counts from the earliest one; None: it has no times."""

    time_s: float | None
    input_len: int
    output_len: int


def read_prompts(path: Path) -> list[PromptLine]:
    """Lines `{"prompt": str or ids, "chat": bool?, "output_len": int?}`; empty ones are skipped."""
    prompts = []
    # Not splitlines: it also splits at characters that JSON allows inside a text.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            prompts.append(_prompt_line(line, f"{path}:{number}"))
    if not prompts:
        raise ConfigError(f'{path}: no prompts; expected lines such as {{"prompt": "Hello"}}')
    return prompts


def read_trace(path: Path, cut: bool = False) -> list[TraceLine]:
    """An Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens), sorted by time, or for *.json a
    list of {"prompt": tokens, "max_tokens": tokens}, in its order and without times.

    Lengths above MAX_TOKENS are cut to that (`cut`), or refused."""
    if path.suffix == ".json":
        lines = list(_json_lines(path, cut))
    else:
        lines = sorted(_csv_lines(path, cut), key=lambda line: line.time_s or 0.0)
        first_s = lines[0].time_s or 0.0 if lines else 0.0
        lines = [
            TraceLine((line.time_s or 0.0) - first_s, line.input_len, line.output_len)
            for line in lines
        ]
    if not lines:
        raise ConfigError(f"{path}: no requests in this trace")
    return lines


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"workload.path: {path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.path: {path}: not readable: {error}") from error


def _prompt_line(line: str, where: str) -> PromptLine:
    try:
        data = json.loads(line)
    except ValueError as error:  # also for integers of thousands of digits
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f'{where}: {shorten(data)}: expected {{"prompt": ...}}')
    for key in data:
        if key not in _PROMPT_KEYS:
            known = nearest(key, _PROMPT_KEYS)
            raise ConfigError(f"{where}: {key}: unknown key; nearest known key: {known}")
    prompt, chat, output_len = (data.get(key) for key in _PROMPT_KEYS)
    if isinstance(prompt, list) and all(_is_int(token_id) for token_id in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple):
        raise ConfigError(f"{where}: prompt: {shorten(prompt)}: expected a text or token ids")
    if chat is not None and not isinstance(chat, bool):
        raise ConfigError(f"{where}: chat: {shorten(chat)}: expected true or false")
    if output_len is not None and not (_is_int(output_len) and output_len >= 1):
        raise ConfigError(f"{where}: output_len: {shorten(output_len)}: expected an integer >= 1")
    return PromptLine(prompt, chat, output_len)


def _csv_lines(path: Path, cut: bool) -> Iterator[TraceLine]:
    # splitlines ends lines at CRLF too.
    reader = csv.reader(_read_text(path).splitlines())
    header = next(reader, [])
    if [name.strip() for name in header] != list(_CSV_COLUMNS):
        raise ConfigError(f"{path}:1: {header}: expected the header {','.join(_CSV_COLUMNS)}")
    for row in reader:
        if not row:
            continue
        where = f"{path}:{reader.line_num}"
        if len(row) != len(_CSV_COLUMNS):
            raise ConfigError(f"{where}: {row}: expected {len(_CSV_COLUMNS)} columns")
        input_len = _length(row[1], f"{where}: ContextTokens", cut)
        output_len = _length(row[2], f"{where}: GeneratedTokens", cut)
        yield TraceLine(_seconds(row[0], where), input_len, output_len)


def _json_lines(path: Path, cut: bool) -> Iterator[TraceLine]:
    try:
        entries = json.loads(_read_text(path))
    except ValueError as error:  # also for integers of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: expected a list of {{prompt, max_tokens}}")
    for index, entry in enumerate(entries):
        where = f"{path}: entry {index}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: {shorten(entry)}: expected {{prompt, max_tokens}}")
        input_len = _length(entry.get("prompt"), f"{where}: prompt", cut)
        output_len = _length(entry.get("max_tokens"), f"{where}: max_tokens", cut)
        yield TraceLine(None, input_len, output_len)


def _length(value: Any, where: str, cut: bool) -> int:
    is_digits = isinstance(value, str) and value.strip().isdecimal()
    try:
        length = int(value) if is_digits or _is_int(value) else 0
    except ValueError:  # thousands of digits
        length = MAX_TOKENS + 1
    if length < 1:
        raise ConfigError(f"{where}: {shorten(value)}: expected a number of tokens >= 1")
    if length > MAX_TOKENS and not cut:
        raise ConfigError(
            f"{where}: {shorten(value)}: expected at most {MAX_TOKENS} tokens, or over_length: "
            "truncate"
        )
    return min(length, MAX_TOKENS)


def _seconds(text: str, where: str) -> float:
    match = _TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        whole = datetime.fromisoformat(f"{match[1]} {match[2]}").replace(tzinfo=timezone.utc)
    except ValueError as error:
        expected = "expected a time such as 2023-11-16 18:17:03.9799600"
        raise ConfigError(f"{where}: TIMESTAMP: {text!r}: {expected}") from error
    return whole.timestamp() + float(match[3] or 0)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
