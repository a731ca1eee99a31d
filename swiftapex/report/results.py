"""Reads result folders again: the runs of an experiment, the points of a figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swiftapex.core.errors import ConfigError
from swiftapex.report.files import flat
from swiftapex.report.words import label

_OF_ANSWERS = ("window", "slo")  # of a workload: what is done with the answers
_OF_THE_MODEL = ("path", "architecture")  # its name, which `requests` has
_OF_KERNELS = ("measure", "q_heads", "kv_heads", "head_dim", "num_layers", "context")
UNKNOWN = {"settings": "not in its figure.json"}


@dataclass(frozen=True)
class Run:
    """One run of a folder. `numbers`: its summary, or a kernel's figures; `requests`: what was sent
    to it, or computed, by key, and `UNKNOWN` where the folder does not tell; `settings`: those it
    was made with beside that, by dotted key, None where the folder does not tell all of them."""

    name: str
    sweep: Mapping[str, Any]
    numbers: Mapping[str, Any]
    requests: Mapping[str, Any]
    max_model_len: Any = None  # the setting
    settings: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        return label({"name": self.name, "sweep": self.sweep})


def read_runs(folder: Path) -> dict[str, Run]:
    """By label. A figure's points, where its file says what they were measured with; else the runs
    of summary.json. ConfigError where neither is there, or one is not as this package writes it."""
    try:
        figure = _json(folder / "figure.json")
        points = [] if figure is None else _points(figure)
        summary = _json(folder / "summary.json")
        if summary is not None and (not points or any(p.requests is UNKNOWN for p in points)):
            points = [_run(folder, run) for run in summary["runs"]]
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder}: not results of this package: {error!r}") from error
    if figure is None and summary is None:
        raise ConfigError(f"{folder}: no results: neither summary.json nor figure.json in it")
    if not points:
        raise ConfigError(f"{folder}: holds no run that ended")
    return {run.label: run for run in points}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable: {error}") from error


def _run(folder: Path, summary: Mapping[str, Any]) -> Run:
    path = folder / summary["folder"] / "run.yaml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: not readable, so that it is not known which requests run {summary['name']!r} "
            f"had: {error.strerror}"
        ) from error
    return Run(
        summary["name"],
        summary["sweep"],
        summary,
        _requests(settings),
        settings.get("engine", {}).get("max_model_len"),
        _settings(settings),
    )


def _points(figure: Mapping[str, Any]) -> list[Run]:
    kernels, runs = figure.get("kernels"), []
    for point in figure["points"]:
        settings = point.get("settings")
        requests: Mapping[str, Any] = UNKNOWN
        if settings:
            requests = _requests(settings)
        elif kernels:
            linear = kernels["measure"] == "linear"
            keys = ("measure", "architecture") if linear else _OF_KERNELS
            requests = {key: kernels[key] for key in keys}
        limit = (settings or {}).get("max_model_len")
        runs.append(Run(point["series"], {"x": point["x"]}, point, requests, limit))
    return runs


def _requests(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seed, workload and model, which makes the tokens. Without the names of files, where they can
    be told by what is in them."""
    workload = {
        key: value
        for key, value in settings["workload"].items()
        if key not in _OF_ANSWERS and value is not None
    }
    path = workload.get("path")
    if path is not None and Path(path).is_file():
        workload["path"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    model = settings["model"]
    name = model.get("path") or model.get("architecture")
    return {"seed": settings["seed"], **workload, "model": name}


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's file says beside its requests. Another engine has no policy and heeds none of
    the engine's settings."""
    used = ("peer",) if "peer" in run else ("engine", "policy", "policy_args")
    answers = {key: run["workload"].get(key) for key in _OF_ANSWERS}
    model = {key: value for key, value in run["model"].items() if key not in _OF_THE_MODEL}
    return flat({"model": model, **{key: run.get(key) for key in used}, "workload": answers})
