"""Values put into a file's data from outside: `--set`, sweeps, and a run's own engine section."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from swiftapex.config.strict_yaml import parse_yaml
from swiftapex.core.errors import ConfigError


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=c` as its key path and its value, which is YAML. ConfigError where it is neither."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", key):
        raise ConfigError(f"--set {text}: expected KEY.PATH=VALUE, such as engine.block_size=16")
    try:
        return key, parse_yaml(value)
    except ConfigError as error:
        raise ConfigError(f"--set {text}: {error}") from error


def with_value(data: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of `data` in which the key path `key` has `value`.

    Parts are mapping keys; entries of a list are named by their index or their `name`
    (`runs.0.policy`, `runs.neo.policy`). Missing mappings are made. ConfigError where the path
    leads through a plain value or a list entry that does not exist.
    """
    result = copy.deepcopy(dict(data))
    node: Any = result
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        node = _descend(node, part, key, ".".join(parents[:depth]))
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{key}: {'.'.join(parents)} is {node!r}; expected a mapping of keys")
    return result


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` put over it, mapping by mapping."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def has_key(data: Mapping[str, Any], key: str) -> bool:
    """Whether the key path `key` is given in `data`."""
    node: Any = data
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _descend(node: Any, part: str, key: str, so_far: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, key)]
    if isinstance(node, dict):
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    raise ConfigError(f"{key}: {so_far} is {node!r}; expected a mapping of keys")


def _index(entries: list[Any], part: str, key: str) -> int:
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(entries):
        return int(part)
    known = ", ".join(str(name) for name in names)
    raise ConfigError(
        f"{key}: no entry {part!r}; expected an index below {len(entries)} or {known}"
    )
