"""Pipelines by name. A new one needs no entry here: name it as `package.module:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftapex.core.plugins import check_class, load_class

if TYPE_CHECKING:
    from swiftapex.pipelines.base import Pipeline

PIPELINES: dict[str, str] = {
    "sequential": "swiftapex.pipelines.sequential:Sequential",
    "asymmetric": "swiftapex.pipelines.asymmetric:Asymmetric",
    "async_overlap": "swiftapex.pipelines.async_overlap:AsyncOverlap",
    "symmetric": "swiftapex.pipelines.symmetric:Symmetric",
}


def pipeline_class(name: str) -> type[Pipeline]:
    """The class that `name` stands for. ConfigError where it is none of a pipeline. Imports the
    class's module: the package's own load torch."""
    found = load_class("pipeline", name, PIPELINES)
    check_class("pipeline", name, found, "step", "swiftapex.pipelines.base.Pipeline")
    return found
