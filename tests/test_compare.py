"""Two result folders against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from swiftapex.compare import main
from swiftapex.run_experiment import main as run_experiment

EXPERIMENT = """
name: example
model: {{architecture: tiny, weights: dummy}}
engine: {{device: reference, gpu: {{kv_tokens: 4096}}, cpu: {{kv_tokens: 0}}}}
runs: {runs}
workload: {{kind: prompts, path: {prompts}, output_len: 6}}
"""
TWO = "[{name: one, policy: gpu_only}, {name: two, pipeline: sequential}]"


@pytest.fixture
def folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs an experiment; its folder. An iteration of its engines takes `step_s` seconds."""
    count = 0

    def run(*assignments: str, runs: str = TWO, prompts: str = "a b\nc", step_s: float = 0) -> Path:
        nonlocal count
        count += 1
        path = tmp_path / f"exp{count}.yaml"
        lines = "\n".join(json.dumps({"prompt": line}) for line in prompts.split("\n"))
        (tmp_path / f"{count}.jsonl").write_text(lines)
        path.write_text(EXPERIMENT.format(runs=runs, prompts=f"{count}.jsonl"))
        settings = [word for text in assignments for word in ("--set", text)]
        arguments = [str(path), *settings, "--out", str(tmp_path / "out")]
        run_experiment(arguments, lambda plan, trace: FakeEngine(step_s=step_s))  # type: ignore[arg-type, return-value]
        return Path(capsys.readouterr().out.splitlines()[-1])

    return run


def test_runs_of_the_same_requests(folders: Any, capsys: Any) -> None:
    # The prompts' files have other names and the same content.
    slow, fast = folders(step_s=0.02), folders(step_s=0.005)
    assert main([str(slow), str(fast)]) == 0
    text = capsys.readouterr().out
    sections = text.split("\n\n")
    one = next(section for section in sections if section.startswith("one"))
    rate = next(line for line in one.splitlines() if line.startswith("output tokens/s"))
    assert float(rate.split()[-2]) > 50  # about four times as fast: +300 %
    assert "The same tokens." in one
    assert "memory" not in text and "started" not in text


def test_other_requests_are_refused_unless_told(folders: Any, capsys: Any) -> None:
    a, b = folders(), folders(prompts="a b\nother words here")
    assert main([str(a), str(b)]) == 2
    error = capsys.readouterr().err
    assert "run one had other requests" in error and "path: " in error
    assert main([str(a), str(b), "--different-workloads"]) == 0
    text = capsys.readouterr().out
    assert "Other requests: path" in text and "Not the same tokens." in text
    assert main([str(a), str(folders("seed=5"))]) == 2
    assert "seed: 0 and 5" in capsys.readouterr().err
    assert main([str(a), str(folders("model={architecture: smollm2-135m, weights: dummy}"))]) == 2
    assert "model: tiny and smollm2-135m" in capsys.readouterr().err


def test_a_window_and_a_limit_do_not_make_other_requests(folders: Any) -> None:
    a, b = folders(), folders("workload.slo.ttft_ms=5", "workload.window.middle=0.5")
    assert main([str(a), str(b)]) == 0


def test_runs_are_matched_by_name(folders: Any, capsys: Any) -> None:
    two = folders()
    three = folders(runs=TWO[:-1] + ", {name: three, policy: gpu_only}]")
    assert main([str(two), str(three)]) == 0
    assert "In one of them only: three." in capsys.readouterr().out
    lone = [folders(runs=f"[{{name: {name}, policy: gpu_only}}]") for name in ("x", "y")]
    assert main(list(map(str, lone))) == 0
    assert "x (A), y (B)" in capsys.readouterr().out
    assert main([str(two), str(lone[0])]) == 2
    assert "no run in common" in capsys.readouterr().err


def test_folders_without_results(tmp_path: Path, folders: Any, capsys: Any) -> None:
    assert main([str(tmp_path), str(folders())]) == 2
    assert "no summary.json" in capsys.readouterr().err
