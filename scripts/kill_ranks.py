"""Kills ranks of tensor parallelism in the middle of iterations, and looks for what is left.

    python scripts/kill_ranks.py           # every pipeline in prefill, decode and swap, 20 times
    python scripts/kill_ranks.py --times 1 --pipelines async_overlap
    python scripts/kill_ranks.py --times 1 --moments decode --device cuda    # two GPUs, idle

Prints a line of JSON per kill. Exit status 1 if a request did not end with the reason within 10 s,
or a process, thread, socket, piece of shared memory or memory on a GPU stayed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from arguments import at_least

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LIMIT_S = 10.0


def main() -> int:
    import ray

    from swiftapex.pipelines import PIPELINES
    from tests.hybrid import strategy
    from tests.rank_death import MOMENTS, lose_a_rank

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), choices=PIPELINES)
    parser.add_argument("--moments", nargs="+", default=list(MOMENTS), choices=MOMENTS)
    parser.add_argument("--times", type=at_least(1, int), default=20)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2, choices=[2])
    args = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local", num_cpus=args.ranks, include_dashboard=False, log_to_driver=False,
        object_store_memory=80 << 20,
    )  # fmt: skip
    failed, slowest, count = 0, 0.0, 0
    for number in range(args.times):
        for pipeline in args.pipelines:
            for moment in args.moments:
                victim = (number + MOMENTS.index(moment)) % args.ranks
                line = {"pipeline": pipeline, "moment": moment, "victim": victim}
                try:
                    reason, seconds = lose_a_rank(
                        *strategy(pipeline, 0),
                        moment,
                        victim,
                        args.ranks,
                        seed=number,
                        device=args.device,
                    )
                    line |= {"seconds": round(seconds, 2), "reason": reason}
                    failed += seconds > LIMIT_S
                    slowest = max(slowest, seconds)
                except AssertionError as error:
                    failed += 1
                    line["failed"] = str(error)
                count += 1
                print(json.dumps(line), flush=True)
    ray.shutdown()
    print(json.dumps({"kills": count, "failed": failed, "slowest_s": round(slowest, 2)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
