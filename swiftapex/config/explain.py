"""Turns what pydantic reports into messages for people.

Each message names the key's path, its value, what was expected, and for an unknown key the nearest
known one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

Path = tuple[str | int, ...]

_ALIKE = 0.7  # from here on one text is taken for a misspelt other; 'gpu' and 'cpu' are less alike

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "mapping_type": "a mapping of keys",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "at least {min_length} entry",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "letters, digits and . _ + - only, starting with a letter or digit",
}


def explain(error: ValidationError, data: Any, section: type[BaseModel], prefix: str) -> list[str]:
    """One message per wrong key of `data`, which `section` refused. `prefix` leads to `data`."""
    found: dict[Path, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path_in(data, detail), []).append(dict(detail))
    messages = []
    for path, details in found.items():
        deeper = any(other[: len(path)] == path and other != path for other in found)
        if deeper and details[0]["type"] != "value_error":
            continue  # the other kinds of value that this key could have had
        messages.append(_message(path, details, section, prefix))
    return messages


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The member of `known` most like `name`; None where `known` is empty."""
    return max(known, key=lambda key: _likeness(name, key), default=None)


def shorten(value: Any) -> str:
    """`value` as shown in a message, at most about 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def dotted(path: Sequence[str | int], prefix: str = "") -> str:
    """A path as a person writes it: `runs[1].engine.gpu`."""
    text = prefix
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _path_in(data: Any, detail: Mapping[str, Any]) -> Path:
    """pydantic's location without the names of union members, which are no keys of the file."""
    path: list[str | int] = []
    location = detail["loc"]
    for position, part in enumerate(location):
        is_missing_key = detail["type"] == "missing" and position == len(location) - 1
        if isinstance(data, Mapping) and (part in data or is_missing_key):
            data = data.get(part)
        elif isinstance(data, Sequence) and not isinstance(data, str) and isinstance(part, int):
            data = data[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _message(
    path: Path, details: list[Mapping[str, Any]], section: type[BaseModel], prefix: str
) -> str:
    where, first = dotted(path, prefix), details[0]
    if first["type"] == "missing":
        return f"{where}: missing; expected this key"
    value = shorten(first["input"])
    if first["type"] == "extra_forbidden":
        known = _nearest_key(path, section, prefix)
        return f"{where}: unknown key (value {value}); nearest known key: {known}"
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        at_leaf = not isinstance(first["input"], Mapping)
        return f"{where}: {value}: {reason}" if at_leaf else f"{where or 'file'}: {reason}"
    expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
    if isinstance(first["input"], bool) and expected == _EXPECTED["string_type"]:
        expected += " (YAML reads on, off, yes and no as true and false: put it in quotes)"
    return f"{where or 'file'}: {value}: expected {expected}{_misspelt(first['input'], expected)}"


def _misspelt(value: Any, expected: str) -> str:
    """Which of the expected values a text was most likely meant to be."""
    known = nearest(value, re.findall("'([^']+)'", expected)) if isinstance(value, str) else None
    return f"; nearest: {known!r}" if known and _likeness(value, known) >= _ALIKE else ""


def _expected(detail: Mapping[str, Any]) -> str:
    template = _EXPECTED.get(detail["type"])
    return template.format(**detail.get("ctx", {})) if template else str(detail["msg"])


def _nearest_key(path: Path, section: type[BaseModel], prefix: str) -> str:
    """The nearest key beside an unknown one, or a clearly nearer one elsewhere."""
    name = str(path[-1])
    keys = list(_all_keys(section))
    parent = tuple("*" if isinstance(part, int) else part for part in path[:-1])
    best = max(keys, key=lambda key: _likeness(name, key[-1]) + 0.1 * (key[:-1] == parent))
    beside = best[:-1] == parent
    return dotted((*path[:-1], best[-1]) if beside else _shown(best), prefix)


def _shown(key: tuple[str, ...]) -> Path:
    return tuple(0 if part == "*" else part for part in key)


def _all_keys(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    """Paths of all keys under `section`; list entries count as `*`."""
    for name, field in section.model_fields.items():
        yield (*at, name)
        for inner, is_list in _sections_in(field.annotation):
            yield from _all_keys(inner, (*at, name, "*") if is_list else (*at, name))


def _sections_in(annotation: Any, is_list: bool = False) -> Iterable[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_list
        return
    for inner in get_args(annotation):
        if inner is not Ellipsis:
            in_list = is_list or getattr(annotation, "__origin__", None) is tuple
            yield from _sections_in(inner, in_list)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()
