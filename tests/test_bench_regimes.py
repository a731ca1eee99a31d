"""What scripts/bench_regimes.py makes of its lines."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_regimes")


def line(
    strategy: str, rate: float, repeat: int = 0, taken: float = 10.0, output: int = 50
) -> dict[str, Any]:
    return {
        "regime": "t4-864",
        "output": output,
        "strategy": strategy,
        "repeat": repeat,
        "valid": taken == 10.0,
        "prefilled_requests": taken,
        "decoded_requests": 10.0,
        "output_tokens_per_s": rate,
        "seconds": 2.0,
        "preemptions": 0,
    }


def test_the_summary_names_what_misses_and_what_is_not_proven(bench: Any) -> None:
    lines = [
        line("gpu_only", 100.0),
        line("model_based", 97.0),
        line("neo", 90.0),
        line("apex", 80.0),
        line("gpu_only", 102.0, repeat=1),
        line("model_based", 99.0, repeat=1, taken=5.0),
        line("gpu_only", 100.0, output=200),
        line("model_based", 150.0, output=200, taken=20.0),
    ]
    found = bench.summary(lines)
    first, second = found["ratios"]
    assert first["tokens_per_s"] == {
        "gpu_only": 101.0, "model_based": 98.0, "neo": 90.0, "apex": 80.0,
    }  # fmt: skip
    assert first["over_gpu_only"]["ratio"] == pytest.approx(98 / 101, abs=1e-4)
    assert first["over_neo_and_apex"]["ratio"] == pytest.approx(98 / 90, abs=1e-4)
    low = (97 + 99 / 2) / 2
    assert first["over_neo_and_apex"]["least"] == pytest.approx(low / 90, abs=1e-4)
    assert first["invalid_windows"] == 1
    assert second["over_gpu_only"] == {"ratio": 1.5, "least": 1.5, "most": 3.0}
    assert found["misses"] == [["t4-864", 50, "over_gpu_only", first["over_gpu_only"]["ratio"]]]
    least = first["over_neo_and_apex"]["least"]
    assert found["unproven"] == [["t4-864", 50, "over_neo_and_apex", least]]
    assert found["incomplete"] == [["t4-864", 200]]


def test_a_ratio_from_invalid_windows_is_no_miss_where_they_leave_it_open(bench: Any) -> None:
    """The strategy took in twice the prompts that its tokens ask for: its rate may be higher."""
    lines = [line("gpu_only", 100.0), line("model_based", 90.0, taken=20.0)]
    found = bench.summary(lines)
    assert found["misses"] == [] and found["unproven"] == [["t4-864", 50, "over_gpu_only", 0.9]]
    assert bench.summary([lines[0], line("model_based", 90.0)])["misses"] == [
        ["t4-864", 50, "over_gpu_only", 0.9]
    ]


def test_windows_that_fill_the_cpu_and_drain_it_make_up_for_each_other(bench: Any) -> None:
    """2 s with 10 requests more and 2 s with 5 fewer: a third of the time it fills."""
    lines = [
        line("gpu_only", 100.0),
        line("neo", 90.0, taken=20.0),
        line("neo", 180.0, repeat=1, taken=5.0),
        line("model_based", 165.0),
    ]
    (row,) = bench.summary(lines)["ratios"]
    assert row["tokens_per_s"]["neo"] == pytest.approx((90 + 2 * 180) / 3, abs=0.05)
    assert row["over_neo_and_apex"] == {"ratio": 1.1, "least": 1.1, "most": 1.1}


def test_a_valid_windows_rate_is_the_middle_of_what_its_prompts_and_its_tokens_tell(
    bench: Any,
) -> None:
    lines = [line("gpu_only", 100.0), line("model_based", 100.0, taken=9.6) | {"valid": True}]
    (row,) = bench.summary(lines)["ratios"]
    assert row["over_gpu_only"] == {"ratio": 0.98, "least": 0.98, "most": 0.98}
    again = lines[0] | {"preemptions": 1}
    (row,) = bench.summary([again, lines[1]])["ratios"]
    assert row["over_gpu_only"] == {"ratio": 1.0, "least": 1.0, "most": 1.0}


def test_a_policy_that_never_settles_has_a_window_of_each_start(bench: Any) -> None:
    args = argparse.Namespace(
        regimes=["a10g-26400"], outputs=[500], repeats=1, repeats_of_others=1, strategies=["neo"]
    )
    found = [cell.lengths() for cell in bench.cells(args)]
    assert found == ["1000x500@30", "1000x500@110"]


def test_strategies_take_turns_and_the_others_have_fewer_repeats(bench: Any) -> None:
    args = argparse.Namespace(
        regimes=["t4-864"],
        outputs=[50],
        repeats=2,
        repeats_of_others=1,
        strategies=bench.STRATEGIES,
    )
    assert [(c.strategy, c.repeat) for c in bench.cells(args)] == [
        ("gpu_only", 0), ("model_based", 0), ("neo", 0), ("apex", 0),
        ("gpu_only", 1), ("model_based", 1),
    ]  # fmt: skip
    args.strategies = ["neo"]
    assert [(c.strategy, c.repeat) for c in bench.cells(args)] == [("neo", 0)]


def test_a_regimes_requests_fit_its_gpu(bench: Any) -> None:
    for regime in bench.REGIMES.values():
        assert 1.1 * (regime.mean_input + max(bench.OUTPUTS)) <= regime.gpu_kv
        assert all(len(numbers) == len(bench.OUTPUTS) for numbers in regime.in_flight.values())
