"""What benchmarks are asked for on their command lines."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("bench_*.py")))
def test_numbers_that_cannot_be_are_answered_before_anything_runs(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    try:
        main = importlib.import_module(script).main
    except ImportError as error:  # of the CUDA kernels
        pytest.skip(str(error))
    text = (SCRIPTS / f"{script}.py").read_text()
    if "limit_arguments(" in text:
        text += (SCRIPTS / "arguments.py").read_text()
    numbers = re.findall(
        r'"(--[a-z-]+)"(?:(?!add_argument).)*?type=(?:at_least|int\b|float\b)', text, re.S
    )
    options = sorted({*numbers} - {"--seed"})
    assert options, "a benchmark has numbers"
    for option in options:
        monkeypatch.setattr("sys.argv", [script, option, "-1"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert f"argument {option}: expected a number of at least" in capsys.readouterr().err
