"""The errors that reach a user. Each message says what was wrong, where, and what was expected."""

from collections.abc import Sequence


class SwiftapexError(Exception):
    """Base of every error that swiftapex raises on purpose."""


class ConfigError(SwiftapexError):
    """An experiment file or an engine setting is wrong (exit code 2 of `run_experiment`)."""


class ModelLoadError(SwiftapexError):
    """A checkpoint is missing, truncated, inconsistent or of an unsupported kind."""


class RequestError(SwiftapexError):
    """One request is not acceptable; the engine goes on without it."""


class EngineError(SwiftapexError):
    """The engine cannot go on (no progress, a worker died, it was closed)."""


def some_of(items: Sequence[str], most: int, between: str = ", ") -> str:
    """The first ones for a message, and how many more there are."""
    return between.join(items[:most]) + f" and {len(items) - most} more" * (len(items) > most)
