"""Experiment files: read, overridden by `--set`, checked, and expanded into runs.

A sweep `{key: [values], ...}` is the product of its keys. A swept key lies under `engine.`,
`workload.`, `model.` or `runs.NAME.policy_args.` / `runs.NAME.engine.` (which concern that run
alone: the others are not repeated for them), or is `seed`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from swiftapex.config.explain import explain, shorten
from swiftapex.config.overrides import has_key, merged, parse_assignment, with_value
from swiftapex.config.schema import (
    EngineConfig,
    ExperimentConfig,
    ModelSection,
    PeerConfig,
    Section,
    WorkloadConfig,
)
from swiftapex.config.strict_yaml import parse_yaml
from swiftapex.core.errors import ConfigError

S = TypeVar("S", bound=Section)

_SWEPT = re.compile(r"(engine|workload|model)\..+|seed|runs\..+?\.(policy_args|engine)\..+")


@dataclass(frozen=True)
class RunPlan:
    """One run with everything resolved. `sweep` holds its values of the swept keys."""

    name: str
    folder: str  # distinct within the experiment
    policy: str
    policy_args: Mapping[str, Any]
    model: ModelSection
    engine: EngineConfig
    workload: WorkloadConfig
    seed: int
    sweep: Mapping[str, Any] = field(default_factory=dict)
    peer: PeerConfig | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        plain = {name: getattr(self, name) for name in ("name", "policy", "seed")}
        sections = {name: getattr(self, name) for name in ("model", "engine", "workload")}
        plain |= {name: section.model_dump(mode="json") for name, section in sections.items()}
        peer = None if self.peer is None else self.peer.model_dump(mode="json")
        plain |= {"policy_args": dict(self.policy_args), "sweep": dict(self.sweep)}
        return plain if peer is None else plain | {"peer": peer}


@dataclass(frozen=True)
class Experiment:
    """A checked experiment file. `path`: where it was read from."""

    path: Path
    config: ExperimentConfig
    runs: tuple[RunPlan, ...]

    def resolved_yaml(self) -> str:
        """The file with all defaults and overrides, which can be run again as it is."""
        data = self.config.model_dump(mode="json")
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def parse_section(section: type[S], data: Any, where: str = "", file: str = "") -> S:
    """`data` as a `section`. ConfigError with one line per wrong key; `where` is the key path
    that leads to `data`, `file` the file it came from."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        label = f"{file}: " if file else ""
        lines = [label + line for line in explain(error, data, section, where)]
        raise ConfigError("\n".join(lines)) from error


def load_experiment(path: Path | str, assignments: Sequence[str] = ()) -> Experiment:
    """Reads an experiment file, with `assignments` ("a.b=c") put over it.

    ConfigError naming file, key, value and what was expected. Names of policies and of pipelines
    are not looked up here.
    """
    path = Path(path)
    data = read_mapping(path)
    _check_no_figure(data, path)
    try:
        for assignment in assignments:
            key, value = parse_assignment(assignment)
            data = with_value(data, key, value)
        return expand_experiment(data, path)
    except ConfigError as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        put_over = " ".join(f"--set {assignment}" for assignment in assignments)
        raise ConfigError(f"{message}\n(with {put_over})" if put_over else message) from error


def _check_no_figure(data: Mapping[str, Any], path: Path) -> None:
    if "figure" in data and ("experiment" in data or "kernels" in data):
        raise ConfigError(
            f"{path}: a figure, not an experiment: run "
            f"`python scripts/reproduce.py {data['figure']}` (with --quick or --cpu: a small one)"
        )


def expand_experiment(data: Mapping[str, Any], path: Path) -> Experiment:
    """The experiment that `data` describes. `path`: the file that it came from, to whose folder
    its paths are relative."""
    combined, runs = _expand(_with_paths(data, path.parent), str(path))
    return Experiment(path, combined, tuple(runs))


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file with a mapping at its top. ConfigError where it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; expected an experiment in YAML") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable: {error}") from error
    try:
        data = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: {shorten(data)}: expected a mapping of keys at the top")
    return data


