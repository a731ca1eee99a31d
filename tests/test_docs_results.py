"""Figures in docs are those of the files in docs/results that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
BATCHES = {"batch 16, 1,024 tokens": 16, "batch 128, 16 to 8,192 tokens": 128}
BATCHES |= {"batch 1, 512 tokens": 1}
DTYPES = ("float16", "bfloat16", "int8")


def read(name: str) -> Any:
    return json.loads((DOCS / "results" / name).read_text())


@pytest.mark.parametrize(
    "key, begins", [("results", "With two places, "), ("before", "With both, ")]
)
def test_cpu_attention_on_14_threads(key: str, begins: str) -> None:
    lines = {
        (line["batch"], f"{line['q_heads']}:{line['kv_heads']}", line["dtype"]): line
        for line in read("cpu_attention_14_threads.json")[key]
    }
    text = (DOCS / "cpu_attention.md").read_text()
    table = text[text.index("\n" + begins) :].split("\n\n")[1]
    batch, seen = 0, 0
    for row in table.splitlines()[2:]:
        name, heads, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        batch = BATCHES.get(name, batch)
        for dtype, cell in zip(DTYPES, cells, strict=True):
            line, shown = (
                lines[batch, heads, dtype],
                [float(x) for x in re.findall(r"[\d.]+", cell)],
            )
            names = ("share", "share_of_equal_read")[: len(shown) - 1]
            assert shown[:-1] == pytest.approx([line[name] for name in names], abs=0.0051)
            assert shown[-1] == pytest.approx(line["gb_per_s"], abs=0.51)
            seen += 1
    assert seen == len(lines) == 27


def test_regimes_of_a_whole_gpu() -> None:
    ratios = [
        ratio
        for run in read("regimes.json")["runs"]
        for ratio in run.get("summary", {"ratios": []})["ratios"]
        if ratio["regime"] == "uncapped"
    ]
    pairs = [
        f"{ratio['over_gpu_only']['ratio']:.2f} and {ratio['over_neo_and_apex']['ratio']:.2f}"
        for ratio in sorted(ratios, key=lambda ratio: int(ratio["output"]))
    ]
    text = (DOCS / "architecture.md").read_text()
    assert f"llama2-7b on a whole GPU {', '.join(pairs)}" in text
