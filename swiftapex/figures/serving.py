"""Points of a figure that are runs of an experiment. Runs that differ in policy and workload alone
share an engine: a CPU pool of tens of GiB takes longer to set up than a point takes to measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftapex.config.load import RunPlan, expand_experiment
from swiftapex.config.overrides import with_value
from swiftapex.core.errors import ConfigError
from swiftapex.core.trace import TraceRecorder
from swiftapex.figures.spec import FigureConfig, PointConfig, X
from swiftapex.measure import EngineFactory, make_engine
from swiftapex.peers.run import measure_peer
from swiftapex.policies import make_policy
from swiftapex.report.files import RunResult
from swiftapex.report.snapshots import take_snapshots
from swiftapex.run_experiment import check_runs
from swiftapex.workloads.build import build_workload
from swiftapex.workloads.energy import energy_meter
from swiftapex.workloads.replay import replay

_PICTURED = 6  # iterations after a measured window, traced for a picture of the pipelines


@dataclass(frozen=True)
class PlannedPoint:
    """A run and the places where its result belongs. `engine_key`: runs that can share an engine
    have the same."""

    series: str
    xs: tuple[X, ...]
    plan: RunPlan
    engine_key: str


def plan_points(figure: FigureConfig, path: Path) -> list[PlannedPoint]:
    """All runs of a figure, those of one engine in a row; runs that are alike are one. `path`: the
    figure's file. ConfigError where something in it is wrong."""
    assert figure.experiment is not None
    found: dict[str, PlannedPoint] = {}
    for number, point in enumerate(figure.points):
        for run in _runs(figure, point, path):
            planned = _planned(run, point.x, number)
            identity = f"{run.name} {planned.engine_key} {_identity(run)}"
            known = found.setdefault(identity, planned)
            if known is not planned:
                found[identity] = replace(known, xs=(*known.xs, point.x))
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
        """One run; afterwards a few traced iterations, where it left requests open."""
        plan = planned.plan
        if plan.peer is not None:
            self.close()  # it may need the memory
            self.trace = TraceRecorder(0)
            return measure_peer(plan)
        engine = self._engine_for(planned)
        items = build_workload(plan.workload, plan.seed, engine.model_config.vocab_size)
        log = replay(engine, items, plan.workload, energy=energy_meter(plan.engine))
        stats = engine.stats()
        if log.error is None and not log.interrupted:
            self.trace.restart(_PICTURED)
            for _ in range(_PICTURED):
                if engine.has_work:
                    engine.step()
        totals = stats.gpu_blocks_total, stats.cpu_blocks_total
        return RunResult(plan, log, *totals, take_snapshots(self.trace), engine.notes)

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


def _runs(figure: FigureConfig, point: PointConfig, path: Path) -> Iterator[RunPlan]:
    """A point's runs. ConfigError where one is wrong, or settings are for none."""
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
            for key, setting in (*point.set.items(), *point.per_run.get(name, {}).items()):
                data = with_value(data, key, setting)
            experiment = expand_experiment(data, path)
            check_runs(experiment)
            yield from experiment.runs


def _planned(run: RunPlan, x: X, number: int) -> PlannedPoint:
    uses_cpu = run.peer is None and make_policy(run.policy, run.policy_args).uses_cpu
    engine = run.engine.model_dump(mode="json")
    if not uses_cpu and run.engine.device == "cuda":
        del engine["cpu"]  # it has no part in such a run
    key = json.dumps([run.model.model_dump(mode="json"), engine, uses_cpu], sort_keys=True)
    folder = f"{run.folder}__{number}"
    return PlannedPoint(run.name, (x,), replace(run, folder=folder, sweep={"x": x}), key)


def _identity(run: RunPlan) -> str:
    settings = [run.policy, dict(run.policy_args), run.workload.model_dump(mode="json"), run.seed]
    return json.dumps(settings, sort_keys=True)
