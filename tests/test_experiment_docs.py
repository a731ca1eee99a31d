"""docs/experiments.md names every key of an experiment file with its default, and no other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from swiftapex.config.explain import _sections_in
from swiftapex.config.load import load_experiment
from swiftapex.config.schema import (
    Distribution,
    EngineConfig,
    ExperimentConfig,
    ModelSection,
    RunConfig,
    WorkloadConfig,
)
from swiftapex.core.plugins import load_class
from swiftapex.model.config import _ARCHITECTURES
from swiftapex.policies import POLICIES
from swiftapex.policies.fixed import Fixed
from swiftapex.run_experiment import check_runs

TEXT = (Path(__file__).parent.parent / "docs" / "experiments.md").read_text()
SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelSection, "engine": EngineConfig, "runs": RunConfig, "workload": WorkloadConfig,
}  # fmt: skip


def keys_of(section: type[BaseModel], at: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their defaults as YAML; "" for sections and texts that are empty."""
    for name, field in section.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        if field.is_required():
            written = "required"
        elif default == "" or isinstance(default, BaseModel):
            written = ""
        else:
            written = yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
        yield at + name, written
        if section is not ExperimentConfig or name not in SECTIONS:
            for inner, _ in _sections_in(field.annotation):
                yield from keys_of(inner, f"{at}{name}.")


def documented(part: str) -> list[tuple[str, str]]:
    table = part.split("| key | default | meaning |\n", 1)[1].split("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[1:]]
    return [(row[1].strip(" `"), row[2].strip(" `")) for row in rows]


@pytest.mark.parametrize("name", ["", *SECTIONS])
def test_every_key_is_in_its_table_with_its_default(name: str) -> None:
    heading = f"## `{name}:`\n" if name else "## The file\n"
    (part,) = TEXT.split(heading)[1:]
    expected = list(keys_of(SECTIONS.get(name, ExperimentConfig)))
    found = documented(part)
    assert sorted(found) == sorted(expected)
    assert len(found) > 4


def test_every_architecture_and_every_named_length_is_there() -> None:
    (names,) = re.findall(r"^Architectures: (.*)$", TEXT, flags=re.MULTILINE)
    assert re.findall(r"`(.+?)`", names) == list(_ARCHITECTURES)
    lengths = TEXT.split("### Named lengths")[1]
    assert re.findall(r"^\| `(\w+)` \|", lengths, flags=re.MULTILINE) == [*get_args(Distribution)]


def test_the_documented_experiment_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    (tmp_path / "exp.yaml").write_text(example)
    experiment = load_experiment(tmp_path / "exp.yaml")
    check_runs(experiment)
    assert len(experiment.runs) == 4


def test_every_argument_of_a_policy_is_there_with_its_default() -> None:
    classes = {n: load_class("policy", n, POLICIES) for n in POLICIES}
    taken = {
        (name, argument.name, yaml.safe_dump(argument.default).split("\n")[0])
        for name, made in {**classes, "fixed:<pipeline>": Fixed}.items()
        if made.__init__ is not object.__init__
        for argument in inspect.signature(made).parameters.values()
        if argument.name != "pipeline"
    }
    table = TEXT.split("### Arguments of policies", 1)[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in row.split("|")] for row in table.split("\n")[2:]]
    told = {
        (name.strip("` "), row[2].strip("`"), row[3].strip("`"))
        for row in rows
        for name in row[1].split(",")
    }
    assert told == taken
