"""What scripts/bench_hybrid.py begins a window with."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_hybrid")


def test_lengths_may_say_what_a_window_begins_with(bench: Any) -> None:
    assert bench.Lengths.parse("400x200") == bench.Lengths(400, 200)
    assert bench.Lengths.parse("400x200@285") == bench.Lengths(400, 200, 285)
    assert bench.Lengths.parse("1000x600@500:0.5") == bench.Lengths(1000, 600, 500, 0.5)
    with pytest.raises(ValueError, match="values to unpack"):
        bench.Lengths.parse("400")


def test_requests_in_progress_are_ordered_by_age(bench: Any) -> None:
    shares = bench.oldest_first(500, 20, 0.4)
    assert len(shares) == 500
    assert all(older > younger for older, younger in pairwise(shares))
    assert shares[0] < 1 and shares[19] > 0.4 > shares[20] and shares[-1] > 0
    assert sum(shares[20:]) / 480 == pytest.approx(0.2)
    assert bench.oldest_first(3, 20, 0.4) == pytest.approx([0.9, 0.7, 0.5])
    spread = bench.evenly_spread(128)
    assert sorted(spread[:64]) == sorted(spread[64:])
    assert sum(spread) / 128 == pytest.approx(0.5)
