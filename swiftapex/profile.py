"""Shows what work costs on this machine, and measures it anew: `python -m swiftapex.profile`.

    python -m swiftapex.profile EXP.yaml [--run NAME] [--set KEY.PATH=VALUE] [--redo]
    python -m swiftapex.profile --model llama2-7b --device cuda [--set engine.gpu.sm_count=8]

Looks for the profile of exactly this model, engine and machine, and measures it where there is
none, or with --redo in any case. Of a file's runs it takes the one of --run, else the first that
uses the CPU; runs that do not use it have a profile of their own. Prints its tables, says which of
them noise has spoilt, and draws them beside it. Exit code 0: done; 2: the file or the command line
is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftapex.config.load import RunPlan, load_experiment, parse_section
from swiftapex.config.overrides import parse_assignment, with_value
from swiftapex.config.schema import EngineConfig, ModelSection
from swiftapex.core.errors import ConfigError, ModelLoadError
from swiftapex.costs.doubts import REMEDY, doubts
from swiftapex.costs.tables import Grid, Line, Tables
from swiftapex.policies import run_uses_cpu
from swiftapex.profiler import store

if TYPE_CHECKING:
    from swiftapex.engine.engine import Engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check_picture(options.draw)
        model, engine, policy, policy_args, words = _subject(options)
        print("".join(f"{line}\n" for line in words), end="", flush=True)
        standing = _engine(model, engine, policy, policy_args)
    except (ConfigError, ModelLoadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        profiled = standing.profiled
        fingerprint = profiled.fingerprint()
        found = None if options.redo else store.find(profiled.folder, fingerprint)
        if found is None:
            found = profiled.measure()
    finally:
        standing.close()
    path = store.path_of(profiled.folder, found.fingerprint)
    print("\n".join(_lines(found)))
    doubtful = doubts(found.tables)
    if doubtful:
        print("\n".join(["disturbed:", *(f"  {doubt}" for doubt in doubtful), f"  {REMEDY}"]))
    picture = options.draw or path.with_suffix(".svg")
    from swiftapex.profiler.draw import draw  # matplotlib takes a second to load

    draw(found.tables, _title(found.fingerprint), picture)
    print(f"curves: {picture}")
    print(path)
    return 0


def _check_picture(path: Path | None) -> None:
    """ConfigError for a type that cannot be drawn, before anything is measured."""
    if path is None:
        return
    from swiftapex.profiler.draw import formats

    if path.suffix.removeprefix(".") not in formats():
        raise ConfigError(f"--draw {path}: expected a file of type {', '.join(formats())}")


def _engine(
    model: ModelSection, engine: EngineConfig, policy: str, policy_args: Mapping[str, Any]
) -> Engine:
    """Loads torch. It is profiled here, not by itself."""
    from swiftapex.engine.engine import Engine

    quiet = engine.model_copy(update={"profile": "off"})
    return Engine(model, quiet, policy=policy, policy_args=policy_args)


def _subject(
    options: argparse.Namespace,
) -> tuple[ModelSection, EngineConfig, str, Mapping[str, Any], list[str]]:
    """Model, engine, policy and its arguments: of a run of the experiment (the named one, or the
    first that uses the CPU side), or of the command line. With lines that say which run it is."""
    if (options.experiment is None) == (options.model is None):
        raise ConfigError("expected either an experiment file or --model")
    if options.experiment is not None:
        runs = load_experiment(options.experiment, options.set).runs
        runs = tuple(run for run in runs if run.peer is None)
        chosen = [run for run in runs if options.run in (None, run.name)]
        if not chosen:
            names = (
                ", ".join(dict.fromkeys(run.name for run in runs)) or "no engine of this package"
            )
            raise ConfigError(f"--run {options.run}: expected one of {names}")
        run = next(filter(run_uses_cpu, chosen), chosen[0])
        words = _words(options.experiment, run, runs)
        return run.model, run.engine, run.policy, run.policy_args, words
    is_path = options.model.startswith("package:") or Path(options.model).exists()
    data: dict[str, Any] = {"engine": {"device": options.device}}
    data["model"] = (
        {"path": options.model}
        if is_path
        else {"architecture": options.model, "weights": "dummy", "dtype": options.dtype}
    )
    for assignment in options.set:
        data = with_value(data, *parse_assignment(assignment))
    return (
        parse_section(ModelSection, data["model"], "model"),
        parse_section(EngineConfig, data["engine"], "engine"),
        "model_based",
        {},
        [],
    )


def _words(path: Path, run: RunPlan, runs: Sequence[RunPlan]) -> list[str]:
    """Which run's profile it is, and which runs have another one for what they do not use."""
    uses_cpu = run_uses_cpu(run)
    others = list(dict.fromkeys(other.name for other in runs if run_uses_cpu(other) != uses_cpu))
    which = "uses" if uses_cpu else "does not use"
    lines = [f"run {run.folder} of {path}, which {which} the CPU"]
    if others:
        do = "do not" if uses_cpu else "do"
        lines += [f"runs that {do} have a profile of their own: --run {', '.join(others)}"]
    return lines


