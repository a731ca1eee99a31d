"""Two result folders against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from swiftapex.compare import main
from swiftapex.report.results import _settings
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

    def run(
        *assignments: str,
        runs: str = TWO,
        prompts: str = "a b\nc",
        step_s: float = 0,
        max_model_len: int = 1000,
    ) -> Path:
        nonlocal count
        count += 1
        path = tmp_path / f"exp{count}.yaml"
        lines = "\n".join(json.dumps({"prompt": line}) for line in prompts.split("\n"))
        (tmp_path / f"{count}.jsonl").write_text(lines)
        path.write_text(EXPERIMENT.format(runs=runs, prompts=f"{count}.jsonl"))
        settings = [word for text in assignments for word in ("--set", text)]
        arguments = [str(path), *settings, "--out", str(tmp_path / "out")]
        run_experiment(arguments, lambda plan, trace: FakeEngine(max_model_len, step_s=step_s))  # type: ignore[arg-type, return-value]
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


def test_which_settings_differ(folders: Any, capsys: Any) -> None:
    def section(a: Path, b: Path, name: str) -> list[str]:
        assert main([str(a), str(b), "--different-workloads"]) == 0
        sections = capsys.readouterr().out.split("\n\n")
        return next(s for s in sections if s.startswith(name)).splitlines()  # type: ignore[no-any-return]

    a = folders()
    for name in ("one", "two"):
        assert section(a, folders(prompts="d e"), name)[2] == "The same settings."
    b = folders(
        "engine.max_batch_size=4",
        "runs.one.engine.gpu.kv_tokens=64",
        "runs.two.policy_args.shape=one",
        "workload.slo.ttft_ms=5",
        "model.dtype=float32",
    )
    settings, dtype = "Settings, A against B:", "  model.dtype: auto against float32"
    batch = "  engine.max_batch_size: 256 against 4"
    kv = "  engine.gpu.kv_tokens: 4096 against 64"
    assert section(a, b, "one")[1:5] == [settings, dtype, kv, batch]
    two = section(a, b, "two")
    assert two[1:5] == [settings, dtype, batch, "  policy_args.shape: not given against one"]
    assert "  workload.slo.ttft_ms: not given against 5.0" in two
    assert "kv_tokens" not in str(two)
    neo = folders(runs="[{name: one, policy: neo}]")
    assert "  policy: gpu_only against neo" in section(a, neo, "one")
    capsys.readouterr()


def test_the_settings_of_other_engines_are_their_own() -> None:
    run = {"model": {"path": "m", "dtype": "auto"}, "workload": {}, "policy": "peer"}
    found = _settings(run | {"engine": {"block_size": 32}, "peer": {"url": "http://a/v1"}})
    assert found["peer.url"] == "http://a/v1"
    assert not [key for key in found if key.startswith(("engine", "policy"))]


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
    assert "neither summary.json nor figure.json" in capsys.readouterr().err
    for text, message in (
        ("{}", "not results of this package: KeyError('runs')"),
        ("[1]", "not results of this package"),
        ("{", "not readable"),
        ('{"runs": []}', "holds no run that ended"),
    ):
        (tmp_path / "summary.json").write_text(text)
        assert main([str(folders()), str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    whole, lacking = folders(), folders()
    (lacking / "one" / "run.yaml").unlink()
    assert main([str(whole), str(lacking)]) == 2
    assert "run.yaml: not readable" in capsys.readouterr().err


@pytest.mark.parametrize("over_length", ["truncate", "reject"])
def test_requests_that_an_engine_cut_are_other_requests(
    folders: Any, capsys: Any, over_length: str
) -> None:
    """The settings are the same; how long a request may be is the engine's."""
    policy = f"workload.over_length={over_length}"
    a, b = folders(policy), folders(policy, max_model_len=7)
    assert main([str(a), str(b)]) == 2
    error = capsys.readouterr().err
    asked = "2 prompt and 12 output tokens, 0" if over_length == "truncate" else "1 prompt and 6"
    assert "asked for, after over_length: 3 prompt and 12 output tokens, 0 requests" in error
    assert f"and {asked}" in error
    assert main([str(a), str(b), "--different-workloads"]) == 0
    assert main([str(a), str(folders(policy, max_model_len=8))]) == 0  # it fits


