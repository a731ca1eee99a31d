"""How long policies plan, without a model: CPU µs per plan in a steady state.

    python scripts/bench_scheduler.py --live 1000 --policies gpu_only neo apex model_based
    python scripts/bench_scheduler.py --cold --regimes cohorts --waiting 0

Regimes: decoding alone, with little, more and enough KV on the GPU; `turnover`, where requests end
and others begin, so that plans hold prefill chunks; `chunks`, a small GPU, a full CPU and short
outputs, where passes hold a batch of prompts and hundreds of CPU decodes; `cohorts`, some hundred
requests decode on the CPU, all of them in flight.

Prints a line of JSON per policy and regime: median and 90th percentile of the time of `plan` and of
booking what a plan did (`settle`), the median share of both in an iteration, rows per plan, those
of CPU decodes and chunks among them, and pipelines. With `--cold` other memory is read before each
of the two, so that nothing they use is in a cache any more: in an engine threads that attend do
that, and an iteration lies between two plans. Requests begin decoding at once; parked cohorts come
back after 16 to 33 passes. Costs are read from tables, as an engine's are, which hold closed forms
for llama2-7b on 8 multiprocessors, or from a measured `--profile`; so is the time of an iteration
that the share refers to.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from arguments import at_least

from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import StepPlan
from swiftapex.core.request import Placement, Request, SamplingParams
from swiftapex.cost_model import CostModel
from swiftapex.costs.analytic import AnalyticCostModel, default_rates
from swiftapex.costs.correction import CorrectedCostModel
from swiftapex.costs.measured import MeasuredCostModel
from swiftapex.costs.tables import Grid, Line, Tables
from swiftapex.kv.block_manager import BlockManager
from swiftapex.model.config import named_architecture
from swiftapex.policies import make_policy
from swiftapex.profiler.measure import Points
from swiftapex.scheduler.draft import Limits
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.state import SchedulerState

GPU, CPU = Placement.GPU, Placement.CPU
BLOCK = 16
MAX_TOKENS = 2048
COLD_BYTES = 2**27  # more than caches hold


@dataclass(frozen=True)
class Regime:
    gpu_blocks: int
    cpu_blocks: int = 60_000
    live: int | None = None  # None: as many as asked for
    prompt: tuple[int, int] = (200, 600)  # tokens, from .. to
    output: int | None = None  # after which a request ends and another one comes; None: it goes on


REGIMES = {
    "small-gpu": Regime(54),
    "medium-gpu": Regime(1650),
    "large-gpu": Regime(60_000),
    "turnover": Regime(1650, output=150),
    "chunks": Regime(256, 9472, live=345, prompt=(180, 220), output=50),
    "cohorts": Regime(256, 9472, live=200),
}


def costs() -> MeasuredCostModel:
    """Tables of closed forms, at the points that a profiler measures."""
    rates = default_rates("cuda", 14, sm_count=8)
    base = AnalyticCostModel(named_architecture("llama2-7b"), rates, "float16")
    points = Points.within(
        max_batch_size=256,
        max_tokens=MAX_TOKENS,
        max_context=2048,
        gpu_tokens=2**17,
        cpu_tokens=2**17,
        block_size=BLOCK,
    )

    def grid(function: Any, xs: tuple[int, ...], ys: tuple[int, ...]) -> Grid:
        return Grid(xs, ys, tuple(tuple(function(x, y) for y in ys) for x in xs))

    def decodes(function: Any) -> Any:
        return lambda requests, tokens: function(max(requests, tokens), requests)

    rows = points.decode_rows + points.chunk_rows
    tables = Tables(
        num_layers=base.num_layers,
        linear=Line(rows, tuple(map(base.linear_us, rows))),
        iteration=Line(points.sampled, tuple(300.0 + n for n in points.sampled)),
        gpu_attention=grid(decodes(base.gpu_attention_us), points.gpu_requests, points.gpu_tokens),
        prefill_attention=grid(base.prefill_attention_us, points.chunks, points.prefixes),
        cpu_attention=grid(decodes(base.cpu_attention_us), points.cpu_requests, points.cpu_tokens),
        hand_off=Line(points.cpu_requests, tuple(25.0 + n / 4 for n in points.cpu_requests)),
        layerwise=Line(points.cpu_requests, (25.0,) * len(points.cpu_requests)),
        copy=Line(points.copy_blocks, tuple(map(base.copy_us, points.copy_blocks))),
    )
    return MeasuredCostModel(tables)


@functools.cache
def measured_costs(path: Path) -> MeasuredCostModel:
    """By the tables of a profile. ConfigError where the file holds none."""
    try:
        return MeasuredCostModel(Tables.from_dict(json.loads(path.read_text())["tables"]))
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--profile {path}: it holds no measured tables ({error!r})") from error


class Bench:
    """Requests under one policy, whose plans are carried out by nobody."""

    def __init__(
        self,
        policy: str,
        regime: str,
        live: int,
        waiting: int,
        cost: CostModel,
        seed: int = 0,
    ) -> None:
        self.regime = REGIMES[regime]
        live = self.regime.live or live
        self.policy = make_policy(policy)
        on_cpu = self.regime.cpu_blocks if self.policy.uses_cpu else 0
        blocks = BlockManager({GPU: self.regime.gpu_blocks, CPU: on_cpu}, BLOCK)
        self.queue = RequestQueue()
        self.state = SchedulerState(self.queue, blocks, Limits(256, MAX_TOKENS, 256))
        self.cost = cost
        self.rng = random.Random(seed)
        self.parked: list[tuple[int, tuple[int, ...]]] = []  # (last pass, requests)
        self.passes = 0
        self.requests: dict[int, Request] = {}
        self.added = live + waiting - 1  # the last id
        is_open = True
        for index in range(live + waiting):
            is_open = self.add(index, decoding=is_open and index < live)

    def add(self, index: int, decoding: bool) -> bool:
        """A request that waits, or that decodes where there is room: whether it does."""
        prompt = tuple(range(self.rng.randint(*self.regime.prompt)))
        output = self.regime.output or 200
        request = Request(index, prompt, SamplingParams(max_tokens=output), 0.0)
        self.requests[index] = request
        self.queue.add(request)
        for side in (GPU, CPU):
            if decoding and self.state.can_start(request, side):
                done = self.rng.randrange(1, output) if self.regime.output else 1
                request.output_ids.extend([1] * done)
                request.num_computed = len(prompt) + done - 1
                self.state.start(request, side)
                return True
        return False

    def step(self, before: Callable[[], Any] = lambda: None) -> tuple[float, float, StepPlan]:
        """(seconds to plan, seconds to settle, plan); `before` each of both is called."""
        before()
        start = time.thread_time()
        plan = self.policy.plan(self.state, self.cost)
        planned = time.thread_time()
        done = self._carry_out(plan)
        in_flight = frozenset(i for _, ids in self.parked for i in ids)
        before()
        carried_out = time.thread_time()
        self.state.settle(plan, in_flight)
        settled = time.thread_time() - carried_out
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
        for request in map(self.requests.__getitem__, done):
            request.num_computed += request.is_decoding
        return done

    def _token(self, request: Request) -> None:
        request.output_ids.append(1)
        if self.regime.output and len(request.output_ids) >= self.regime.output:
            self.state.finish(request)
            del self.requests[request.request_id]
            self.added += 1
            self.add(self.added, decoding=False)
        elif len(request.output_ids) >= 150:  # starts again with a fresh output: a steady state
            del request.output_ids[1:]
            request.num_computed = len(request.prompt_ids)


def measure(
    policy: str,
    regime: str,
    live: int,
    waiting: int,
    steps: int,
    cost: CostModel,
    before: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """`before`: what empties the caches; None: they keep what they have."""
    bench = Bench(policy, regime, live, waiting, cost)
    for _ in range(40):
        bench.step()
    results = [bench.step(before) if before else bench.step() for _ in range(steps)]
    plans = [plan for _, _, plan in results]
    planned = sorted(1e6 * s for s, _, _ in results)
    settled = sorted(1e6 * s for _, s, _ in results)
    shares = [1e6 * (s + t) / p.predicted_us for s, t, p in results if p.predicted_us]
    rows = [[r for b in p.sub_batches + p.new_cohorts for r in b.rows] for p in plans]
    on_cpu = [sum(r.is_decode and r.placement is CPU for r in each) for each in rows]
    chunks = [sum(r.num_tokens for r in each if not r.is_decode) for each in rows]
    return {
        "policy": policy,
        "regime": regime,
        "caches": "emptied" if before else "kept",
        "live": bench.queue.num_running + bench.queue.num_waiting,
        "running": bench.queue.num_running,
        "plan_us_p50": round(statistics.median(planned), 1),
        "plan_us_p90": round(planned[int(0.9 * steps)], 1),
        "settle_us_p50": round(statistics.median(settled), 1),
        "settle_us_p90": round(settled[int(0.9 * steps)], 1),
        "share_of_iteration": round(statistics.median(shares), 5) if shares else None,
        "rows_p50": statistics.median(map(len, rows)),
        "cpu_decodes_p50": statistics.median(on_cpu),
        "prefill_tokens_p50": statistics.median(chunks),
        "pipelines": dict(collections.Counter(p.pipeline for p in plans)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--live", type=at_least(1, int), default=1000)
    parser.add_argument("--waiting", type=at_least(0, int), default=100)
    parser.add_argument("--steps", type=at_least(1, int), default=200)
    parser.add_argument("--policies", nargs="+", default=["gpu_only", "neo", "apex", "model_based"])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES)
    parser.add_argument("--cold", action="store_true", help="empty the caches before each plan")
    parser.add_argument("--profile", type=Path, help="a JSON file with measured tables")
    args = parser.parse_args()
    cost = CorrectedCostModel(measured_costs(args.profile) if args.profile else costs())
    before = np.ones(COLD_BYTES // 8).sum if args.cold else None
    for regime in args.regimes:
        for policy in args.policies:
            found = measure(policy, regime, args.live, args.waiting, args.steps, cost, before)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
