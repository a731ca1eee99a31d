"""Measures a figure, point by point within its time budget, and writes what came of it."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from swiftapex.core.errors import ConfigError, SwiftapexError
from swiftapex.figures.draw import draw, save
from swiftapex.figures.notes import notes
from swiftapex.figures.points import OFF_BALANCE, Point, compare
from swiftapex.figures.serving import PlannedPoint, ServingBench, plan_points
from swiftapex.figures.spec import FigureConfig
from swiftapex.figures.tables import measured_points, paper_against_measured
from swiftapex.measure import EngineFactory, make_engine
from swiftapex.report.environment import describe_environment, gpus_of
from swiftapex.report.files import RunResult, create_folder, write_json, write_run, write_summary
from swiftapex.report.html import FigureSection, write_report
from swiftapex.report.plots import figure_svg
from swiftapex.report.table import text_table

TEXT = "figure.txt"  # what is printed, too


@dataclass
class Measured:
    """What a figure's measurement has so far. `failures`: run folder -> why it has no result."""

    points: list[Point] = field(default_factory=list)
    results: list[RunResult] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # for lack of time
    interrupted: bool = False
    seconds: float = 0.0


def reproduce(
    figure: FigureConfig,
    path: Path,
    out: Path,
    factory: EngineFactory = make_engine,
    arguments: Sequence[str] = (),
) -> tuple[Path, bool]:
    """The folder of the results, and whether every point is in them. `path`: the figure's file;
    `arguments`: of the command, for the record.

    ConfigError, before anything is measured, where the file is wrong or this machine lacks the
    device.
    """
    planned = [] if figure.experiment is None else plan_points(figure, path)
    num_gpus = _num_gpus(figure, planned)
    if num_gpus and factory is make_engine:
        _check_gpu()
    folder = create_folder(out, figure.figure.replace("/", "-"))
    environment = describe_environment() | {
        "arguments": list(arguments),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    environment["gpus_used"] = gpus_of(environment, num_gpus)
    measured = Measured()
    begin = time.perf_counter()
    try:
        if figure.kernels is not None:
            try:
                _measure_kernels(figure, measured, begin)
            except Exception as error:
                _fail("kernels", error, folder, measured)
        else:
            _measure_runs(figure, planned, factory, folder, measured, begin)
    except KeyboardInterrupt:
        measured.interrupted = True
    measured.seconds = time.perf_counter() - begin
    plans = [point.plan for point in planned]
    lines = [*notes(figure, plans, environment), *_what_is_missing(figure, measured)]
    _write(figure, folder, environment, lines, measured)
    complete = not (measured.failures or measured.left_out or measured.interrupted)
    return folder, complete


def _num_gpus(figure: FigureConfig, planned: Sequence[PlannedPoint]) -> int:
    """How many GPUs a figure's points take at most; peers see to theirs."""
    if figure.kernels is not None:
        return int(figure.kernels.device == "cuda")
    engines = [point.plan.engine for point in planned if point.plan.peer is None]
    return max((e.tensor_parallel_size for e in engines if e.device == "cuda"), default=0)


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "device cuda: no GPU here; --cpu measures a small variant on the processor"
        )


def _measure_kernels(figure: FigureConfig, measured: Measured, begin: float) -> None:
    from swiftapex.figures.kernels import measure_kernels  # loads torch

    assert figure.kernels is not None
    with contextlib.closing(measure_kernels(figure.kernels)) as points:
        for point in points:
            _say(f"{point.series} at {point.x}: {_seconds(begin):.0f} s of {figure.budget_s:g} s")
            measured.points.append(point)
            if _seconds(begin) > figure.budget_s:
                measured.left_out.append(f"what comes after {point.series} at {point.x}")
                return


def _measure_runs(
    figure: FigureConfig,
    planned: Sequence[PlannedPoint],
    factory: EngineFactory,
    folder: Path,
    measured: Measured,
    begin: float,
) -> None:
    bench = ServingBench(factory)
    try:
        for number, point in enumerate(planned, start=1):
            name = f"{point.series} at {', '.join(map(str, point.xs))}"
            if _seconds(begin) > figure.budget_s:
                measured.left_out.append(name)
                continue
            spent = f"{_seconds(begin):.0f} s of the budget's {figure.budget_s:g} s"
            _say(f"point {number} of {len(planned)}: {name}, {spent}")
            try:
                result = bench.measure(point)
            except Exception as error:  # whatever it is, the other points are worth having
                _fail(point.plan.folder, error, folder, measured)
                with contextlib.suppress(Exception):
                    bench.close()
                continue
            _keep(point, result, bench, folder, measured)
    finally:
        bench.close()