def test_results_that_do_not_tell_what_was_asked_for(folders: Any, capsys: Any) -> None:
    """Those of older versions: the setting of the length stands for it."""
    a, b, c = folders(), folders(), folders("engine.max_model_len=500")
    for folder in (a, b, c):
        summary = json.loads((folder / "summary.json").read_text())
        for run in summary["runs"]:
            del run["requests_sha256"]
        (folder / "summary.json").write_text(json.dumps(summary))
    assert main([str(a), str(b)]) == 0
    assert main([str(a), str(c)]) == 2
    assert "max_model_len: auto and 500" in capsys.readouterr().err


def test_a_sweep_against_one_setting_goes_by_name(folders: Any, capsys: Any) -> None:
    lone = folders()
    sweep, other = (
        folders(f"sweep={{workload.output_len: {lens}}}") for lens in ("[3, 6]", "[4, 5]")
    )
    assert main([str(lone), str(sweep)]) == 2
    assert "--different-workloads goes by name alone: one, two" in capsys.readouterr().err
    assert main([str(lone), str(sweep), "--different-workloads"]) == 0
    text = capsys.readouterr().out
    for pair in ("one (A), one (output_len=3) (B)", "two (A), two (output_len=6) (B)"):
        assert pair in text
    assert main([str(sweep), str(other), "--different-workloads"]) == 2
    error = capsys.readouterr().err
    assert "no telling which belong together: one stands for 2 settings in A and for 2" in error


def figure(folder: Path, factor: float, **kernels: Any) -> Path:
    """A figure of kernels as `reproduce.py --copy-to` leaves it."""
    settings = dict.fromkeys(("measure", "q_heads", "kv_heads", "head_dim", "num_layers"), 1)
    points = [
        {"series": side, "x": x, "settings": {}, "us": factor * x, "gb_per_s": 7.0}
        for side in ("cpu", "gpu")
        for x in (1, 4)
    ]
    document = {
        "kernels": {**settings, "context": 1024, **kernels},
        "points": points,
        "environment": {"cpu": {"model": f"a CPU of {factor}"}},
    }
    folder.mkdir()
    (folder / "figure.json").write_text(json.dumps(document))
    return folder


def test_figures_of_kernels_are_compared_point_by_point(tmp_path: Path, capsys: Any) -> None:
    a, b = figure(tmp_path / "a", 10), figure(tmp_path / "b", 15)
    assert main([str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "cpu.model: a CPU of 10 (A), a CPU of 15 (B)" in text
    section = next(part for part in text.split("\n\n") if part.startswith("gpu (x=4)"))
    row = next(line for line in section.splitlines() if line.startswith("us"))
    assert row.split() == ["us", "40", "60", "+50.0", "%"]
    assert text.count("gb_per_s") == 4
    longer = figure(tmp_path / "c", 10, context=2048)
    assert main([str(a), str(longer)]) == 2
    assert "context: 1024 and 2048" in capsys.readouterr().err


def test_a_figure_that_does_not_say_its_settings(tmp_path: Path, capsys: Any) -> None:
    a, b = figure(tmp_path / "a", 10), figure(tmp_path / "b", 15)
    for folder in (a, b):
        document = json.loads((folder / "figure.json").read_text())
        del document["kernels"]
        (folder / "figure.json").write_text(json.dumps(document))
    assert main([str(a), str(b)]) == 2
    assert "the settings are not in the figure.json of A and B" in capsys.readouterr().err
    assert main([str(a), str(b), "--different-workloads"]) == 0
    assert "gpu (x=4)" in capsys.readouterr().out
