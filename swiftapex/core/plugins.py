"""Policies and pipelines by short name, or by dotted path `package.module:Class`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from swiftapex.core.errors import ConfigError

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "null",
}


def load_class(kind: str, name: str, known: Mapping[str, str]) -> type[Any]:
    """The class that `name` stands for: a key of `known`, or `package.module:Class` itself.
    ConfigError where there is no such name, module or class."""
    path = name if ":" in name else known.get(name)
    if path is None:
        raise ConfigError(
            f"unknown {kind} {name!r}: expected one of {', '.join(sorted(known))}, "
            f"or package.module:Class"
        )
    module_name, _, class_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise  # a module that exists, but whose own imports do not
        raise ConfigError(
            f"{kind} {name!r}: there is no module {module_name!r} on the Python path (PYTHONPATH)"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{kind} {name!r}: {module_name} has no {class_name!r}") from error


def check_class(kind: str, name: str, found: Any, method: str, base: str) -> None:
    """ConfigError where `found`, which `name` stands for, is no class that can be a `kind`: with
    `method`, and nothing abstract left. `base`: what such a class is derived from."""
    if isinstance(found, type) and hasattr(found, method) and not inspect.isabstract(found):
        return
    raise ConfigError(f"{kind} {name!r}: expected a class with a {method}(), derived from {base}")


def misreturned(maker: Any, method: str, returned: Any, expected: type[Any], by: str) -> str | None:
    """What is wrong where `method` of the policy or pipeline `maker` returned something else than
    it must, or None. `by`: what makes an `expected`."""
    if isinstance(returned, expected):
        return None
    made, what = type(maker), None if returned is None else type(returned).__name__
    return (
        f"{method}() of {made.__module__}:{made.__qualname__} returned {what}: "
        f"expected a {expected.__name__}, as `{by}` gives"
    )


def check_arguments(made: type[Any], arguments: Mapping[str, Any], where: str) -> None:
    """ConfigError for an argument of the constructor whose value is of another type than it is
    annotated with. Only plain types of a YAML file are looked at."""
    try:
        hints = get_type_hints(made.__init__)
    except (NameError, TypeError):  # of a class whose annotations are not there at run time
        return
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(kind in _WORDS for kind in kinds) and not any(_is(kind, value) for kind in kinds):
            expected = " or ".join(_WORDS[kind] for kind in kinds)
            raise ConfigError(f"{where}: {name}: expected {expected}, got {value!r}")


def _is(kind: type[Any], value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return type(value) is kind
