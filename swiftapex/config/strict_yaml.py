"""YAML as a person means it: `1e-5` is a float, `1:30` and a date are text, and a key that occurs
twice is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from swiftapex.core.errors import ConfigError

# YAML 1.1 asks for a dot in a float, so that PyYAML reads 1e-5 and 5e3 as text.
_FLOAT = re.compile(
    r"^[-+]?(?:\d[\d_]*\.?[\d_]*(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*(?:[eE][-+]?\d+)?"
    r"|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)

# YAML 1.1 also reads 1:30 as 90 and 017 as 15.
_INT = re.compile(r"^[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F]+)$")
_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("float", "int", "timestamp")}


class _StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                raise ConfigError(f"line {line}: {key_node.value!r}: expected a text as a key")
            if key_node.value in lines:
                raise ConfigError(
                    f"line {line}: {key_node.value}: duplicate key, first on line "
                    f"{lines[key_node.value]}; expected each key once"
                )
            lines[key_node.value] = line
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """The value that `text` holds. ConfigError with the line where it is not valid."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # it is a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{line}not valid YAML: {error.problem or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from error
