"""Runs an experiment file: `python -m swiftapex.run_experiment EXP.yaml`.

Exit code 0: done. 2: the file or the command line is wrong, nothing ran. 1: a run failed or was
interrupted; the finished ones are kept and reported. The last line printed is the result folder,
which is not left where no run began.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from swiftapex.backends import check_settings
from swiftapex.config.explain import nearest
from swiftapex.config.load import Experiment, RunPlan, load_experiment
from swiftapex.config.schema import PROFILE_WORDS
from swiftapex.core.errors import ConfigError, ModelLoadError, SwiftapexError, some_of
from swiftapex.core.trace import TraceRecorder
from swiftapex.engine.checks import check_supported, max_model_len
from swiftapex.engine.machine import lacking
from swiftapex.kv.sizing import kv_sizes
from swiftapex.measure import EngineFactory, make_engine, measure
from swiftapex.model.shard import check_divides
from swiftapex.model.source import open_model
from swiftapex.pipelines import PIPELINES, pipeline_class
from swiftapex.policies import FIXED_PREFIX, POLICIES, make_policy, run_uses_cpu
from swiftapex.profiler import store
from swiftapex.ray_runs import RayRuns
from swiftapex.report.environment import describe_environment
from swiftapex.report.files import (
    RunResult,
    create_folder,
    remove_folder,
    write_json,
    write_run,
    write_summary,
)
from swiftapex.report.table import results_table
from swiftapex.report.warnings import warnings
from swiftapex.workloads.build import check_workload

Measure = Callable[[RunPlan], tuple[RunResult, TraceRecorder]]


def main(arguments: Sequence[str] | None = None, factory: EngineFactory = make_engine) -> int:
    """Returns the exit code. `factory` makes the engines (tests give their own)."""
    options = _parser().parse_args(arguments)
    if options.verbose:
        logging.basicConfig(level=logging.INFO)
    try:
        experiment = load_experiment(options.experiment, options.set)
        check_runs(experiment)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        _print_plan(experiment, here=options.ray in (None, "local"))
        return 0
    iterations = experiment.config.trace.iterations
    with contextlib.ExitStack() as stack:
        run: Measure = partial(measure, traced_iterations=iterations, factory=factory)
        try:
            if options.ray is not None:
                ray_runs = RayRuns(options.ray, experiment.runs, iterations)
                stack.callback(ray_runs.close)
                run = ray_runs.result
            parents = (options.out / experiment.config.name, options.out)
            new = [parent for parent in parents if not parent.exists()]
            folder = create_folder(options.out, experiment.config.name)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"error: --out {options.out}: {error}", file=sys.stderr)
            return 2
        session = _Session(experiment, folder, run)
        session.describe(arguments if arguments is not None else sys.argv[1:])
        complete = session.run_all()
    if not session.has_results:
        remove_folder(folder, new)
        _say("no run began: no results are left")
        return 1
    session.report()
    print(folder)
    return 0 if complete else 1


def check_runs(experiment: Experiment) -> None:
    """ConfigError where a policy, a pipeline, a model, a workload or a profile cannot be what it
    says."""
    checked: list[Any] = []
    for plan in experiment.runs:
        where = f"{experiment.path}: runs.{plan.name}"
        _check_strategy(plan, where)
        if plan.workload not in checked:
            _check(partial(check_workload, plan.workload), str(experiment.path))
            checked.append(plan.workload)
        if plan.model not in checked:
            _check(partial(open_model, plan.model), f"{experiment.path}: model")
            checked.append(plan.model)
        _check(partial(_check_sizes, plan), where)


def _check_sizes(plan: RunPlan) -> None:
    source, engine = open_model(plan.model), plan.engine
    check_supported(engine)
    check_divides(source.shape, engine.tensor_parallel_size)
    length = max_model_len(engine, source.config.max_length)
    sizes = kv_sizes(source.config, source.dtype, engine, length, uses_cpu=True)
    if plan.peer is None:
        check_settings(engine, bool(sizes.cpu_blocks) and run_uses_cpu(plan))
        if engine.profile not in PROFILE_WORDS:
            store.read_any(Path(engine.profile))


def _check_strategy(plan: RunPlan, where: str) -> None:
    if plan.peer is not None:
        if plan.workload.warm_start:
            raise ConfigError(f"{where}.peer: it cannot begin with requests in progress: expected "
                              "a workload without warm_start")  # fmt: skip
        return
    policy = plan.policy
    if policy.startswith(FIXED_PREFIX):
        pipeline = policy.removeprefix(FIXED_PREFIX)
        _check_name("pipeline", pipeline, PIPELINES, where)
        if ":" in pipeline:  # the package's own exist, and loading one loads torch
            _check(partial(pipeline_class, pipeline), where)
    else:
        _check_name("policy", policy, POLICIES, where)
    _check(partial(make_policy, policy, plan.policy_args), where)


def _check_name(kind: str, name: str, known: Mapping[str, str], where: str) -> None:
    if ":" not in name and name not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(
            f"{where}.{kind}: {name!r}: expected one of {names}, or package.module:Class; "
            f"nearest known name: {nearest(name, known)}"
        )


def _check(action: Callable[[], Any], where: str) -> None:
    """Runs `action`; what it raises becomes a ConfigError that says where."""
    try:
        action()
    except (ConfigError, ModelLoadError) as error:
        raise ConfigError(f"{where}: {error}") from error


class _Session:
    """One experiment on its way: the results so far, and their folder."""

    def __init__(self, experiment: Experiment, folder: Path, measure: Measure) -> None:
        self._experiment = experiment
        self._folder = folder
        self._measure = measure
        self._results: list[RunResult] = []
        self._failures: dict[str, str] = {}
        self._environment: dict[str, Any] = {}
        self.has_results = False  # or a traceback, which somebody will want to read

    def describe(self, arguments: Sequence[str]) -> None:
        """Writes what is known before the first run."""
        config = self._experiment.resolved_yaml()
        (self._folder / "config.resolved.yaml").write_text(config, encoding="utf-8")
        self._environment = describe_environment() | {
            "arguments": list(arguments),
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "seeds": {plan.folder: plan.seed for plan in self._experiment.runs},
            "cpu_attention_kernels": {
                plan.folder: plan.engine.cpu.attention_kernel for plan in self._experiment.runs
            },
        }
        write_json(self._folder / "environment.json", self._environment)

    def run_all(self) -> bool:
        """Runs every run; False where one failed or Ctrl-C ended the experiment early."""
        total = len(self._experiment.runs)
        for number, plan in enumerate(self._experiment.runs, start=1):
            _say(f"run {number} of {total}: {plan.folder} (policy {plan.policy})")
            interrupted = self._try(plan)
            write_summary(self._folder, self._experiment.config.name, self._results, self._failures)
            if interrupted:
                _say("interrupted: keeping what finished")
                return False
        return not self._failures

    def report(self) -> None:
        """Writes `report.html` and prints the table."""
        from swiftapex.report.html import write_report  # matplotlib takes a second to load

        config = self._experiment.config
        write_report(
            self._folder / "report.html",
            config.name,
            config.description,
            self._results,
            self._failures,
            self._environment,
            self._experiment.resolved_yaml(),
        )
        if self._results:
            print(results_table([result.summary() for result in self._results]))
            print()
        print(f"Plots, sample outputs and definitions: {self._folder / 'report.html'}")

    def _try(self, plan: RunPlan) -> bool:
        """Runs one run and notes its result or its failure; True where Ctrl-C ended it."""
        try:
            result = self._run(plan)
        except KeyboardInterrupt:
            self._failures[plan.folder] = "interrupted before its first iteration"
            return True
        except Exception as error:
            known = isinstance(error, SwiftapexError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self.has_results |= not known
            text = "".join(traceback.format_exception(error))
            (self._folder / plan.folder / "error.txt").write_text(text, encoding="utf-8")
            self._fail(plan, reason, "" if known else f" (where: {plan.folder}/error.txt)")
            return False
        outcomes, error_text = result.log.outcomes, result.log.error
        if error_text is None and outcomes and all(outcome.failed for outcome in outcomes):
            error_text = f"every request failed; the first: {outcomes[0].error}"
        if error_text is not None:
            self._fail(plan, error_text)
        else:
            self._results.append(result)
            _warn(result)
        return result.log.interrupted

    def _run(self, plan: RunPlan) -> RunResult:
        folder = self._folder / plan.folder
        folder.mkdir()
        result, trace = self._measure(plan)
        self.has_results = True
        write_run(folder, result)
        trace.write(folder / "trace.json")
        return result

    def _fail(self, plan: RunPlan, reason: str, where: str = "") -> None:
        self._failures[plan.folder] = reason
        _say(f"error: run {plan.folder} failed: {reason}{where}")


def _warn(result: RunResult) -> None:
    for sentence in warnings(result):
        _say(f"warning: run {result.plan.folder}: {sentence}")
    failed = [outcome for outcome in result.log.outcomes if outcome.failed]
    if failed:
        first = f"request {failed[0].index}: {failed[0].error}"
        _say(f"{len(failed)} of {len(result.log.outcomes)} requests failed; the first, {first}")


def _print_plan(experiment: Experiment, here: bool) -> None:
    """`here`: whether it would run on this machine, so that what is lacking counts."""
    print(f"{experiment.path} is valid. It would run:")
    for plan in experiment.runs:
        print(f"  {plan.folder}: policy {plan.policy}")
    for what, names in _lacking(experiment.runs).items() if here else ():
        some = f"run{'s' * (len(names) > 1)} {some_of(names, 4)}"
        of = some if len(names) < len(experiment.runs) else "every run"
        print(f"On this machine it would fail ({of}): {what}")
    print("Nothing was run (--dry-run).")


def _lacking(plans: Sequence[RunPlan]) -> dict[str, list[str]]:
    """What this machine lacks, and for which runs."""
    found: dict[str, list[str]] = {}
    for plan in plans:
        if plan.peer is None:
            for what in lacking(open_model(plan.model), plan.engine, run_uses_cpu(plan)):
                found.setdefault(what, []).append(plan.folder)
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m swiftapex.run_experiment",
        description="Run an experiment file and write its results to DIR/NAME/TIMESTAMP.",
    )
    parser.add_argument("experiment", type=Path, metavar="EXP.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="put a value over the file's, such as engine.block_size=16 or runs.neo.policy=apex",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR", help="default: results"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster, a GPU for each run on cuda, a machine for others; "
        "'local' starts Ray here",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, run nothing")
    parser.add_argument(
        "--verbose", action="store_true", help="log sizes, threads and what was recorded"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
