"""A machine in simulated time, whose costs need not be those that a policy believes, nor the same
every time. Requests come in as others end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from harness import CPU, GPU, Harness, Worker

from swiftapex.core.plan import CpuWork, StepPlan
from swiftapex.cost_model import CostModel, Load
from swiftapex.costs.correction import CorrectedCostModel
from swiftapex.scheduler.draft import Limits
from swiftapex.simulation.machine import SimulatedMachine

BLOCK = 16


@dataclass(frozen=True)
class Traffic:
    """Requests that are always there, and the KV that there is for them."""

    gpu_blocks: int
    cpu_blocks: int
    live: int
    prompt: tuple[int, int]
    output: tuple[int, int]


class SlowerPairs(SimulatedMachine):
    """`overhead`: by what share two sub-batches take longer than their parts."""

    overhead = 0.0

    def iteration_us(self, loads: list[Load]) -> float:
        return super().iteration_us(loads) * (1 + self.overhead * (len(loads) - 1))


class Machine(Worker):
    """Checks plans. `noise`: standard deviation of the logarithm of an iteration's time and of its
    attention's."""

    def __init__(
        self, limits: Limits, truth: CostModel, noise: float, overhead: float, seed: int
    ) -> None:
        super().__init__(limits, BLOCK, random.Random(seed))
        self.noise = noise
        self._machine = SlowerPairs(truth, BLOCK)
        self._machine.overhead = overhead
        self.us = 0.0  # of the last iteration
        self.work = CpuWork(0, 0, 0, 0)  # of the last iteration
        self.tokens = 0  # that it completed

    def takes(self, truth: CostModel) -> None:
        """From now on work takes what `truth` says."""
        self._machine.cost = truth

    @property
    def in_flight(self) -> frozenset[int]:
        return self._machine.in_flight

    def execute(self, plan: StepPlan) -> tuple[list[int], frozenset[int]]:
        self._apply(plan, self.in_flight)
        for move in plan.moves:
            self.tables[move.request_id] = (move.target, list(move.target_blocks))
        outcome = self._machine.execute(plan)
        self.us = outcome.us * self._disturbed()
        busy_s = outcome.cpu_work.busy_s * self._disturbed()
        self.work = outcome.cpu_work._replace(busy_s=busy_s)
        self.tokens = len(outcome.completing)
        return outcome.completing, outcome.in_flight

    def _disturbed(self) -> float:
        return math.exp(self.rng.gauss(0, self.noise))


@dataclass
class Simulation:
    """Requests under a policy that plans with `believed` on a machine that takes what `truth` says.
    `believed` learns of each iteration where it is a CorrectedCostModel."""

    traffic: Traffic
    truth: CostModel
    believed: CostModel
    policy: str = "model_based"
    noise: float = 0.0
    overhead: float = 0.0
    seed: int = 0
    pipelines: list[str] = field(default_factory=list)  # of each iteration

    def __post_init__(self) -> None:
        t = self.traffic
        self._harness = harness = Harness(
            t.gpu_blocks, BLOCK, 256, 2048, policy=self.policy, cpu_blocks=t.cpu_blocks,
            staging_blocks=256, cost=self.believed, seed=self.seed,
        )  # fmt: skip
        self.machine = Machine(harness.limits, self.truth, self.noise, self.overhead, self.seed)
        harness.worker = self.machine
        self._rng = random.Random(self.seed)
        while len(harness.live) < t.live:
            self._add(in_progress=True)

    def run(self, iterations: int) -> float:
        """Tokens per ms over these iterations."""
        us = tokens = 0.0
        self.pipelines.clear()
        for _ in range(iterations):
            while len(self._harness.live) < self.traffic.live:
                self._add()
            plan = self._harness.step()
            self.pipelines.append(plan.pipeline)
            if isinstance(self.believed, CorrectedCostModel):
                self.believed.observe(plan, self.machine.us, self.machine.work)
            us, tokens = us + self.machine.us, tokens + self.machine.tokens
        return 1e3 * tokens / us

    def _add(self, in_progress: bool = False) -> None:
        output = self._rng.randint(*self.traffic.output)
        request = self._harness.add(self._rng.randint(*self.traffic.prompt), output)
        assert request is not None
        state = self._harness.state
        if not in_progress or self._harness.queue.num_waiting > 1:
            return
        request.output_ids.extend([0] * self._rng.randrange(1, output))
        request.num_computed = request.num_tokens - 1
        for side in (GPU, CPU):
            if state.can_start(request, side):
                state.start(request, side)
                return
        request.output_ids.clear()
        request.num_computed = 0
