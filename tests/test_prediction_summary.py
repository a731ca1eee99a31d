"""What scripts/bench_prediction.py makes of its runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from swiftapex import SamplingParams
from swiftapex.core.records import IterationRecord
from swiftapex.core.request import FinishReason, Request

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("prediction_summary")


def request(*times_s: float) -> Request:
    made = Request(0, (1,), SamplingParams(), 0.0)
    made.token_times_s.extend(times_s)
    return made


def record(pipeline: str, us: float, predicted_us: float | None) -> IterationRecord:
    return IterationRecord(
        0, 0.0, us, 0.0, pipeline, 0, 1, 0, 1, 0, 1, 0, 0, 9, 9, 0, predicted_us=predicted_us
    )


def test_tokens_count_in_part(summary: Any) -> None:
    between = summary.tokens_between
    steady = request(2.0, 4.0, 6.0)  # a token every 2 s since 0
    assert between(steady, 1.0, 6.0, 0.0) == pytest.approx(2.5)
    assert between(steady, 3.0, 7.0, 0.0) == pytest.approx(2.0)  # half of one is under way
    assert between(steady, 3.0, 60.0, 0.0) == pytest.approx(2.5)  # and not more than one
    assert between(steady, 7.0, 60.0, 0.0) == pytest.approx(0.5)
    steady.finish_reason = FinishReason.LENGTH
    assert between(steady, 3.0, 7.0, 0.0) == pytest.approx(1.5)
    prompt = request(2.0, 4.0)
    assert between(prompt, 1.0, 4.0, None) == pytest.approx(2.0)
    assert between(prompt, 3.0, 4.0, None) == pytest.approx(0.5)
    assert between(request(), 0.0, 9.0, 0.0) == 0


def test_a_cell_is_judged_by_the_forced_rate_of_what_was_picked(summary: Any) -> None:
    rates = {
        "gpu_only": 100.0, "fixed:asymmetric": 97.0, "fixed:async_overlap": 90.0, "mine": 80.0,
    }  # fmt: skip
    ran = [record("asymmetric", 50.0, None)] * 3 + [record("sequential", 20.0, None)] * 5
    found = summary.judge(rates, "mine", ran)
    assert found == {
        "fastest": "gpu_only",
        "picked": "fixed:asymmetric",
        "picked_over_fastest": 0.97,
        "policy_over_fastest": 0.8,
    }
    alone = summary.judge({"gpu_only": 100.0, "mine": 80.0}, "mine", ran)
    assert alone["picked_over_fastest"] == 0.8  # nothing else ran that


def test_the_summary_pools_errors_and_lists_misses(summary: Any) -> None:
    records = [record("sequential", 100.0, us) for us in (100.0, 110.0, 80.0, None)]
    assert summary.errors(records) == pytest.approx([0.0, 0.1, 0.2])
    found = summary.Found()
    found.errors["gpu_only", "decode"] = [0.0, 0.1, 0.2]
    found.errors["gpu_only", "mixed"] = [0.4]
    found.errors["mine", "mixed"] = [0.5]
    missed = {"picked_over_fastest": 0.97, "policy_over_fastest": 0.97}
    found.cells += [missed, missed | {"policy_over_fastest": 0.98}]
    found.cells += [missed | {"picked_over_fastest": share} for share in (0.98, 1.0)]
    found.cells.append({"cell": [864, 256, "mixed"], "holds_only": {"cpu_requests": 9}})
    told = found.summary(planned=5)
    pooled = told["prediction_error"]
    assert pooled["gpu_only"] == {"iterations": 4, "p50": 0.2, "p90": 0.4}
    assert pooled["all"]["iterations"] == 5 and pooled["mine, mixed"]["p50"] == 0.5
    assert (told["cells"], told["cells_left_out"]) == (4, 1)
    assert (told["good_picks"], told["good_cells"]) == (0.5, 0.75)
    assert told["misses"] == [missed]
    assert summary.Found().summary(planned=1)["good_picks"] is None
