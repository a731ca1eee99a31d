"""The bugs that scripts/mutation_check.py puts in are of the sources as they are."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_every_bug_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    check = importlib.import_module("mutation_check")
    for bug in (*check.MUTATIONS, check.NO_BUG):
        text = (ROOT / "swiftapex" / bug.file).read_text()
        assert text.count(bug.old) == 1, f"{bug.name}: not found once in {bug.file}"
        compile(text.replace(bug.old, bug.new), bug.file, "exec")
