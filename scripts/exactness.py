"""Every pipeline and policy against transformers, over random schedules.

    python scripts/exactness.py                       # the whole matrix: under an hour on two cores
    python scripts/exactness.py --schedules 20 --models gqa-3 --strategies apex random
    python scripts/exactness.py --native              # real lanes, timing left to the machine
    python scripts/exactness.py --tp 4 --schedules 100   # ranks, each late in its own way
    python scripts/exactness.py --pipeline my_lab.my_file:Mine --shape cohorts

A schedule is a random workload (arrivals, lengths, aborts) on random pool sizes, with CPU attention
and copies late on purpose; the same seed gives the same schedule. Prints a line of JSON per cell.
A token may differ from the oracle's only where the float64 oracle's two best logits are within
1e-4, or in half precision where the float32 oracle's are within a margin; those are listed. Exit
status 1 if any other differs, or a schedule does not end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arguments import at_least, require_gpu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Cell = tuple[str, str, str, dict[str, Any], range, bool, str, str]


def run_cell(cell: Cell, ranks: Any = None) -> dict[str, Any]:
    """All schedules of one model under one strategy. ranks: the RayRanks that run them, if any."""
    import torch

    from tests.hybrid import Tally, run_schedule

    torch.set_num_threads(1)
    model, name, policy, args, seeds, late, device, dtype = cell
    tally, failures, start = Tally(), [], time.perf_counter()
    for seed in seeds:
        seeded = args | ({"seed": seed} if name == "random" else {})
        try:
            run_schedule(model, policy, seeded, seed, tally, late, device, dtype, ranks)
        except Exception as error:
            failures.append(f"{error}: {error.__cause__}")
    seconds = round(time.perf_counter() - start, 1)
    counts = {"model": model, "strategy": name, "schedules": len(seeds), "seconds": seconds}
    return counts | asdict(tally) | {"failures": failures}


def cells(args: argparse.Namespace) -> list[Cell]:
    from tests.hybrid import STRATEGIES

    chosen = {name: STRATEGIES[name] for name in args.strategies or STRATEGIES}
    if args.pipeline:
        chosen = {args.pipeline: (f"fixed:{args.pipeline}", {"shape": args.shape})}
    found: list[Cell] = []
    for model in args.models:
        count = args.schedules or (20 if model == "smollm2" else 200)
        seeds = range(args.first_seed, args.first_seed + count)
        late = not args.native and args.device == "cpu"
        last = (seeds, late, args.device, args.dtype)
        found += [(model, n, p, a, *last) for n, (p, a) in chosen.items()]
    return found


def results(all_cells: list[Cell], jobs: int, tp: int, device: str) -> Iterator[dict[str, Any]]:
    """In this process with one job or with ranks, else in processes of their own."""
    if tp > 1:
        from swiftapex.executor.ray_ranks import RayRanks

        ranks = RayRanks(tp, device)
        try:
            for cell in all_cells:
                yield run_cell(cell, ranks)
        finally:
            ranks.close()
    elif jobs == 1:
        yield from map(run_cell, all_cells)
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            yield from pool.imap(run_cell, all_cells)


def main() -> int:
    import swiftapex
    from tests.hybrid import DTYPES, MODELS, MORE_HEADS, STRATEGIES, TP_MODELS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *MORE_HEADS])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES)
    parser.add_argument(
        "--schedules", type=at_least(1, int), help="per cell; default 200, 20 for smollm2"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--native", action="store_true", help="the real lanes, not late ones")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: --native")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--pipeline", help="a pipeline of your own, as package.module:Class")
    parser.add_argument("--shape", default="one", choices=["one", "two", "halves", "cohorts"])
    parser.add_argument("--tp", type=int, default=1, choices=[1, *TP_MODELS], help="Ray actors")
    parser.add_argument("--jobs", type=at_least(1, int), default=2)
    args = parser.parse_args()
    if args.device == "cuda":
        require_gpu(parser)
    args.models = args.models or list(MODELS if args.tp == 1 else TP_MODELS[args.tp])
    failed = tokens = forgiven = 0
    for result in results(cells(args), args.jobs, args.tp, args.device):
        print(json.dumps(result), flush=True)
        failed += len(result["failures"])
        tokens += result["tokens"]
        forgiven += len(result["forgiven"])
    total = {"tokens": tokens, "forgiven": forgiven, "failed_schedules": failed}
    print(json.dumps(total | {"package": swiftapex.__file__}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
