"""scripts/sanitize_cuda.sh: what its exit status says, with a stand-in for compute-sanitizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "sanitize_cuda.sh"


def run(tmp_path: Path, body: str, limit: int = 20) -> tuple[int, str]:
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(f'#!/bin/sh\necho "$@"\n{body}\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(SCRIPT), str(tmp_path / "out")],
        env=os.environ | {"PATH": path, "LIMIT": str(limit)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("exit 0", 0, "memcheck: nothing found"),
        ('[ "$2" = memcheck ] || exit 99', 1, "racecheck: findings"),
        ('[ "$2" = racecheck ] || exit 5', 1, "memcheck: the tests ended with 5"),
        ('[ "$2" = memcheck ] || exec sleep 30', 124, "racecheck: cut off after 1 s"),
        ('[ "$2" = racecheck ] && exit 99; exec sleep 30', 1, "memcheck: cut off after 1 s"),
    ],
)
def test_exit_status(tmp_path: Path, body: str, code: int, says: str) -> None:
    limit = 1 if "sleep" in body else 20
    status, output = run(tmp_path, body, limit)
    assert status == code and says in output
    for tool in ("memcheck", "racecheck"):
        log = (tmp_path / "out" / f"sanitize_{tool}.log").read_text()
        assert log.startswith(f"--tool {tool} ") and "-m pytest -m sanitize" in log


def test_without_the_tool_it_says_so(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path)}
    done = subprocess.run([str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 127 and "no compute-sanitizer" in done.stdout
