"""A machine in simulated time: plans take what a cost model says. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from swiftapex.core.plan import CpuWork, StepPlan, SubBatch
from swiftapex.cost_model import CostModel, Load, asymmetric_us, gpu_only_us, overlap_us

_DONE = 1e-6  # of a layer: less than that is left by rounding


@dataclass(slots=True)
class _Cohort:
    """On its way through the layers."""

    load: Load
    request_ids: tuple[int, ...]
    layers_left: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of an iteration. `cpu_work`: what the CPU attended in it, hand-offs left out, as in
    `CostModel.cpu_attention_us` of rows that read one token each."""

    us: float
    completing: list[int]  # requests that gained a token
    in_flight: frozenset[int]
    cpu_work: CpuWork


class SimulatedMachine:
    """Carries out plans as workers do, as far as time and parked cohorts are concerned.

    A cohort starts in the pass after the one that forms it and advances by a layer in a pass, so
    that a token takes L + 1 of them. What sub-batches leave of the CPU's time is shared by all
    cohorts: where a visit of all of them takes longer, each advances by less than a layer. A pass
    without rows waits for the longest-submitted ticket. An iteration ends when its moves have.
    """

    def __init__(self, cost: CostModel, block_size: int) -> None:
        self.cost = cost
        self.block_size = block_size
        self._cohorts: list[_Cohort] = []
        self._dropped: set[int] = set()

    @property
    def in_flight(self) -> frozenset[int]:
        """Requests whose CPU decode is parked."""
        return frozenset(i for cohort in self._cohorts for i in cohort.request_ids)

    def execute(self, plan: StepPlan) -> Outcome:
        self._dropped.update(plan.dropped)
        layers = self.cost.num_layers
        parked, new = self._cohorts, [_cohort(batch, layers) for batch in plan.new_cohorts]
        self._cohorts = parked + new
        loads = [Load.of(batch.rows) for batch in plan.sub_batches]
        waits = not new and not any(load.rows for load in loads)
        layers_us = self.iteration_us(loads)
        if waits and parked:
            layers_us = max(layers_us, self._task_us(parked[0].load))
        tasks = [(load, float(layers)) for load in loads if load.cpu_requests]
        spare = layers_us - sum(count * self._task_us(load) for load, count in tasks)
        tasks += _advance(parked, max(0.0, spare), [self._task_us(c.load) for c in parked])
        done = [row.request_id for b in plan.sub_batches for row in b.rows if row.completes]
        for cohort in [each for each in parked if each.layers_left < _DONE]:
            self._cohorts.remove(cohort)
            done += [i for i in cohort.request_ids if i not in self._dropped]
            self._dropped.difference_update(cohort.request_ids)
        us = max(layers_us, self._copies_us(plan))
        return Outcome(us, done, self.in_flight, self._work(tasks))

    def iteration_us(self, loads: list[Load]) -> float:
        """Of these sub-batches and what is parked, moves left out."""
        cost, parked = self.cost, sum(cohort.load.rows for cohort in self._cohorts)
        if len(loads) > 1:
            riders = -(-parked // (cost.num_layers + 1))
            return asymmetric_us(cost, loads[0].with_rows(riders), loads[1])
        on_cpu = cost.num_layers * self._task_us(loads[0])  # nothing hides it
        if parked:
            return overlap_us(cost, loads[0], parked, len(self._cohorts)) + on_cpu
        return gpu_only_us(cost, loads[0]) + on_cpu

    def _task_us(self, load: Load) -> float:
        return self.cost.cpu_attention_us(load.cpu_tokens, load.cpu_requests)

    def _copies_us(self, plan: StepPlan) -> float:
        blocks = sum(len(move.source_blocks) for move in plan.moves)
        return self.cost.copy_us(blocks * self.block_size) if blocks else 0.0

    def _work(self, tasks: list[tuple[Load, float]]) -> CpuWork:
        us = count = rows = tokens = 0.0
        for load, layers in tasks:
            hand_off = self.cost.cpu_attention_us(load.cpu_requests, load.cpu_requests)
            us += layers * (self._task_us(load) - hand_off)
            count += layers
            rows += layers * load.cpu_requests
            tokens += layers * load.cpu_tokens
        return CpuWork(1e-6 * us, count, rows, tokens)


def _cohort(batch: SubBatch, layers: int) -> _Cohort:
    return _Cohort(Load.of(batch.rows), tuple(row.request_id for row in batch.rows), layers)


def _advance(
    cohorts: list[_Cohort], spare_us: float, tasks_us: list[float]
) -> list[tuple[Load, float]]:
    """Each by at most a layer; returns what the CPU attended to for that."""
    visit_us = sum(tasks_us)
    share = min(1.0, spare_us / visit_us) if visit_us > 0 else 1.0
    done = []
    for cohort in cohorts:
        layers = min(share, cohort.layers_left)
        cohort.layers_left -= layers
        done.append((cohort.load, layers))
    return done
