"""Profiles on disk: one JSON file each, named after its fingerprint and holding it whole. A profile
serves where everything is the same and it was measured at least as far: what was measured with
larger pools of KV is true of smaller ones."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftapex.core.errors import ConfigError
from swiftapex.costs.tables import Tables
from swiftapex.profiler.fingerprint import differences, digest, normal

_MOST_DIFFERENCES = 5  # that a message names


@dataclass(frozen=True)
class Profile:
    """Tables, what they are true of, and how long it took to measure them."""

    fingerprint: Mapping[str, Any]
    tables: Tables
    seconds: float


def default_folder() -> Path:
    """Where the user's caches lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftapex/profiles"


def find(folder: Path, fingerprint: Mapping[str, Any]) -> Profile | None:
    """A profile that serves this fingerprint, that of exactly this one first; None where there is
    none, or none that is whole."""
    own = path_of(folder, fingerprint)
    others = sorted(folder.glob("*.json")) if folder.is_dir() else []
    for path in (own, *others):
        try:
            profile = _read(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if not _unmet(profile.fingerprint, fingerprint):
            return profile
    return None


def read(path: Path, fingerprint: Mapping[str, Any]) -> Profile:
    """The profile in a file. ConfigError where it is not one, or one of something else."""
    profile = read_any(path)
    found = _unmet(profile.fingerprint, fingerprint)
    if found:
        more = f"; and {len(found) - _MOST_DIFFERENCES} more" * (len(found) > _MOST_DIFFERENCES)
        raise ConfigError(
            f"engine.profile: {path} was measured on something else (there against here): "
            f"{'; '.join(found[:_MOST_DIFFERENCES])}{more}"
        )
    return profile


def read_any(path: Path) -> Profile:
    """The profile in a file, whatever it is of. ConfigError where it is not one."""
    try:
        return _read(path)
    except OSError as error:
        raise ConfigError(f"engine.profile: {path} is not readable: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"engine.profile: {path} holds no profile: {error!r}") from error


def write(folder: Path, profile: Profile) -> Path:
    """Stores a profile, whole or not at all; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, profile.fingerprint)
    data = {
        "fingerprint": dict(profile.fingerprint),
        "seconds": round(profile.seconds, 2),
        "tables": profile.tables.as_dict(),
    }
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        json.dump(data, file)
    Path(file.name).replace(path)
    return path


def path_of(folder: Path, fingerprint: Mapping[str, Any]) -> Path:
    """Where the profile of this fingerprint lies, or would."""
    return folder / f"{digest(fingerprint)}.json"


def _unmet(measured: Mapping[str, Any], needed: Mapping[str, Any]) -> list[str]:
    """How a profile of `measured` fails to serve `needed`."""
    there, here = normal(measured), normal(needed)
    if _reaches(there.get("points"), here.get("points")):
        there["points"] = here["points"]
    return differences(there, here)


def _reaches(there: Any, here: Any) -> bool:
    """Whether points were measured at least as far as others, in every table."""
    if isinstance(there, dict) and isinstance(here, dict):
        return there.keys() == here.keys() and all(_reaches(there[k], here[k]) for k in here)
    if isinstance(there, list) and isinstance(here, list):
        return max(there, default=0) >= max(here, default=0)
    return isinstance(there, int) and isinstance(here, int) and there >= here


def _read(path: Path) -> Profile:
    data = json.loads(path.read_text(encoding="utf-8"))
    fingerprint = data["fingerprint"]
    if not isinstance(fingerprint, dict):
        raise TypeError("the fingerprint is not a mapping")
    return Profile(fingerprint, Tables.from_dict(data["tables"]), float(data["seconds"]))
