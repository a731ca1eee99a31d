"""`report.html`: one file with everything in it, to open in a browser or to send to someone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from swiftapex.report import asked, plots
from swiftapex.report.files import RunResult
from swiftapex.report.metrics import DEFINITIONS
from swiftapex.report.table import duration
from swiftapex.report.timeline import CAPTIONS, pipeline_picture
from swiftapex.report.warnings import warnings
from swiftapex.report.words import label, verdicts, what_happened, why

_SAMPLES = 4
_DETAILED_RUNS = 12  # runs with plots of their own; a large sweep has more runs than that


@dataclass(frozen=True)
class FigureSection:
    """A paper's figure, at the top of a report. Tables are rows of texts, the first a header."""

    source: str
    about: str
    notes: Sequence[str]
    svg: str
    points_title: str
    points: Sequence[Sequence[str]]
    paper_against_measured: Sequence[Sequence[str]]


def write_report(
    path: Path,
    name: str,
    description: str,
    results: Sequence[RunResult],
    failures: Mapping[str, str],
    environment: Mapping[str, Any],
    config_text: str,
    figure: FigureSection | None = None,
    detailed: Sequence[RunResult] | None = None,
) -> None:
    """`failures`: run folder -> why it has no result. `config_text`: the resolved YAML.
    `detailed`: runs with plots of their own (None: the first ones)."""
    runs = [result.summary() for result in results]
    detailed = results[:_DETAILED_RUNS] if detailed is None else detailed
    loader = jinja2.PackageLoader("swiftapex.report", ".")
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    templates.filters |= {
        "label": label,
        "duration": duration,
        "number": _number,
        "percent": _percent,
    }
    text = templates.get_template("report.html.jinja").render(
        name=name,
        description=description,
        figure=figure,
        runs=runs,
        failures=failures,
        notes=_notes(results),
        summary_plots=_summary_plots(runs, results) if runs else [],
        verdicts=verdicts(runs),
        details=[_details(result) for result in detailed],
        hidden_runs=len(results) - len(detailed),
        samples=samples(results[:_DETAILED_RUNS]),
        definitions={**DEFINITIONS, **asked.DEFINITIONS},
        environment=environment,
        config_text=config_text,
    )
    path.write_text(text, encoding="utf-8")


def _notes(results: Sequence[RunResult]) -> list[tuple[str, str]]:
    """The engines' notes and the runs' warnings, each with the runs that it is of."""
    runs: dict[str, list[str]] = {}
    for result in results:
        for note in (*warnings(result), *result.notes):
            runs.setdefault(note, []).append(label(result.summary()))
    return [(", ".join(labels), note) for note, labels in runs.items()]


def samples(results: Sequence[RunResult]) -> list[tuple[str, list[tuple[str, str]]]]:
    """A few prompts, each with its distinct output texts and the runs that gave them."""
    chosen: dict[int, tuple[str, dict[str, list[str]]]] = {}
    for result in results:
        run = label(result.summary())
        for outcome in result.log.outcomes:
            if outcome.prompt is None or not outcome.completed or not outcome.text:
                continue
            if outcome.index not in chosen and len(chosen) == _SAMPLES:
                continue
            _, texts = chosen.setdefault(outcome.index, (outcome.prompt, {}))
            texts.setdefault(outcome.text, []).append(run)
    return [
        (prompt, [(", ".join(runs), text) for text, runs in texts.items()])
        for prompt, texts in chosen.values()
    ]


def _summary_plots(
    runs: Sequence[Mapping[str, Any]], results: Sequence[RunResult]
) -> list[tuple[str, str]]:
    found = [
        ("Throughput", plots.throughput(runs)),
        ("Pipelines used", plots.pipelines_used(runs)),
    ]
    for metric, title, short in (
        ("ttft_ms", "Time to first token (TTFT)", "TTFT"),
        ("tpot_ms", "Time per further token (TPOT)", "TPOT"),
        ("itl_ms", "Time between tokens", "inter-token latency"),
    ):
        if any(run[metric]["p50"] is not None for run in runs):
            found.append((title, plots.latency(runs, metric, short)))
    return [*found, ("Tokens over time", plots.tokens_over_time(results[:_DETAILED_RUNS]))]


def _details(result: RunResult) -> dict[str, Any]:
    """The section of one run."""
    pictured = [snapshot.pipeline for snapshot in result.snapshots]
    ran = dict.fromkeys(record.pipeline for record in result.log.iterations)
    return {
        "title": label(result.summary()),
        "words": what_happened(result.log.iterations),
        "why": " ".join(filter(None, (why(result.log.iterations), result.gpu_bound))),
        "plots": _run_plots(result),
        "pictures": [
            (CAPTIONS.get(s.pipeline, s.pipeline), plots.figure_svg(pipeline_picture(s)))
            for s in result.snapshots
        ],
        "without_picture": [pipeline for pipeline in ran if pipeline not in pictured],
    }


def _run_plots(result: RunResult) -> list[tuple[str, str]]:
    if not result.log.iterations:
        return []
    found = [
        ("Batch composition", plots.batch_composition(result)),
        ("Requests", plots.requests(result)),
        ("Block use", plots.block_use(result)),
    ]
    if plots.has_predictions(result):
        found.append(("Predicted against measured time", plots.prediction_error(result)))
    if any(record.candidates_us for record in result.log.iterations):
        found.append(("Strategies weighed", plots.choice(result)))
    return found


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"
