"""What several scripts' command lines have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def at_least(least: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    """For argparse: a finite number of that kind."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text}")
        return value

    return number
