"""Holds two result folders against each other: `python -m swiftapex.compare A B`.

Takes folders of `run_experiment` and of `scripts/reproduce.py` (or of its `--copy-to`). Runs are
matched by name and swept values, a figure's points by series and x; where each folder has one run,
those two. Settings that differ are named. Different requests are refused, unless told otherwise:
such numbers do not compare; runs are then matched by name alone where that is clear. Exit code 0:
compared; 2: they cannot be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftapex.core.errors import ConfigError
from swiftapex.report.files import flat
from swiftapex.report.metrics import field
from swiftapex.report.results import UNKNOWN, Run, read_runs
from swiftapex.report.table import text_table

_METRICS = (
    ("failed requests", "num_failed"),
    ("output tokens/s", "output_tokens_per_s"),
    ("requests/s", "requests_per_s"),
    ("TTFT p50, ms", "ttft_ms.p50"),
    ("TTFT p99, ms", "ttft_ms.p99"),
    ("TPOT p50, ms", "tpot_ms.p50"),
    ("inter-token p50, ms", "itl_ms.p50"),
    ("inter-token p99, ms", "itl_ms.p99"),
    ("per-token latency, ms", "per_token_latency_ms.mean"),
    ("the same as NEO has it", "per_token_latency_neo_ms.mean"),
    ("goodput, requests/s", "goodput_requests_per_s"),
    ("CPU token share", "cpu_token_share"),
    ("tokens/J, GPU", "tokens_per_j.gpu"),
)


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
    one, other = read_runs(first), read_runs(second)
    pairs, alone = _pairs(one, other, different_workloads)
    if not pairs:
        raise ConfigError(_nothing_in_common(first, second, one, other, different_workloads))
    lines = [f"A: {first}", f"B: {second}", *_differences(first, second), ""]
    for a, b in pairs:
        differences = list(_other_requests(a, b))
        if differences and not different_workloads:
            raise ConfigError(
                f"run {a.label} had other requests in A than in B ({'; '.join(differences)}): "
                "compare them with --different-workloads"
            )
        lines += [f"{a.label}" if a.label == b.label else f"{a.label} (A), {b.label} (B)"]
        lines += [f"Other requests: {'; '.join(differences)}."] if differences else []
        lines += _settings(a, b)
        lines += [text_table(list(_rows(a, b))), *_same_tokens(a, b), ""]
    lines += [f"In one of them only: {', '.join(alone)}."] if alone else []
    return "\n".join(lines).rstrip()


def _pairs(
    first: Mapping[str, Run], second: Mapping[str, Run], by_name: bool
) -> tuple[list[tuple[Run, Run]], list[str]]:
    """Runs that belong together, and the labels of the others. `by_name`: runs whose swept values
    have no counterpart go with the only one of their name."""
    if len(first) == len(second) == 1:
        (one,), (other,) = first.values(), second.values()
        return [(one, other)], []
    pairs = [(first[name], second[name]) for name in first if name in second]
    if by_name:
        left = [run for run in first.values() if run.label not in second]
        right = [run for run in second.values() if run.label not in first]
        for name in dict.fromkeys(run.name for run in left):
            mine, theirs = _named(left, name), _named(right, name)
            if 1 in (len(mine), len(theirs)):
                pairs += itertools.product(mine, theirs)
    paired = {run.label for pair in pairs for run in pair}
    return pairs, [name for name in (*first, *second) if name not in paired]


def _named(runs: Iterable[Run], name: str) -> list[Run]:
    return [run for run in runs if run.name == name]


def _nothing_in_common(
    first: Path,
    second: Path,
    one: Mapping[str, Run],
    other: Mapping[str, Run],
    by_name: bool,
) -> str:
    text = f"{first} and {second} have no run in common: {', '.join((*one, *other))}"
    names = dict.fromkeys(run.name for run in one.values() if _named(other.values(), run.name))
    if not names:
        return text
    if not by_name:
        return f"{text}; --different-workloads goes by name alone: {', '.join(names)}"
    counts = "; ".join(
        f"{name} stands for {len(_named(one.values(), name))} settings in A and for "
        f"{len(_named(other.values(), name))} others in B"
        for name in names
    )
    return f"{text}. By name there is no telling which belong together: {counts}"


def _other_requests(a: Run, b: Run) -> Iterator[str]:
    if UNKNOWN in (a.requests, b.requests):
        which = [side for side, run in (("A", a), ("B", b)) if run.requests == UNKNOWN]
        yield f"the settings are not in the figure.json of {' and '.join(which)}"
        return
    for key in dict.fromkeys((*a.requests, *b.requests)):
        one, other = a.requests.get(key), b.requests.get(key)
        if one != other:
            yield f"{key}: {one} and {other}"
    hashes = [run.numbers.get("requests_sha256") for run in (a, b)]
    if None in hashes:
        if a.max_model_len != b.max_model_len:
            yield f"max_model_len: {a.max_model_len} and {b.max_model_len}"
    elif hashes[0] != hashes[1]:
        yield f"asked for, after over_length: {_asked(a)} and {_asked(b)}"


def _settings(a: Run, b: Run) -> list[str]:
    """Which settings differ; their keys are those of the experiment file."""
    if a.settings is None or b.settings is None:
        return []
    keys = dict.fromkeys((*a.settings, *b.settings))
    shown = {key: [_setting(run.settings or {}, key) for run in (a, b)] for key in keys}
    differing = [f"  {key}: {one} against {other}" for key, (one, other) in shown.items()
                 if one != other]  # fmt: skip
    return ["Settings, A against B:", *differing] if differing else ["The same settings."]


def _setting(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key)
    if value is None:  # null, an empty mapping
        return "not given"
    return value if isinstance(value, str) else json.dumps(value)


def _asked(run: Run) -> str:
    sums = run.numbers["asked"]
    prompts, outputs, refused = (sums[key] for key in ("prompt_tokens", "output_tokens", "refused"))
    return f"{prompts} prompt and {outputs} output tokens, {refused} requests refused"


def _rows(a: Run, b: Run) -> Iterator[tuple[str, ...]]:
    yield "metric", "A", "B", "B against A"
    for name, metric in _METRICS if "output_tokens_per_s" in a.numbers else _of_kernel(a):
        one, other = field(a.numbers, metric), field(b.numbers, metric)
        if one is None and other is None:
            continue
        change = "-" if not one or other is None else f"{100 * (other / one - 1):+.1f} %"
        yield name, _number(one), _number(other), change


def _of_kernel(run: Run) -> list[tuple[str, str]]:
    return [(key, key) for key, value in run.numbers.items() if key != "x" and _is_number(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _same_tokens(a: Run, b: Run) -> Iterator[str]:
    hashes = a.numbers.get("outputs_sha256"), b.numbers.get("outputs_sha256")
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
    """Of a copy of a figure's small files, the one in figure.json."""
    for name, key in (("environment.json", None), ("figure.json", "environment")):
        try:
            found = json.loads((folder / name).read_text("utf-8"))
            return dict(found if key is None else found[key])
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return {}


if __name__ == "__main__":
    sys.exit(main())
