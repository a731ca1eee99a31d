"""Figures in docs are those of the files in docs/results that they name."""

from __future__ import annotations

import json
import math
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


def test_shares_of_gpu_attention() -> None:
    shares: dict[tuple[int, str], dict[str, float]] = {}
    for line in read("gpu_attention.json")["results"]:
        shares.setdefault((line["sms"], line["shape"]), {})[line["contexts"]] = line["share"]
    text = (DOCS / "architecture.md").read_text()
    text = text[text.index("Attention alone, calls one behind") :]
    groups = ("MHA", "GQA-4", "GQA-8")
    short, uneven = "256 x 128", "1 x 12288 + 31 x 132"

    def shown(value: float) -> str:
        return f"{value:.2f}".lstrip("0")

    def of_each(sms: int, contexts: str) -> str:
        return "(" + ", ".join(shown(shares[sms, group][contexts]) for group in groups) + ")"

    def ranges(sms: int, tokens: tuple[int, ...]) -> str:
        words = []
        for group in groups:
            values = [
                share
                for contexts, share in shares[sms, group].items()
                if contexts not in (short, uneven)
                and math.prod(map(int, contexts.split(" x "))) in tokens
            ]
            words.append(f"{shown(min(values))} to {shown(max(values))}")
        return f"{words[0]}, {words[1]} and {words[2]}"

    for words in (
        f"on 8 multiprocessors {ranges(8, (16384, 65536, 64000))}",
        f"but for 256 rows of 128 tokens {of_each(8, short)[:-1]}",
        f"one long row beside 31 short ones {of_each(8, uneven)[:-1]}",
        f"with 64,000 tokens {ranges(132, (65536, 64000))}",
        f"with 16,384 tokens {ranges(132, (16384,))}",
        f"with one row {of_each(132, '1 x 16384')}",
        f"256 rows of 128 {of_each(132, short)}",
        f"beside short ones {of_each(132, uneven)}",
    ):
        assert words in text, words
