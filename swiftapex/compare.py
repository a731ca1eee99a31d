"""Holds two result folders against each other: `python -m swiftapex.compare A B`.

Takes folders of `run_experiment` and of `scripts/reproduce.py`. Runs are matched by name and swept
values; where each folder has one run, those two. Different workloads are refused, unless told
otherwise: such numbers do not compare. Exit code 0: compared; 2: they cannot be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swiftapex.core.errors import ConfigError
from swiftapex.report.files import flat
from swiftapex.report.metrics import field
from swiftapex.report.table import text_table
from swiftapex.report.words import label

_METRICS = (
    ("output tokens/s", "output_tokens_per_s"),
    ("requests/s", "requests_per_s"),
    ("TTFT p50, ms", "ttft_ms.p50"),
    ("TTFT p99, ms", "ttft_ms.p99"),
    ("TPOT p50, ms", "tpot_ms.p50"),
    ("inter-token p50, ms", "itl_ms.p50"),
    ("inter-token p99, ms", "itl_ms.p99"),
    ("goodput, requests/s", "goodput_requests_per_s"),
    ("CPU token share", "cpu_token_share"),
    ("tokens/J, GPU", "tokens_per_j.gpu"),
)


@dataclass(frozen=True)
class Run:
    """One run of a folder: its summary, and what was sent to it."""

    summary: Mapping[str, Any]
    requests: Mapping[str, Any]  # workload and seed
    model: Mapping[str, Any]

    @property
    def label(self) -> str:
        return label(self.summary)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swiftapex.compare", description=__doc__.split("\n")[0]
    )
    parser.add_argument("first", type=Path, metavar="A")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument(
        "--different-workloads", action="store_true", help="compare runs of other requests too"
    )
    options = parser.parse_args(arguments)
    try:
        print(compare(options.first, options.second, options.different_workloads))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(first: Path, second: Path, different_workloads: bool = False) -> str:
    """The comparison as text. ConfigError where a folder holds no results, no run matches, or a
    pair of runs had other requests."""
    pairs, alone = _pairs(_runs(first), _runs(second))
    if not pairs:
        raise ConfigError(f"{first} and {second} have no run in common: {', '.join(alone)}")
    lines = [f"A: {first}", f"B: {second}", *_differences(first, second), ""]
    for a, b in pairs:
        other = list(_other_requests(a, b))
        if other and not different_workloads:
            raise ConfigError(
                f"run {a.label} had other requests in A than in B ({'; '.join(other)}): compare "
                "them with --different-workloads"
            )
        lines += [f"{a.label}" if a.label == b.label else f"{a.label} (A), {b.label} (B)"]
        lines += [f"Other requests: {'; '.join(other)}."] if other else []
        lines += [text_table(list(_rows(a, b))), *_same_tokens(a, b), ""]
    lines += [f"In one of them only: {', '.join(alone)}."] if alone else []
    return "\n".join(lines).rstrip()


def _runs(folder: Path) -> dict[str, Run]:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no summary.json of an experiment: {error}") from error
    runs = {}
    for run in summary["runs"]:
        settings = yaml.safe_load((folder / run["folder"] / "run.yaml").read_text("utf-8"))
        requests = {"seed": settings["seed"], **_workload(settings["workload"])}
        found = Run(run, requests, settings["model"])
        runs[found.label] = found
    return runs


def _workload(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without the names of files, where they can be told by what is in them, and without what is
    done with the answers."""
    kept = {key: value for key, value in settings.items() if key not in ("window", "slo")}
    path = settings.get("path")
    if path is not None and Path(path).is_file():
        kept["path"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return kept


def _pairs(
    first: Mapping[str, Run], second: Mapping[str, Run]
) -> tuple[list[tuple[Run, Run]], list[str]]:
    """Runs that belong together, and the labels of the others."""
    if len(first) == len(second) == 1:
        (one,), (other,) = first.values(), second.values()
        return [(one, other)], []
    both = [name for name in first if name in second]
    alone = [name for name in (*first, *second) if name not in both]
    return [(first[name], second[name]) for name in both], alone


def _other_requests(a: Run, b: Run) -> Iterator[str]:
    for key in dict.fromkeys((*a.requests, *b.requests)):
        one, other = a.requests.get(key), b.requests.get(key)
        if one != other:
            yield f"{key}: {one} and {other}"
    models = [run.model["path"] or run.model["architecture"] for run in (a, b)]
    if models[0] != models[1]:  # its tokenizer, or its vocabulary, makes the requests
        yield f"model: {models[0]} and {models[1]}"


def _rows(a: Run, b: Run) -> Iterator[tuple[str, ...]]:
    yield "metric", "A", "B", "B against A"
    for name, metric in _METRICS:
        one, other = field(a.summary, metric), field(b.summary, metric)
        if one is None and other is None:
            continue
        change = "-" if not one or other is None else f"{100 * (other / one - 1):+.1f} %"
        yield name, _number(one), _number(other), change


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _same_tokens(a: Run, b: Run) -> Iterator[str]:
    hashes = a.summary.get("outputs_sha256"), b.summary.get("outputs_sha256")
    if None not in hashes:
        yield "The same tokens." if hashes[0] == hashes[1] else "Not the same tokens."


def _differences(first: Path, second: Path) -> Iterator[str]:
    """What is not the same about the machines and the code."""
    one, other = (flat(_environment(folder)) for folder in (first, second))
    for key in dict.fromkeys((*one, *other)):
        ignored = key in ("started", "arguments") or key.startswith(("memory.available", "seeds."))
        if not ignored and one.get(key) != other.get(key):
            yield f"{key}: {one.get(key)} (A), {other.get(key)} (B)"


def _environment(folder: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads((folder / "environment.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


if __name__ == "__main__":
    sys.exit(main())
