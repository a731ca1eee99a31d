"""What crosses processes per iteration under tensor parallelism, and what it costs.

    python scripts/bench_control.py                     # 2 ranks
    python scripts/bench_control.py --ranks 4 --requests 64

Runs decodes of a small dummy model on Ray actors and prints, as JSON: bytes of plans and answers
and the driver's µs beside rank 0's computing, per iteration; and the cost of one agreement on a
ticket's readiness through shared memory, on each side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from arguments import at_least


class Ready:
    """A ticket whose result is there."""

    def ready(self) -> bool:
        return True

    def wait(self) -> Any:
        raise NotImplementedError


def follow(name: str, count: int, answers: Any) -> None:
    from swiftapex.pipelines.readiness import Decisions, FollowerReadiness

    memory: Any = SharedMemory(name=name)
    readiness, ticket = FollowerReadiness(Decisions(memory.buf, 1), 0), Ready()
    readiness.agreed(ticket)  # the leader has begun
    start = time.perf_counter()
    for _ in range(count - 1):
        readiness.agreed(ticket)
    answers.put((time.perf_counter() - start) / count * 1e6)
    del readiness
    memory.close()


def agreement_us(count: int = 500) -> dict[str, float]:
    """Mean µs of one question on rank 0, and on a rank that follows it."""
    from swiftapex.pipelines.readiness import Decisions, LeaderReadiness

    size = 4 * Decisions.num_words(1)
    memory: Any = SharedMemory(create=True, size=size)
    context = multiprocessing.get_context("spawn")
    try:
        memory.buf[:size] = bytes(size)
        leader, ticket, answers = (
            LeaderReadiness(Decisions(memory.buf, 1)),
            Ready(),
            context.Queue(),
        )
        start = time.perf_counter()
        for _ in range(count):
            leader.agreed(ticket)
        leader_us = (time.perf_counter() - start) / count * 1e6
        follower = context.Process(target=follow, args=(memory.name, count, answers))
        follower.start()
        follower_us = answers.get(timeout=60)
        follower.join()
        del leader
    finally:
        memory.close()
        memory.unlink()
    return {"rank_0": round(leader_us, 2), "follower": round(follower_us, 2)}


def main() -> int:
    from swiftapex import SamplingParams
    from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
    from swiftapex.engine.engine import Engine
    from swiftapex.executor.ray_executor import ControlTraffic

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=at_least(1, int), default=2)
    parser.add_argument("--requests", type=at_least(1, int), nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--policy", default="gpu_only")
    parser.add_argument("--tokens", type=at_least(1, int), default=48, help="of each request")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    config = EngineConfig(
        device=args.device,
        gpu=GpuConfig(kv_tokens=32768),
        cpu=CpuConfig(kv_tokens=32768),
        tensor_parallel_size=args.ranks,
    )
    model = ModelSection(architecture="tiny", weights="dummy", dtype="float32")
    engine = Engine(model, config, policy=args.policy)
    executor: Any = engine._executor
    try:
        for count in args.requests:
            sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
            requests = [engine.add([5, 6, 7 + i], sampling) for i in range(count)]
            while any(len(request.output_ids) < 8 for request in requests):
                engine.step()
            executor.traffic = ControlTraffic()
            overheads, iterations = [], []
            while all(request.finish_reason is None for request in requests):
                before, begin = executor.traffic.overhead_us, time.perf_counter()
                engine.step()
                iterations.append((time.perf_counter() - begin) * 1e6)
                overheads.append(executor.traffic.overhead_us - before)
            while engine.has_work:
                engine.step()
            traffic = executor.traffic
            n = traffic.iterations
            result = {
                "ranks": args.ranks,
                "decodes": count,
                "iterations": n,
                "plan_bytes_per_rank": round(traffic.bytes_sent / n / args.ranks),
                "answer_bytes": round(traffic.bytes_received / n),
                "overhead_us": {
                    "min": round(min(overheads), 1),
                    "median": round(statistics.median(overheads), 1),
                },
                "iteration_us_median": round(statistics.median(iterations), 1),
            }
            print(json.dumps(result), flush=True)
    finally:
        engine.close()
    print(json.dumps({"agreement_us": agreement_us()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
