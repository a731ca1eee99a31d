"""What happened in the runs, in sentences for someone who sees a report for the first time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swiftapex.core.records import IterationRecord

_GPU_ONLY = "sequential"
_PIPELINES = {
    "sequential": "sequentially",
    "asymmetric": "with asymmetric pipelining",
    "async_overlap": "with asynchronous overlap",
    "symmetric": "with symmetric pipelining",
}


def label(run: Mapping[str, Any]) -> str:
    """A run's name with its swept values."""
    values = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in run["sweep"].items())
    return f"{run['name']} ({values})" if values else str(run["name"])


def short_labels(labels: Sequence[str], most: int = 30) -> list[str]:
    """Labels for plots: the middle of a long one is left out. Each is still another one, as plots
    put what has the same label in the same place."""
    found: list[str] = []
    for text in labels:
        short = _shortened(text, most)
        number = 2
        while short in found:
            short = f"{_shortened(text, most - 4)} #{number}"
            number += 1
        found.append(short)
    return found


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = most // 2
    return f"{text[: most - tail - 1]}\N{HORIZONTAL ELLIPSIS}{text[-tail:]}"


def what_happened(iterations: Sequence[IterationRecord]) -> str:
    """Which pipelines ran, which decodes the CPU took, and who had to move."""
    if not iterations:
        return "No iteration ran."
    ran = Counter(record.pipeline for record in iterations)
    if len(ran) == 1:
        which = f"{counted(len(iterations), 'iteration')} ran {_pipeline(*ran)}"
    else:
        counts = [f"{count:,} ran {_pipeline(name)}" for name, count in ran.most_common()]
        which = f"Of {counted(len(iterations), 'iteration')}, {_and(counts)}"
    on_cpu = sum(record.cpu_decodes for record in iterations)
    decodes = on_cpu + sum(record.gpu_decodes for record in iterations)
    moves = sum(record.moves for record in iterations)
    preemptions = sum(record.preemptions for record in iterations)
    return (
        f"{which}; {on_cpu:,} of {counted(decodes, 'decoded token')} "
        f"had their attention on the CPU; {_events(moves, 'moved between the sides')}, "
        f"{_events(preemptions, 'preempted')}."
    )


def why(iterations: Sequence[IterationRecord]) -> str | None:
    """Why the CPU was used or was not: what the policy weighed. None where it weighed nothing."""
    weighed = [record for record in iterations if record.candidates_us]
    if not weighed:
        return None
    no_choice = [r for r in weighed if set(r.candidates_us or ()) <= {_GPU_ONLY}]
    sentences = []
    if no_choice:
        sentences.append(
            f"In {counted(len(no_choice), 'iteration')} there was no request on the CPU that it "
            "could have decoded in time, so that the GPU ran alone."
        )
    for words in dict.fromkeys(r.inequality.words for r in weighed if r.inequality):
        mine = [r for r in weighed if r.inequality is not None and r.inequality.words == words]
        sentences.append(_held(words, mine))
    forced = [r for r in weighed if r.pipeline != _GPU_ONLY and _GPU_ONLY not in r.candidates_us]  # type: ignore[operator]
    if forced:
        sentences.append(
            f"{counted(len(forced), 'iteration')} had no GPU rows, so that there was no GPU-only."
        )
    return " ".join(sentences)


def _held(words: str, records: Sequence[IterationRecord]) -> str:
    """How often an inequality held, its sides, and what then ran."""
    sides = [(r.inequality.left, r.inequality.right) for r in records if r.inequality]
    held = sum(left > right for left, right in sides)
    with_cpu = sum(record.pipeline != _GPU_ONLY for record in records)
    left, right = (statistics.median(side) for side in zip(*sides, strict=True))
    return (
        f"{words[0].upper()}{words[1:]}: this held in {held:,} of {counted(len(records), 'case')} "
        f"(medians {left:.3g} against {right:.3g}), and the CPU was used in {with_cpu:,} of them."
    )


def verdicts(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which run was fastest, among those of each workload, and whether tokens are the same."""
    by_workload: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_workload.setdefault(run["workload_sha256"], []).append(run)
    sentences = [*map(fastest, by_workload.values()), same_outputs(runs)]
    return [sentence for sentence in sentences if sentence]


def fastest(runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Which of some runs of one workload generated the most tokens per second; None where there is
    nothing to compare."""
    rated = [run for run in runs if run["output_tokens_per_s"]]
    if len(rated) < 2:
        return None
    first, *others = sorted(rated, key=lambda run: run["output_tokens_per_s"], reverse=True)
    ratios = ", ".join(
        f"{first['output_tokens_per_s'] / run['output_tokens_per_s']:.2f} times {label(run)}"
        for run in others
    )
    rate = f"{first['output_tokens_per_s']:.1f} output tokens/s"
    few = f": {ratios}" if len(others) <= 4 else ""
    found = f"Fastest: {label(first)} with {rate}{few}."
    uses_cpu = any(run["policy"] != "gpu_only" for run in rated)
    if uses_cpu and all(run["cpu_token_share"] == 0 for run in rated):
        found += (
            " The CPU decoded nothing in any of them: these differences are not those of hybrid "
            "execution."
        )
    return found


def same_outputs(runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Whether runs of the same requests generated the same tokens, and which did not as most (as
    the first where no tokens are most runs'); None where it says nothing."""
    hashes = [run["outputs_sha256"] for run in runs]
    if len(runs) < 2 or None in hashes or any(run["sweep"] for run in runs):
        return None
    usual = max(hashes, key=hashes.count)
    others = [label(run) for run, digest in zip(runs, hashes, strict=True) if digest != usual]
    if not others:
        return f"All {len(runs)} runs generated the same tokens."
    return (
        "The runs did not all generate the same tokens (outputs_sha256 in summary.json): "
        f"{_and(others)} {'differs' if len(others) == 1 else 'differ'} from the other "
        f"{counted(len(runs) - len(others), 'run')}."
    )


def counted(count: int, noun: str) -> str:
    """A number and its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _pipeline(name: str) -> str:
    return _PIPELINES.get(name, f"with {name}")


def _events(count: int, what: str) -> str:
    if count == 0:
        return f"no request was {what}"
    return f"requests were {what} {'once' if count == 1 else f'{count:,} times'}"


def _and(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)
