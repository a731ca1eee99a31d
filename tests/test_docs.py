"""The examples of docs/write_a_pipeline.md and README.md run as they stand there."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftapex import LLM, SamplingParams
from swiftapex.run_experiment import main

ROOT = Path(__file__).parent.parent
TINY = {"architecture": "tiny", "weights": "dummy", "dtype": "float32"}


def python_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `my_lab` outside the project, which forgets itself after the test."""
    (tmp_path / "my_lab").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "my_lab"


def tokens_of(**engine: object) -> tuple[list[tuple[int, ...]], int]:
    prompts = [[5 + i, 6, 7, *range(20, 20 + 3 * i)] for i in range(8)]
    with LLM(TINY, block_size=4, cpu={"kv_tokens": 2048}, max_model_len=64, **engine) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        return [o.token_ids for o in outputs], llm.stats().cpu_decoded_tokens


def test_the_documented_pipeline_and_policy_give_the_same_tokens(lab: Path) -> None:
    pipeline, policy = python_blocks("docs/write_a_pipeline.md")
    (lab / "blocking.py").write_text(pipeline)
    (lab / "patient.py").write_text(policy)
    expected, _ = tokens_of(gpu={"kv_tokens": 2048})
    gpu = {"kv_tokens": 72}
    tokens, on_cpu = tokens_of(
        gpu=gpu, policy="fixed:my_lab.blocking:Blocking", policy_args={"shape": "cohorts"}
    )
    assert tokens == expected and on_cpu > 0
    tokens, on_cpu = tokens_of(
        gpu=gpu, policy="my_lab.patient:Patient", policy_args={"patience": 2}
    )
    assert tokens == expected and on_cpu > 0


def test_the_readmes_pipeline_runs(lab: Path) -> None:
    (mine,) = [block for block in python_blocks("README.md") if "class Mine" in block]
    (lab / "my_file.py").write_text(mine)
    expected, _ = tokens_of(gpu={"kv_tokens": 2048})
    assert tokens_of(gpu={"kv_tokens": 2048}, policy="fixed:my_lab.my_file:Mine")[0] == expected


def test_the_readmes_small_experiment_uses_the_cpu(tmp_path: Path) -> None:
    (small,) = re.findall(r"```yaml\n(name: mine\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "mine.yaml").write_text(small)
    assert main([str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "results")]) == 0
    (summary,) = tmp_path.glob("results/mine/*/summary.json")
    alone, apex = json.loads(summary.read_text())["runs"]
    assert alone["cpu_token_share"] == 0 < apex["cpu_token_share"]


def test_the_documented_comparison_runs(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lab / "patient.py").write_text(python_blocks("docs/write_a_pipeline.md")[1])
    text = (ROOT / "docs/write_a_pipeline.md").read_text()
    (command,) = re.findall(r"python scripts/simulate.py (.*?)```", text, re.S)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script: Any = importlib.import_module("simulate")
    monkeypatch.setattr("sys.argv", ["simulate", *shlex.split(command.replace("\\\n", ""))])
    assert script.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 5 and lines[-1]["on_cpu_most"] > 0


@pytest.mark.parametrize("document", ["README.md", "docs/write_a_pipeline.md"])
def test_python_in_the_documents_is_python(document: str) -> None:
    for block in python_blocks(document):
        ast.parse(block)
