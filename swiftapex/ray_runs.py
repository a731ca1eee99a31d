"""Runs of an experiment as tasks of a Ray cluster: `run_experiment --ray ADDRESS`.

A run on `cuda` gets a GPU to itself and the cores that fall to it on its machine; one on another
device gets a machine to itself, since it computes with all its cores. So every run measures what
it would measure alone, but for what machines share beyond that (memory bandwidth of the host).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from swiftapex.config.load import RunPlan
from swiftapex.core.errors import ConfigError, EngineError
from swiftapex.core.trace import TraceRecorder
from swiftapex.report.files import RunResult


class RayRuns:
    """Starts all runs as soon as there is room for them. `address`: of a cluster, or `local` to
    start Ray here. Its machines need this package, and files under the same paths."""

    def __init__(self, address: str, plans: Sequence[RunPlan], traced_iterations: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray: pip install 'swiftapex[tp]' ({error})") from error
        self._ray = ray
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(f"--ray {address}: {error}") from error
        task = ray.remote(max_retries=0)(_measure)
        self._started: dict[str, Any] = {}
        try:
            for plan in plans:
                options = self._resources(plan)
                share = options.pop("share")
                started = task.options(**options).remote(plan, traced_iterations, share, sys.path)
                self._started[plan.folder] = started
        except BaseException:
            self.close()
            raise

    def result(self, plan: RunPlan) -> tuple[RunResult, TraceRecorder]:
        """Waits for a run. Raises what ended it."""
        try:
            found: tuple[RunResult, TraceRecorder] = self._ray.get(self._started[plan.folder])
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise EngineError(" ".join(str(error).split())[:400]) from error
        return found

    def close(self) -> None:
        """Ends what still runs."""
        for started in self._started.values():
            self._ray.cancel(started, force=True)
        self._ray.shutdown()

    def _resources(self, plan: RunPlan) -> dict[str, Any]:
        """What a run's task asks for, and how many such runs share a machine (`share`). Ranks of
        tensor parallelism ask for theirs themselves."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if plan.engine.tensor_parallel_size > 1:
            return {"num_cpus": 0, "share": 1}
        if plan.engine.device != "cuda":
            return {"num_cpus": min(machine.get("CPU", 1) for machine in machines), "share": 1}
        gpus = [machine for machine in machines if machine.get("GPU", 0) >= 1]
        if not gpus:
            raise ConfigError(f"run {plan.folder} needs a GPU, and Ray has none")
        share = int(max(machine["GPU"] for machine in gpus))
        cores = min(machine.get("CPU", 1) // machine["GPU"] for machine in gpus)
        return {"num_gpus": 1, "num_cpus": max(1, cores), "share": share}


def _measure(
    plan: RunPlan, traced_iterations: int, share: int, path: list[str]
) -> tuple[RunResult, TraceRecorder]:
    """On a machine of the cluster. path: the driver's `sys.path`. share: runs per machine."""
    import ray

    sys.path.extend(entry for entry in path if entry not in sys.path)
    from swiftapex.backends.threads import bind_rank
    from swiftapex.measure import measure

    if share > 1:
        bind_rank(int(ray.get_gpu_ids()[0]) % share, share)
    return measure(plan, traced_iterations, with_progress=False)
