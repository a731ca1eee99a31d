"""A machine in simulated time, whose costs need not be those that a policy believes. Requests come
in as others end; cohorts advance by a layer in a pass, or by less where the CPU is slower."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from harness import CPU, GPU, Harness, Worker

from swiftapex.core.plan import CpuWork, StepPlan
from swiftapex.cost_model import CostModel, Load, asymmetric_us, gpu_only_us, overlap_us
from swiftapex.costs.correction import CorrectedCostModel
from swiftapex.scheduler.draft import Limits

BLOCK = 16


@dataclass(frozen=True)
class Traffic:
    """Requests that are always there, and the KV that there is for them."""

    gpu_blocks: int
    cpu_blocks: int
    live: int
    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass
class Flight:
    """A cohort: its task in each layer, and how many layers are left."""

    load: Load
    layers_left: float
    ids: list[int]


class Machine(Worker):
    """`truth`: what work takes. `noise`: standard deviation of the logarithm of an iteration's time
    and of its attention's. `overhead`: by what share two sub-batches take longer than their parts.
    """

    def __init__(
        self, limits: Limits, truth: CostModel, noise: float, overhead: float, seed: int
    ) -> None:
        super().__init__(limits, BLOCK, random.Random(seed))
        self.truth, self.noise, self.overhead = truth, noise, overhead
        self.flights: list[Flight] = []
        self.us = 0.0  # of the last iteration
        self.work = CpuWork(0, 0, 0, 0)  # of the last iteration
        self.tokens = 0  # that it completed

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(i for flight in self.flights for i in flight.ids)

    def execute(self, plan: StepPlan) -> tuple[list[int], frozenset[int]]:
        self._apply(plan, self.in_flight)
        done = [r.request_id for b in plan.sub_batches for r in b.rows if r.completes]
        for move in plan.moves:
            self.tables[move.request_id] = (move.target, list(move.target_blocks))
        layers = self.truth.num_layers
        for cohort in plan.new_cohorts:
            ids = [row.request_id for row in cohort.rows]
            self.flights.append(Flight(Load.of(cohort.rows), layers, ids))
        self.work = CpuWork(0, 0, 0, 0)
        loads = [Load.of(batch.rows) for batch in plan.sub_batches]
        us = self._iteration_us(loads)
        spare = us
        for load in loads:
            spare -= layers * self._task_us(load)
            self._attend(load, layers)
        self._advance(max(0.0, spare))
        for flight in [each for each in self.flights if each.layers_left < 1e-6]:
            self.flights.remove(flight)
            done += [i for i in flight.ids if i not in self.dropped]
            self.dropped -= set(flight.ids)
        self.us = us * self._disturbed()
        self.tokens = len(done)
        return done, self.in_flight

    def _iteration_us(self, loads: list[Load]) -> float:
        cost, parked = self.truth, len(self.in_flight)
        if len(loads) == 2:
            riders = -(-parked // (cost.num_layers + 1))
            return asymmetric_us(cost, loads[0].with_rows(riders), loads[1]) * (1 + self.overhead)
        if not parked:
            return gpu_only_us(cost, loads[0])
        us = overlap_us(cost, loads[0], parked, len(self.flights))
        return us if loads[0].rows else max(us, self._task_us(self.flights[0].load))

    def _advance(self, spare_us: float) -> None:
        visit_us = sum(self._task_us(flight.load) for flight in self.flights)
        for flight in self.flights:
            layers = min(1.0, spare_us / visit_us, flight.layers_left)
            self._attend(flight.load, layers)
            flight.layers_left -= layers

    def _task_us(self, load: Load) -> float:
        return self.truth.cpu_attention_us(load.cpu_tokens, load.cpu_requests)

    def _attend(self, load: Load, tasks: float) -> None:
        """Attends for `tasks` layers; hand-offs are no part of what is measured."""
        if load.cpu_requests:
            rows, tokens = load.cpu_requests, load.cpu_tokens
            us = self._task_us(load) - self.truth.cpu_attention_us(rows, rows)
            more = (1e-6 * tasks * us * self._disturbed(), tasks, tasks * rows, tasks * tokens)
            self.work = CpuWork(*(a + b for a, b in zip(self.work, more, strict=True)))

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
