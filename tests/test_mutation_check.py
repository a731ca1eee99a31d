"""The bugs that scripts/mutation_check.py seeds can still be seeded."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_each_bug_is_a_change_of_the_code_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    mutations = importlib.import_module("mutation_check").MUTATIONS
    for mutation in mutations:
        source = (ROOT / "swiftapex" / mutation.file).read_text()
        assert source.count(mutation.old) == 1, mutation.name
        compile(source.replace(mutation.old, mutation.new), mutation.file, "exec")
