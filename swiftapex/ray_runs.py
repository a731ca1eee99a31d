"""Runs of an experiment as tasks of a Ray cluster: `run_experiment --ray ADDRESS`.

A run on `cuda` gets a GPU to itself and the cores that fall to it on its machine; one on another
device gets a machine to itself, since it computes with all its cores. Ranks of tensor parallelism,
which divide a machine's cores among them, wait until nothing else runs. So every run measures what
it would measure alone, but for what machines share beyond that (memory bandwidth of the host).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from swiftapex.config.load import RunPlan
from swiftapex.core.errors import ConfigError, EngineError
from swiftapex.core.trace import TraceRecorder
from swiftapex.report.files import RunResult


class RayRuns:
    """Starts all runs as soon as there is room for them; those of ranks once their result is asked
    for and the others have ended. `address`: of a cluster, or `local` to
    start Ray here. Its machines need this package, and files under the same paths."""

    def __init__(self, address: str, plans: Sequence[RunPlan], traced_iterations: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray: pip install 'swiftapex[tp]' ({error})") from error
        self._ray = ray
        ranks = max(plan.engine.tensor_parallel_size for plan in plans)
        # Without Ray at hand ranks may outnumber the CPUs, too: they take turns then.
        here = {"num_cpus": max(ranks, os.cpu_count() or 1)} if address == "local" else {}
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **here)
        except Exception as error:
            raise ConfigError(f"--ray {address}: {error}") from error
        self._traced_iterations = traced_iterations
        self._started: dict[str, Any] = {}
        try:
            for plan in plans:
                options = self._resources(plan)
                if plan.engine.tensor_parallel_size == 1:
                    self._start(plan, options)
        except BaseException:
            self.close()
            raise

    def result(self, plan: RunPlan) -> tuple[RunResult, TraceRecorder]:
        """Waits for a run. Raises what ended it."""
        if plan.folder not in self._started:
            others = list(self._started.values())
            if others:
                self._ray.wait(others, num_returns=len(others), fetch_local=False)
            self._start(plan, self._resources(plan))
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

    def _start(self, plan: RunPlan, options: dict[str, Any]) -> None:
        share = options.pop("share")
        task = self._ray.remote(max_retries=0)(_measure).options(**options)
        self._started[plan.folder] = task.remote(plan, self._traced_iterations, share, sys.path)

    def _resources(self, plan: RunPlan) -> dict[str, Any]:
        """What a run's task asks for, and how many such runs share a machine (`share`)."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        machines = [node["Resources"] for node in nodes]
        if plan.engine.tensor_parallel_size > 1:
            return {"num_cpus": 0, "share": 1, "scheduling_strategy": self._room(plan, nodes)}
        if plan.engine.device != "cuda":
            return {"num_cpus": min(machine.get("CPU", 1) for machine in machines), "share": 1}
        gpus = [machine for machine in machines if machine.get("GPU", 0) >= 1]
        if not gpus:
            raise ConfigError(f"run {plan.folder} needs a GPU, and Ray has none")
        share = int(max(machine["GPU"] for machine in gpus))
        cores = min(machine.get("CPU", 1) // machine["GPU"] for machine in gpus)
        return {"num_gpus": 1, "num_cpus": max(1, cores), "share": share}

    def _room(self, plan: RunPlan, nodes: Sequence[Mapping[str, Any]]) -> Any:
        """On a machine that has room for all ranks, which ask for CPUs and GPUs themselves."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        size = plan.engine.tensor_parallel_size
        kinds = ("CPU", "GPU") if plan.engine.device == "cuda" else ("CPU",)
        for node in nodes:
            if all(node["Resources"].get(kind, 0) >= size for kind in kinds):
                return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        machines = "; ".join(
            ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}s" for kind in kinds)
            for node in nodes
        )
        raise ConfigError(
            f"run {plan.folder} needs a machine with {size} {'s and '.join(kinds)}s, one for each "
            f"rank; Ray's have {machines}"
        )


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
