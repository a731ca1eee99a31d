"""The control plane imports no torch, and policies and pipelines do not know each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "swiftapex"
CONTROL_PLANE = (
    "swiftapex",
    "swiftapex.config.load",
    "swiftapex.core.trace",
    "swiftapex.cost_model",
    "swiftapex.costs.analytic",
    "swiftapex.costs.correction",
    "swiftapex.costs.measured",
    "swiftapex.profile",
    "swiftapex.profiler.fingerprint",
    "swiftapex.profiler.measure",
    "swiftapex.profiler.store",
    "swiftapex.kv.block_manager",
    "swiftapex.kv.sizing",
    "swiftapex.policies",
    "swiftapex.report.html",
    "swiftapex.run_experiment",
    "swiftapex.scheduler.state",
    "swiftapex.simulation.engine",
    "swiftapex.workloads.build",
)


def modules(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).glob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of what a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_control_plane_imports_no_torch() -> None:
    policies = [f"swiftapex.policies.{p.stem}" for p in modules("policies")]
    code = f"import sys, importlib\nfor m in {(*CONTROL_PLANE, *policies)!r}:\n"
    code += "    importlib.import_module(m)\n    assert 'torch' not in sys.modules, m\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("folder", "other"), [("policies", "pipelines"), ("pipelines", "policies")]
)
def test_policies_and_pipelines_never_import_each_other(folder: str, other: str) -> None:
    shared = {"base", "walk", "parked", "readiness", "__init__"}
    for path in modules(folder):
        for name in imports(path):
            assert not name.startswith(f"swiftapex.{other}"), (path, name)
            parts = name.split(".")
            if parts[:2] == ["swiftapex", folder] and len(parts) > 2:
                assert parts[2] in shared or path.stem in shared, (path, name)


@pytest.mark.parametrize("folder", ["policies", "pipelines"])
def test_each_is_one_file_under_200_lines(folder: str) -> None:
    for path in modules(folder):
        assert len(path.read_text().splitlines()) < 200, path


def test_native_code_knows_no_torch() -> None:
    root = PACKAGE.parent
    for path in [*root.glob("kernels_cpu/**/*.*"), *root.glob("kernels_cuda/**/*.*")]:
        assert "torch/" not in path.read_text(), path
