"""An engine without a model: carries out plans as workers do, with parked cohorts that take any
number of passes, and checks of each plan what a worker relies on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftapex.core.errors import RequestError
from swiftapex.core.plan import Row, StepPlan, SubBatch
from swiftapex.core.request import Placement, Request, RequestState, SamplingParams
from swiftapex.cost_model import CostModel
from swiftapex.engine.admission import fit_sampling
from swiftapex.kv.block_manager import BlockManager
from swiftapex.policies import make_policy
from swiftapex.scheduler.cohorts import cohorts_wanted
from swiftapex.scheduler.draft import Limits
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.state import SchedulerState

GPU, CPU, STAGING = Placement.GPU, Placement.CPU, Placement.STAGING


@dataclass(frozen=True)
class ConstantCostModel:
    """Costs that fit in a head: µs per row and per token of KV, and a fixed cost of each call."""

    num_layers: int = 4
    linear_fixed: float = 100.0  # reading a layer's weights
    linear_row: float = 0.0
    gpu_token: float = 0.01
    prefill_token: float = 0.0
    cpu_token: float = 0.1
    cpu_fixed: float = 0.0
    iteration: float = 0.0
    hand_off_row: float = 0.0
    layerwise: float = 0.0
    host: float = 0.0
    copy_token: float = 0.0

    def linear_us(self, rows: int) -> float:
        return self.linear_fixed + rows * self.linear_row if rows > 0 else 0.0

    def gpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        return tokens * self.gpu_token

    def prefill_attention_us(self, chunk: int, prefix: int) -> float:
        return chunk * self.prefill_token

    def cpu_attention_us(self, tokens: int, requests: int = 1) -> float:
        return self.cpu_fixed + tokens * self.cpu_token if tokens > 0 else 0.0

    def iteration_us(self, completing: int) -> float:
        return self.iteration

    def hand_off_us(self, rows: int) -> float:
        return rows * self.hand_off_row

    def layerwise_us(self, rows: int) -> float:
        return self.layerwise

    def host_us(self, kind: str) -> float:
        return self.host

    def copy_us(self, tokens: int) -> float:
        return tokens * self.copy_token


@dataclass
class Known:
    """What a worker keeps about a request."""

    blocks: dict[Placement, list[int]] = field(default_factory=lambda: {GPU: [], CPU: []})


class Worker:
    """Block tables and parked cohorts. Asserts that a plan is one that workers can carry out."""

    def __init__(self, limits: Limits, block_size: int, rng: random.Random) -> None:
        self.limits, self.block_size, self.rng = limits, block_size, rng
        self.tables: dict[int, tuple[Placement | None, list[int]]] = {}
        self.cohorts: list[list[Any]] = []  # [request ids, passes left]
        self.dropped: set[int] = set()

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(i for ids, _ in self.cohorts for i in ids)

    def execute(self, plan: StepPlan) -> tuple[list[int], frozenset[int]]:
        """(requests that gained a token, requests in flight)."""
        parked = self.in_flight
        self._apply(plan, parked)
        self._check_shape(plan, parked)
        self._check_limits(plan)
        done = [r.request_id for b in plan.sub_batches for r in b.rows if r.completes]
        for move in plan.moves:
            self.tables[move.request_id] = (move.target, list(move.target_blocks))
        waits = not any(b.rows for b in plan.sub_batches) and not plan.new_cohorts
        self.cohorts += [
            [[r.request_id for r in c.rows], self.rng.randint(0, 6)] for c in plan.new_cohorts
        ]
        for cohort in self.cohorts:
            cohort[1] -= self.rng.randint(0, 2)
        if waits and self.cohorts:
            self.cohorts[0][1] -= 1
        for ids, left in self.cohorts:
            if left <= 0:
                done += [i for i in ids if i not in self.dropped]
                self.dropped -= set(ids)
        self.cohorts = [c for c in self.cohorts if c[1] > 0]
        return done, self.in_flight

    def _apply(self, plan: StepPlan, parked: frozenset[int]) -> None:
        assert set(plan.dropped) <= parked
        self.dropped |= set(plan.dropped)
        for request_id in plan.released:
            assert request_id not in parked, "attention in flight reads these blocks"
            del self.tables[request_id]
        for admission in plan.admitted:
            assert admission.request_id not in self.tables
            self.tables[admission.request_id] = (None, [])
        placements = {r.request_id: r.placement.side for r in self._rows(plan)}
        placements |= {m.request_id: m.source for m in plan.moves}
        for request_id, blocks in plan.new_blocks.items():
            side, table = self.tables[request_id]
            self.tables[request_id] = (side or placements.get(request_id), table + list(blocks))
        for request_id, placement in placements.items():
            side, table = self.tables[request_id]
            assert side in (None, placement), f"request {request_id} has its KV elsewhere"
            self.tables[request_id] = (placement, table)
        self._check_owners(plan)

    def _check_owners(self, plan: StepPlan) -> None:
        """No block is written by two requests, blocks that a copy still reads included."""
        used: dict[Placement, list[int]] = {GPU: [], CPU: []}
        for side, table in self.tables.values():
            if side is not None:
                used[side] += table
        for move in plan.moves:
            assert tuple(self.tables[move.request_id][1]) == move.source_blocks
            assert len(move.source_blocks) == len(move.target_blocks)
            used[move.target] += move.target_blocks
        for blocks in used.values():
            assert len(blocks) == len(set(blocks)), "a block has two owners"

    def _check_shape(self, plan: StepPlan, parked: frozenset[int]) -> None:
        rows = self._rows(plan)
        ids = [r.request_id for r in rows] + [m.request_id for m in plan.moves]
        assert len(ids) == len(set(ids)), "a request is in a plan twice"
        assert not parked & set(ids), "a request in flight is touched"
        two = plan.pipeline in ("asymmetric", "symmetric")
        assert len(plan.sub_batches) == (2 if two else 1)
        for sub_batch in plan.sub_batches[1:]:
            assert all(r.is_decode and r.placement is CPU for r in sub_batch.rows)
        assert len(plan.new_cohorts) <= 1
        if plan.pipeline == "async_overlap":
            assert not any(r.is_decode and r.placement is CPU for r in plan.sub_batches[0].rows)
        else:
            assert not plan.new_cohorts
        for cohort in plan.new_cohorts:
            assert cohort.rows
            assert all(r.is_decode and r.placement is CPU for r in cohort.rows)

    def _check_limits(self, plan: StepPlan) -> None:
        limits, first = self.limits, plan.sub_batches[0]
        joining = max((len(ids) for ids, _ in self.cohorts), default=0)
        joining = max(joining, sum(len(c.rows) for c in plan.new_cohorts))
        for sub_batch in plan.sub_batches:
            riders = joining if sub_batch is first else 0
            rows, tokens = len(sub_batch.rows), sub_batch.num_tokens
            if rows:
                assert rows + riders <= limits.max_batch_size
                assert tokens + riders <= limits.max_tokens_in_batch
        assert joining <= min(limits.max_batch_size, limits.max_tokens_in_batch)
        staged = [r for r in first.rows if r.placement is STAGING]
        blocks = sum(-(-(r.start + r.num_tokens) // self.block_size) for r in staged)
        assert blocks <= limits.staging_blocks, "the staging area is too small"

    @staticmethod
    def _rows(plan: StepPlan) -> list[Row]:
        batches: tuple[SubBatch, ...] = plan.sub_batches + plan.new_cohorts
        return [row for batch in batches for row in batch.rows]


class Harness:
    """Requests under a policy. `step` runs an iteration and checks everything that is stated."""

    def __init__(
        self,
        gpu_blocks: int,
        block_size: int,
        rows: int,
        tokens: int,
        *,
        policy: str = "gpu_only",
        policy_args: Mapping[str, Any] | None = None,
        cpu_blocks: int = 0,
        staging_blocks: int = 0,
        max_skipped: int = 64,
        cost: CostModel | None = None,
        seed: int = 0,
    ) -> None:
        self.policy = make_policy(policy, policy_args)
        if not self.policy.uses_cpu:
            cpu_blocks = staging_blocks = 0
        self.blocks = BlockManager({GPU: gpu_blocks, CPU: cpu_blocks}, block_size)
        self.queue = RequestQueue()
        self.limits = Limits(rows, tokens, staging_blocks, max_skipped)
        self.state = SchedulerState(self.queue, self.blocks, self.limits)
        self.cost: CostModel = cost or ConstantCostModel()
        self.worker = Worker(self.limits, block_size, random.Random(seed))
        self.live: dict[int, Request] = {}
        self.plans: list[StepPlan] = []
        self.next_id = self.refused = self.cpu_tokens = 0
        self._idle = 0  # iterations in a row in which nothing ran (one: all was preempted)
        self._skipped: dict[int, tuple[int, int]] = {}  # request -> iterations, most CPU requests

    def add(self, prompt_len: int, max_tokens: int) -> Request | None:
        request_id, self.next_id = self.next_id, self.next_id + 1
        sampling = SamplingParams(max_tokens=max_tokens)
        try:
            sampling = fit_sampling(sampling, prompt_len, 10_000, self.state)
        except RequestError:
            self.refused += 1
            return None
        request = Request(request_id, tuple(range(prompt_len)), sampling, 0.0)
        self.live[request_id] = request
        self.queue.add(request)
        return request

    def abort(self, request_id: int) -> None:
        if request_id in self.live:
            self.state.finish(self.live.pop(request_id))

    def step(self) -> StepPlan:
        """Runs one iteration. Asserts that it makes progress while requests live."""
        ready = self.state.decoding(CPU)
        busy = bool(self.worker.in_flight)
        plan = self.policy.plan(self.state, self.cost)
        self.plans.append(plan)
        self._check_rows(plan)
        self._check_skipped(plan, ready)
        done, in_flight = self.worker.execute(plan)
        prefilled = set()
        for row in (r for b in plan.sub_batches for r in b.rows if not r.is_decode):
            self.live[row.request_id].num_computed += row.num_tokens
            prefilled.add(row.request_id)
        for request_id in set(done) - prefilled:
            self.live[request_id].num_computed += 1
            self.cpu_tokens += self.live[request_id].placement is CPU
        self.state.settle(plan, in_flight)
        for request_id in done:
            self._token(self.live[request_id])
        self.state.check_integrity()
        idle = self.live and not busy and plan.is_empty
        self._idle = self._idle + 1 if idle else 0
        assert self._idle <= 1, "requests live, and nothing runs"
        return plan

    def drain(self, most: int = 20_000) -> None:
        """Steps until no request lives and nothing is in flight; then both pools must be free."""
        for _ in range(most):
            if not self.live and not self.worker.in_flight:
                break
            self.step()
        assert not self.live, "a request starves"
        self.step()
        for side in (GPU, CPU):
            assert self.blocks.num_free(side) == self.blocks.num_total(side), "blocks leak"
        assert not self.worker.tables and not len(self.state.cohorts)

    def _token(self, request: Request) -> None:
        request.output_ids.append(0)
        if len(request.output_ids) == request.sampling.max_tokens:
            self.state.finish(self.live.pop(request.request_id))

    def _check_rows(self, plan: StepPlan) -> None:
        for batch in plan.sub_batches + plan.new_cohorts:
            for row in batch.rows:
                request = self.live[row.request_id]
                assert request.state is RequestState.RUNNING
                assert row.placement is request.placement and row.num_tokens > 0
                assert row.start == request.num_computed
                end = row.start + row.num_tokens
                assert row.completes == (end == request.num_tokens)
                assert len(self.blocks.owned(row.request_id)) >= self.blocks.blocks_for(end)
                if row.token_ids is not None:
                    assert row.token_ids == request.token_ids(row.start, end)

    def _check_skipped(self, plan: StepPlan, ready: list[Request]) -> None:
        """The bound of docs/architecture.md on how long a CPU decode is left out.

        The oldest may wait longer where all blocks are held by decodes in flight.
        """
        batches = plan.sub_batches + plan.new_cohorts
        served = {row.request_id for batch in batches for row in batch.rows}
        served |= {move.request_id for move in plan.moves}
        left_out = [r for r in ready if r.request_id not in served]
        left_out = [r for r in left_out if r.state is RequestState.RUNNING]
        on_cpu = self.state.num_decoding(CPU)
        skipped = {}
        for request in left_out:
            count, most = self._skipped.get(request.request_id, (0, 0))
            count, most = count + 1, max(most, on_cpu)
            skipped[request.request_id] = (count, most)
            if self.state.has_block(request):
                bound = self.limits.max_skipped + self._batches(most)
                assert count <= bound, f"request {request.request_id} was left out {count} times"
        self._skipped = skipped

    def _batches(self, num_cpu: int) -> int:
        """Iterations that it takes to serve so many CPU decodes which are overdue at once."""
        half = min(self.limits.max_batch_size, self.limits.max_tokens_in_batch) // 2
        cohorts = cohorts_wanted(num_cpu, getattr(self.policy, "cohorts", None))
        return max(-(-num_cpu // max(1, half)), cohorts, self.limits.max_skipped)