def _title(fingerprint: Mapping[str, Any]) -> str:
    model, gpu, cpu = fingerprint["model"], fingerprint["gpu"], fingerprint["cpu"]
    sms = f", {gpu['sm_count']} multiprocessors" if gpu["sm_count"] else ""
    threads = ", ".join(f"{count} threads ({side} side)" for side, count in cpu["threads"].items())
    return (
        f"{model['family']}, {model['num_layers']} layers, hidden {model['hidden_size']}, "
        f"{fingerprint['dtype']}; {gpu['name']}{sms}; {cpu['model']}, {threads}"
    )


def _lines(profile: store.Profile) -> list[str]:
    """The tables in words and numbers."""
    tables = profile.tables
    return [
        _title(profile.fingerprint),
        f"measured in {profile.seconds:.1f} s; µs of one layer where nothing else is said",
        *_line("linear stages over rows", tables.linear),
        *_line("iteration besides its layers, over completing rows", tables.iteration),
        *_line("hand-off of rows to the CPU", tables.hand_off),
        *_line("a layer launched by itself, beside one of a recorded pass", tables.layerwise),
        *_line("copy between the sides (all layers) over tokens", tables.copy),
        *_grid("GPU decode attention", "requests", "tokens", tables.gpu_attention),
        *_grid("prefill attention", "chunk", "prefix", tables.prefill_attention),
        *_grid("CPU decode attention", "requests", "tokens", tables.cpu_attention),
        *_host(tables),
    ]


def _line(name: str, line: Line) -> list[str]:
    if not line.xs:
        return []
    pairs = zip(line.xs, line.us, strict=True)
    return [f"{name}:", "  " + "  ".join(f"{x:g}: {us:.1f}" for x, us in pairs)]


def _grid(name: str, across: str, along: str, grid: Grid) -> list[str]:
    if not grid.xs:
        return []
    lines = [f"{name}, {along} " + "  ".join(f"{y:g}" for y in grid.ys) + ":"]
    for x, row in zip(grid.xs, grid.us, strict=True):
        shown = "  ".join("-" if us is None else f"{us:.1f}" for us in row)
        lines.append(f"  {across} {x:g}: {shown}")
    return lines


def _host(tables: Tables) -> list[str]:
    if not tables.host_us:
        return []
    pairs = "  ".join(f"{kind}: {us:.0f}" for kind, us in tables.host_us.items())
    return [f"host's time to launch an iteration: {pairs}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m swiftapex.profile",
        description="Show, or measure anew, what work costs on this machine.",
    )
    parser.add_argument("experiment", type=Path, nargs="?", metavar="EXP.yaml")
    parser.add_argument("--model", help="an architecture (with dummy weights) or a model's path")
    parser.add_argument("--device", default="cpu", help="with --model; default: cpu")
    parser.add_argument("--dtype", default="auto", help="with --model and an architecture")
    parser.add_argument(
        "--run",
        help="which run of the experiment; default: the first that uses the CPU "
        "(runs that leave it out have a profile of their own)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    parser.add_argument("--redo", action="store_true", help="measure even if there is a profile")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="where the curves go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
