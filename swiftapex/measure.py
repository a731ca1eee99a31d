"""One run of an experiment, from its plan to its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from swiftapex.config.load import RunPlan
from swiftapex.core.trace import TraceRecorder
from swiftapex.peers.run import measure_peer
from swiftapex.report.files import RunResult
from swiftapex.report.progress import ProgressBar
from swiftapex.report.snapshots import take_snapshots
from swiftapex.workloads.build import build_workload
from swiftapex.workloads.energy import energy_meter
from swiftapex.workloads.replay import RunLog, replay

if TYPE_CHECKING:
    from swiftapex.engine.engine import Engine
    from swiftapex.engine.stats import EngineStats

EngineFactory = Callable[[RunPlan, TraceRecorder], "Engine"]


def make_engine(plan: RunPlan, trace: TraceRecorder) -> Engine:
    """The engine of one run. Loads torch."""
    from swiftapex.engine.engine import Engine

    return Engine(
        plan.model,
        plan.engine,
        policy=plan.policy,
        policy_args=plan.policy_args,
        seed=plan.seed,
        trace=trace,
    )


def measure(
    plan: RunPlan,
    traced_iterations: int,
    factory: EngineFactory = make_engine,
    with_progress: bool = True,
) -> tuple[RunResult, TraceRecorder]:
    """Sends the run's workload through an engine of its own. Raises what ends the run early, but
    for Ctrl-C while requests run: the result then says that it was interrupted. Another engine
    (`plan.peer`) gets the same requests, and leaves no trace."""
    if plan.peer is not None:
        return measure_peer(plan), TraceRecorder(0)
    trace = TraceRecorder(traced_iterations)
    engine = factory(plan, trace)
    try:
        items = build_workload(plan.workload, plan.seed, engine.model_config.vocab_size)
        with ProgressBar(len(items)) if with_progress else nullcontext() as bar:
            show = bar.update if bar else lambda _: None
            log = replay(engine, items, plan.workload, show, energy_meter(plan.engine))
        stats = engine.stats()
    finally:
        engine.close()
    return run_result(plan, log, engine, stats, trace), trace


def run_result(
    plan: RunPlan, log: RunLog, engine: Engine, stats: EngineStats, trace: TraceRecorder
) -> RunResult:
    """What a run gave, which `engine` had served; it may be closed since `stats` were taken."""
    totals = stats.gpu_blocks_total, stats.cpu_blocks_total
    pictures = take_snapshots(trace)
    return RunResult(plan, log, *totals, pictures, engine.notes, engine.gpu_bound)