def _fail(name: str, error: Exception, folder: Path, measured: Measured) -> None:
    known = isinstance(error, SwiftapexError)
    measured.failures[name] = str(error) if known else f"{type(error).__name__}: {error}"
    text = "".join(traceback.format_exception(error))
    (folder / f"{name}.error.txt").write_text(text, encoding="utf-8")
    _say(f"error: {name}: {measured.failures[name]}")


def _keep(
    point: PlannedPoint, result: RunResult, bench: ServingBench, folder: Path, measured: Measured
) -> None:
    run_folder = folder / point.plan.folder
    run_folder.mkdir()
    write_run(run_folder, result)
    bench.trace.write(run_folder / "trace.json")
    log = result.log
    if log.error is not None or all(outcome.failed for outcome in log.outcomes):
        first = next((o.error for o in log.outcomes if o.error), None)
        measured.failures[point.plan.folder] = log.error or f"every request failed: {first}"
        bench.close()
        return
    measured.results.append(result)
    summary = result.summary()
    measured.points += [Point(point.series, x, summary, point.settings_at(x)) for x in point.xs]
    if log.interrupted:
        raise KeyboardInterrupt


def _write(
    figure: FigureConfig,
    folder: Path,
    environment: Mapping[str, Any],
    lines: Sequence[str],
    measured: Measured,
) -> None:
    comparisons = compare(figure, measured.points)
    picture = draw(figure, measured.points, lines)
    save(picture, folder)
    settings = yaml.safe_dump(figure.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / "figure.yaml").write_text(settings, encoding="utf-8")
    write_json(folder / "environment.json", environment)
    name = figure.figure.replace("/", "-")
    if measured.results:
        write_summary(folder, name, measured.results, measured.failures)
    table = paper_against_measured(comparisons)
    document = {
        "figure": figure.figure,
        "title": figure.title,
        "source": figure.source,
        "notes": lines,
        "budget_s": figure.budget_s,
        "seconds": round(measured.seconds, 1),
        "left_out": measured.left_out,
        "failures": measured.failures,
        "interrupted": measured.interrupted,
        "kernels": None if figure.kernels is None else figure.kernels.model_dump(mode="json"),
        "environment": environment,
        "paper_against_measured": [
            {
                "what": c.reported.what,
                "reported": c.reported.value,
                "measured": c.measured,
                "is_steady": c.is_steady,
                "places": c.places,
                "unit": c.reported.unit,
                "source": c.reported.source,
            }
            for c in comparisons
        ],
        "points": [
            {"series": p.series, "x": p.x, "settings": p.settings, **p.values}
            for p in measured.points
        ],
    }
    write_json(folder / "figure.json", document)
    points = measured_points(figure, measured.points)
    section = FigureSection(
        figure.source, figure.about, lines, figure_svg(picture), figure.y.label, points, table
    )
    write_report(
        folder / "report.html",
        f"{figure.figure}: {figure.title}",
        "",
        measured.results,
        measured.failures,
        environment,
        settings,
        section,
        list({result.plan.name: result for result in measured.results}.values()),  # one a series
    )
    head = f"{figure.figure}: {figure.title}\n{figure.y.label}:"
    text = "\n\n".join((head, text_table(points), text_table(table), "\n".join(lines)))
    (folder / TEXT).write_text(text + "\n", encoding="utf-8")
    print(text, "\n")


def _what_is_missing(figure: FigureConfig, measured: Measured) -> Iterator[str]:
    if measured.left_out:
        count = len(measured.left_out)
        yield f"Points left out, as the budget of {figure.budget_s:g} s was used up: {count}."
    off = sum(not point.is_steady for point in measured.points)
    if off:
        yield (
            f"Not in a steady state (pale or hollow, with a star): {off} of {len(measured.points)} "
            f"points, in whose windows prompts taken in and outputs given differ by more than "
            f"{OFF_BALANCE:.0%} (steady_balance)."
        )
    for folder, reason in measured.failures.items():
        yield f"Failed: {folder}: {reason}"


def _seconds(begin: float) -> float:
    return time.perf_counter() - begin


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
