"""How long policies plan, without a model: CPU µs per plan in a steady state of decoding.

    python scripts/bench_scheduler.py --live 1000 --policies gpu_only neo apex model_based

Prints a line of JSON per policy and regime: median and 90th percentile of the time of `plan`, of
booking what a plan did (`settle`), rows per plan and pipelines. Requests begin decoding at once;
parked cohorts come back after 16 to 33 passes.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import statistics
import time
from typing import Any

from swiftapex.core.plan import StepPlan
from swiftapex.core.request import Placement, Request, SamplingParams
from swiftapex.cost_model import AnalyticCostModel, CostModel, default_rates
from swiftapex.kv.block_manager import BlockManager
from swiftapex.model.config import named_architecture
from swiftapex.policies import make_policy
from swiftapex.scheduler.draft import Limits
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.state import SchedulerState

GPU, CPU = Placement.GPU, Placement.CPU
BLOCK = 16
# Blocks on each side.
REGIMES = {"small-gpu": (54, 60_000), "medium-gpu": (1650, 60_000), "large-gpu": (60_000, 60_000)}


class Bench:
    """Requests under one policy, whose plans are carried out by nobody."""

    def __init__(self, policy: str, regime: str, live: int, waiting: int, seed: int = 0) -> None:
        gpu, cpu = REGIMES[regime]
        self.policy = make_policy(policy)
        blocks = BlockManager({GPU: gpu, CPU: cpu if self.policy.uses_cpu else 0}, BLOCK)
        self.queue = RequestQueue()
        self.state = SchedulerState(self.queue, blocks, Limits(256, 2048, 64))
        self.cost: CostModel = AnalyticCostModel(
            named_architecture("llama2-7b"), default_rates("cuda", 14, sm_count=8), "float16"
        )
        self.rng = random.Random(seed)
        self.parked: list[tuple[int, tuple[int, ...]]] = []  # (last pass, requests)
        self.passes = 0
        self.requests: dict[int, Request] = {}
        is_open = True
        for index in range(live + waiting):
            is_open = self.add(index, decoding=is_open and index < live)

    def add(self, index: int, decoding: bool) -> bool:
        """A request that waits, or that decodes where there is room: whether it does."""
        prompt = tuple(range(self.rng.randint(200, 600)))
        request = Request(index, prompt, SamplingParams(max_tokens=200), 0.0)
        self.requests[index] = request
        self.queue.add(request)
        for side in (GPU, CPU):
            if decoding and self.state.can_start(request, side):
                request.output_ids.append(1)
                request.num_computed = len(prompt)
                self.state.start(request, side)
                return True
        return False

    def step(self) -> tuple[float, float, StepPlan]:
        """(seconds to plan, seconds to settle, plan)."""
        start = time.thread_time()
        plan = self.policy.plan(self.state, self.cost)
        planned = time.thread_time()
        done = self._carry_out(plan)
        in_flight = frozenset(i for _, ids in self.parked for i in ids)
        before = time.thread_time()
        self.state.settle(plan, in_flight)
        settled = time.thread_time() - before
        for request_id in done:
            self._token(self.requests[request_id])
        return planned - start, settled, plan

    def _carry_out(self, plan: StepPlan) -> list[int]:
        self.passes += 1
        done = []
        for row in (r for b in plan.sub_batches for r in b.rows):
            request = self.requests[row.request_id]
            if not row.is_decode:
                request.num_computed += row.num_tokens
            if row.completes:
                done.append(row.request_id)
        for cohort in plan.new_cohorts:
            ids = tuple(row.request_id for row in cohort.rows)
            self.parked.append((self.passes + self.rng.randint(16, 33), ids))
        done += [i for last, ids in self.parked if last <= self.passes for i in ids]
        self.parked = [(last, ids) for last, ids in self.parked if last > self.passes]
        return done

    def _token(self, request: Request) -> None:
        if request.is_decoding:
            request.num_computed += 1
        request.output_ids.append(1)
        if len(request.output_ids) >= 150:  # starts again with a fresh output: the state is steady
            del request.output_ids[1:]
            request.num_computed = len(request.prompt_ids)


def measure(policy: str, regime: str, live: int, waiting: int, steps: int) -> dict[str, Any]:
    bench = Bench(policy, regime, live, waiting)
    for _ in range(40):
        bench.step()
    results = [bench.step() for _ in range(steps)]
    plans = [plan for _, _, plan in results]
    us = sorted(1e6 * planned for planned, _, _ in results)
    rows = [sum(len(b.rows) for b in p.sub_batches + p.new_cohorts) for p in plans]
    return {
        "policy": policy,
        "regime": regime,
        "live": bench.queue.num_running + bench.queue.num_waiting,
        "running": bench.queue.num_running,
        "plan_us_p50": round(statistics.median(us), 1),
        "plan_us_p90": round(us[int(0.9 * len(us))], 1),
        "settle_us_p50": round(1e6 * statistics.median(s for _, s, _ in results), 1),
        "rows_p50": statistics.median(rows),
        "pipelines": dict(collections.Counter(p.pipeline for p in plans)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--policies", nargs="+", default=["gpu_only", "neo", "apex", "model_based"])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES)
    args = parser.parse_args()
    for regime in args.regimes:
        for policy in args.policies:
            print(json.dumps(measure(policy, regime, args.live, args.waiting, args.steps)))


if __name__ == "__main__":
    main()
