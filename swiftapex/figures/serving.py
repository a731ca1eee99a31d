"""Points of a figure that are runs of an experiment. Runs that differ in policy and workload alone
share an engine: a CPU pool of tens of GiB takes longer to set up than a point takes to measure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swiftapex.config.load import RunPlan, expand_experiment
from swiftapex.config.overrides import with_value
from swiftapex.config.schema import WindowConfig
from swiftapex.core.errors import ConfigError
from swiftapex.core.trace import TraceRecorder
from swiftapex.figures.spec import FigureConfig, PointConfig, X
from swiftapex.measure import EngineFactory, make_engine, run_result
from swiftapex.peers.run import measure_peer
from swiftapex.policies import run_uses_cpu
from swiftapex.report.files import RunResult
from swiftapex.run_experiment import check_runs
from swiftapex.workloads.build import build_workload
from swiftapex.workloads.energy import energy_meter
from swiftapex.workloads.replay import Progress, replay

_PICTURED = 6  # iterations of a run, traced for a picture of the pipelines


@dataclass(frozen=True)
class PlannedPoint:
    """A run and the places where its result belongs. `engine_key`: runs that can share an engine
    have the same. `settings`: by place, what is put over the experiment there."""

    series: str
    xs: tuple[X, ...]
    plan: RunPlan
    engine_key: str
    settings: Mapping[X, Mapping[str, Any]] = field(default_factory=dict)

    def settings_at(self, x: X) -> dict[str, Any]:
        """What a reader needs to tell a point's measurement from another's. Plain values."""
        workload = self.plan.workload.model_dump(mode="json", exclude_none=True)
        return {
            "seed": self.plan.seed,
            "policy_args": dict(self.plan.policy_args),
            "model": self.plan.model.model_dump(mode="json", exclude_none=True),
            "max_model_len": self.plan.engine.max_model_len,
            "workload": workload,
            "set": dict(self.settings.get(x, {})),
        }


def plan_points(figure: FigureConfig, path: Path) -> list[PlannedPoint]:
    """All runs of a figure, those of one engine in a row; runs that are alike are one. `path`: the
    figure's file. ConfigError where something in it is wrong."""
    assert figure.experiment is not None
    found: dict[str, PlannedPoint] = {}
    for number, point in enumerate(figure.points):
        for run, settings in _runs(figure, point, path):
            planned = _planned(run, point.x, number, settings)
            identity = f"{run.name} {planned.engine_key} {_identity(run)}"
            known = found.setdefault(identity, planned)
            if known is not planned:
                both = {**known.settings, **planned.settings}
                found[identity] = replace(known, xs=(*known.xs, point.x), settings=both)
    engines = list(dict.fromkeys(planned.engine_key for planned in found.values()))
    return sorted(found.values(), key=lambda planned: engines.index(planned.engine_key))


class ServingBench:
    """Measures runs one after the other, with one engine at a time."""

    def __init__(self, factory: EngineFactory = make_engine) -> None:
        self._factory = factory
        self._engine: Any = None
        self._key = ""
        self.trace = TraceRecorder(0)

    def measure(self, planned: PlannedPoint) -> RunResult:
        """One run, and a few traced iterations, which are outside of its window: behind it, where
        that left requests open, and once the last request of a middle share has ended. A run that
        is measured whole has them at its middle and later, two dozen at most: on a GPU, those are
        launched without graphs and waited for."""
        plan = planned.plan
        if plan.peer is not None:
            self.close()  # it may need the memory
            self.trace = TraceRecorder(0)
            return measure_peer(plan)
        engine = self._engine_for(planned)
        items = build_workload(plan.workload, plan.seed, engine.model_config.vocab_size)
        starter = _TraceStarter(self.trace, _ended_before_trace(plan.workload.window, len(items)))
        log = replay(engine, items, plan.workload, starter.look, energy_meter(plan.engine))
        stats = engine.stats()
        if log.error is None and not log.interrupted and engine.has_work:
            self.trace.restart(_PICTURED)
            for _ in range(_PICTURED):
                if engine.has_work:
                    engine.step()
        return run_result(plan, log, engine, stats, self.trace)

    def close(self) -> None:
        engine, self._engine, self._key = self._engine, None, ""
        if engine is not None:
            engine.close()

    def _engine_for(self, planned: PlannedPoint) -> Any:
        if self._key == planned.engine_key:
            self._engine.reuse(planned.plan.policy, planned.plan.policy_args)
        else:
            self.close()
            self.trace = TraceRecorder(0)
            self._engine = self._factory(planned.plan, self.trace)
            self._key = planned.engine_key
        self.trace.restart(0)
        return self._engine


class _TraceStarter:
    """Begins to trace a replay once so many of its requests have ended (None: never)."""

    def __init__(self, trace: TraceRecorder, ended: int | None) -> None:
        self._trace, self._ended = trace, ended

    def look(self, progress: Progress) -> None:
        """After every iteration."""
        if self._ended is not None and progress.ended >= self._ended:
            self._trace.restart(_PICTURED)
            self._ended = None


def _ended_before_trace(window: WindowConfig | None, num_requests: int) -> int | None:
    """None: a window of seconds, which leaves requests open."""
    if window is None:
        return num_requests // 2
    return None if window.middle is None else window.middle_requests(num_requests)[1]


def _runs(
    figure: FigureConfig, point: PointConfig, path: Path
) -> Iterator[tuple[RunPlan, dict[str, Any]]]:
    """A point's runs, each with what is put over the experiment for it.
    ConfigError where one is wrong, or settings are for none."""
    names = [str(run.get("name")) for run in figure.runs]
    strangers = {*point.per_run, *(point.only or ())} - {*names}
    if strangers:
        known = ", ".join(names)
        raise ConfigError(f"{path}: points: no run {sorted(strangers)[0]!r}; known: {known}")
    for name, run in zip(names, figure.runs, strict=True):
        if point.only is None or name in point.only:
            data: dict[str, Any] = {"name": figure.figure.replace("/", "-")}
            data |= figure.experiment or {}
            data["runs"] = [dict(run)]
            own = point.per_run.get(name, {})
            for key, setting in (*point.set.items(), *own.items()):
                data = with_value(data, key, setting)
            experiment = expand_experiment(data, path)
            check_runs(experiment)
            for plan in experiment.runs:
                yield plan, {**point.set, **own}


def _planned(run: RunPlan, x: X, number: int, settings: Mapping[str, Any]) -> PlannedPoint:
    uses_cpu = run.peer is None and run_uses_cpu(run)
    engine = run.engine.model_dump(mode="json")
    if not uses_cpu and run.engine.device == "cuda":
        del engine["cpu"]  # it has no part in such a run
    key = json.dumps([run.model.model_dump(mode="json"), engine, uses_cpu], sort_keys=True)
    folder = f"{run.folder}__{number}"
    plan = replace(run, folder=folder, sweep={"x": x})
    return PlannedPoint(run.name, (x,), plan, key, {x: settings})


def _identity(run: RunPlan) -> str:
    settings = [run.policy, dict(run.policy_args), run.workload.model_dump(mode="json"), run.seed]
    return json.dumps(settings, sort_keys=True)