def _with_paths(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Paths are relative to the experiment file; a model's may also be to the working folder."""
    result = dict(data)
    for name, only_there in (("workload", True), ("model", False)):
        section = result.get(name)
        path = section.get("path") if isinstance(section, dict) else None
        if isinstance(path, str) and (only_there or (base / path).exists()):
            result[name] = {**section, "path": str((base / path).resolve())}  # type: ignore[dict-item]
    return result


def _expand(data: Mapping[str, Any], file: str) -> tuple[ExperimentConfig, list[RunPlan]]:
    """All runs of all combinations of swept values; the first swept key changes slowest.

    The config is that of the first combination: a file need not be complete without its sweep.
    """
    sweep = data.get("sweep", {})
    if not isinstance(sweep, Mapping):
        parse_section(ExperimentConfig, data, file=file)  # says so
        sweep = {}
    for key, values in sweep.items():
        _check_swept(key, values, file)
    plans: dict[str, RunPlan] = {}  # by name and swept values
    configs: list[ExperimentConfig] = []
    for values in itertools.product(*sweep.values()):
        chosen = dict(zip(sweep, values, strict=True))
        combined = data
        for key, value in chosen.items():
            combined = with_value(combined, key, value)
        label = file + (f" (sweep {chosen})" if chosen else "")
        config = parse_section(ExperimentConfig, combined, file=label)
        configs.append(config)
        for index, run in enumerate(config.runs):
            mine = {key: value for key, value in chosen.items() if _concerns(key, run.name)}
            identity = f"{run.name} {mine}"
            if identity not in plans:
                folder = _folder(run.name, mine, [plan.folder for plan in plans.values()])
                plans[identity] = _plan(config, index, folder, mine, combined, label)
    return configs[0], list(plans.values())


def _plan(
    config: ExperimentConfig,
    index: int,
    folder: str,
    sweep: Mapping[str, Any],
    data: Mapping[str, Any],
    file: str,
) -> RunPlan:
    """Run `index` with its own engine settings put over the experiment's."""
    run, where = config.runs[index], f"runs[{index}].engine"
    for key in sweep:
        if key.startswith("engine.") and has_key(run.engine, key.removeprefix("engine.")):
            raise ConfigError(f"{file}: {where} sets swept key {key} too; expected one of the two")
    # Checked alone first, so that the message says in which section the wrong key stands.
    parse_section(EngineConfig, dict(run.engine), where, file)
    settings = merged(data.get("engine", {}), run.engine)
    return RunPlan(
        name=run.name,
        folder=folder,
        policy=run.policy_name,
        policy_args=run.policy_args,
        model=config.model,
        engine=parse_section(EngineConfig, settings, where, file),
        workload=config.workload,
        seed=config.seed,
        sweep=sweep,
        peer=run.peer,
    )


def _check_swept(key: str, values: Any, file: str) -> None:
    if not _SWEPT.fullmatch(key):
        raise ConfigError(
            f"{file}: sweep.{key}: expected a key under engine., workload., model., "
            "runs.NAME.policy_args. or runs.NAME.engine., or seed"
        )
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{file}: sweep.{key}: {shorten(values)}: expected a list of values")


def _concerns(key: str, run_name: str) -> bool:
    return not key.startswith("runs.") or key.startswith(f"runs.{run_name}.")


def _folder(run_name: str, sweep: Mapping[str, Any], taken: Sequence[str]) -> str:
    """The run's name and its swept values, as a file name that is not taken yet."""
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in sweep.items()]
    name = re.sub(r"[^A-Za-z0-9._+=-]+", "-", "__".join([run_name, *parts]))[:120]
    numbered = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    return next(folder for folder in numbered if folder not in taken)
