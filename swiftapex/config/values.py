"""Types of single settings that pydantic has no exact counterpart for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: object) -> int:
    """Bytes of `value`: an integer, or a text such as "16GiB" (2^30) or "20GB" (10^9).

    Raises ValueError, which pydantic turns into a message with the key's path.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        unit = _UNITS.get(match.group(2).upper()) if match else None
        if match is None or unit is None:
            raise ValueError("expected a size such as 16GiB, 500MB, or a number of bytes")
        size = round(float(match.group(1)) * unit)
    if size < 0:
        raise ValueError("expected a size of at least 0 bytes")
    return size


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


def _as_written(value: Any) -> Any:
    """YAML reads on and off, unless they are in quotes, as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OnOffOrText = Annotated[str, BeforeValidator(_as_written)]
Count = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
# Tokens of a prompt or an output: more than models take, few enough to be made before one refuses.
MAX_TOKENS = 2**22
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Auto = Literal["auto"]

# Names become folders and files.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]
