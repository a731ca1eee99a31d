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


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the script where this machine, or this build, has no GPU."""
    from swiftapex.backends import check_device
    from swiftapex.config.schema import EngineConfig
    from swiftapex.core.errors import ConfigError

    try:
        check_device(EngineConfig(device="cuda"))
    except ConfigError as error:
        parser.error(str(error))


def limit_arguments(parser: argparse.ArgumentParser, block_size: int) -> None:
    """Of an engine. `block_size`: the default."""
    parser.add_argument("--block-size", type=at_least(1, int), default=block_size)
    parser.add_argument(
        "--max-len", type=at_least(2, int), default=2048, help="tokens of a request"
    )
    parser.add_argument("--max-batch", type=at_least(1, int), default=256, help="rows of a batch")
    parser.add_argument("--max-tokens", type=at_least(1, int), default=2048, help="of a batch")
