"""Policies in simulated time: whole runs and windows of any regime, without a GPU or a model.

    python scripts/simulate.py --regimes a10g-26400 --outputs 50 --requests 1000 \
        --policies gpu_only neo apex model_based my_lab.my_file:MyPolicy

The policy plans as in an engine, over the requests, lengths, KV and staging area that
`bench_regimes.py` gives it; the clock runs by a measured profile (`docs/results/profile_*.json`,
chosen by the regime's model and multiprocessors, or `--profile`). What a profile does not hold is
not simulated, such as a host that is late, and the policy knows all costs: online correction has
nothing to learn. The same arguments give the same figures.

- `--kinds whole` (default): all requests are there at once and run to their end.
- `--kinds window`: begins with as many requests in progress as the regime says for the policy, or
  with `--start` (as behind the `@` of `bench_hybrid.py`'s lengths); a policy that fills the CPU and
  drains it in turns has a line of each start.
- `--kinds decode`: the same without new requests.

Prints a line of JSON per run. Beside what `bench_hybrid.py` prints: `on_cpu_most` and `on_cpu_end`
requests on the CPU, `filled_per_s` requests that were prefilled and did not end, per second
(negative: drained), and by pipeline (`+ chunks`: with prompts) the share of `iterations` and of
`time`. A run that is not possible has an `error` in their place; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from bench_hybrid import KINDS, Lengths, Run, Workload, at_least, parsed, whole, window
from bench_regimes import OUTPUTS, REGIMES, STRATEGIES, Cell, Regime

from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig
from swiftapex.core.errors import ConfigError, SwiftapexError
from swiftapex.costs.measured import MeasuredCostModel
from swiftapex.costs.tables import Tables
from swiftapex.kv.sizing import kv_sizes
from swiftapex.model.config import named_architecture
from swiftapex.policies import make_policy
from swiftapex.simulation.engine import SimulatedEngine

PROFILES = Path(__file__).resolve().parents[1] / "docs" / "results"
DTYPE = "bfloat16"


def profile_of(regime: Regime) -> Path:
    """The profiles that are stored are of 8 multiprocessors and of a whole GPU of 132."""
    return PROFILES / f"profile_{regime.model}{'' if regime.sms else '_132'}.json"


def read_costs(path: Path) -> MeasuredCostModel:
    """The tables of a profile. ConfigError where the file has none."""
    try:
        return MeasuredCostModel(Tables.from_dict(json.loads(path.read_text())["tables"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no measured tables: {error!r}") from error


def make_engine(regime: Regime, strategy: str, args: argparse.Namespace) -> SimulatedEngine:
    policy, policy_args = parsed(strategy)
    config = EngineConfig(
        device="cuda",
        gpu=GpuConfig(kv_tokens=regime.gpu_kv, sm_count=regime.sms),
        cpu=CpuConfig(kv_memory=int(args.cpu_gib * 2**30)),
        block_size=args.block_size,
        max_model_len=args.max_len,
        max_batch_size=args.max_batch,
        max_tokens_in_batch=args.max_tokens,
    )
    uses_cpu = make_policy(policy, policy_args).uses_cpu
    sizes = kv_sizes(named_architecture(regime.model), DTYPE, config, args.max_len, uses_cpu)
    cost = read_costs(args.profile or profile_of(regime))
    return SimulatedEngine(
        policy,
        policy_args,
        cost,
        sizes,
        args.block_size,
        args.max_batch,
        args.max_tokens,
        args.max_len,
    )


def simulate(
    regime: Regime, output: int, strategy: str, kind: str, start: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One run; `start` as in `bench_hybrid.py`'s lengths, "" as many as there is KV for."""
    engine = make_engine(regime, strategy, args)
    result: dict[str, Any]
    run = Run(engine, Workload(regime.mean_input, output, args.seed), args.block_size)
    if kind == "whole":
        result = whole(run, engine, args, engine.clock)
    else:
        lengths = Lengths.parse(f"{regime.mean_input}x{output}" + (f"@{start}" if start else ""))
        own = argparse.Namespace(**vars(args) | {"at_once": regime.at_once, "requests": 1000})
        result = window(run, engine, lengths, own, kind == "window", engine.clock)
        filled = result["prefilled_requests"] - result["decoded_requests"]
        result["filled_per_s"] = round(filled / result["seconds"], 3)
    return result | counts(engine)


def counts(engine: SimulatedEngine) -> dict[str, Any]:
    iterations, us = Counter[str](), Counter[str]()
    for record in engine.iterations:
        kind = record.pipeline + (" + chunks" if record.prefill_tokens else "")
        iterations[kind] += 1
        us[kind] += round(record.duration_us)
    return {
        "on_cpu_most": engine.most_on_cpu,
        "on_cpu_end": engine.stats().running_cpu,
        "iterations": shares(iterations),
        "time": shares(us),
    }


def shares(counted: Counter[str]) -> dict[str, float]:
    total = counted.total()
    return {name: round(count / total, 3) for name, count in counted.most_common()}


def starts(regime: str, output: int, strategy: str, args: argparse.Namespace) -> list[str]:
    """Of windows."""
    return [args.start] if args.start else Cell(regime, output, strategy, 0).starts


def start(text: str) -> str:
    """For argparse: what a window begins with. ValueError where it says nothing."""
    Lengths.parse(f"1x1@{text}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES)
    parser.add_argument("--outputs", nargs="+", type=at_least(1, int), default=list(OUTPUTS))
    parser.add_argument("--policies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--kinds", nargs="+", default=["whole"], choices=KINDS)
    parser.add_argument(
        "--requests", nargs="+", type=at_least(1, int), default=[1000], help="of whole runs"
    )
    parser.add_argument("--start", type=start, help="what windows begin with, N or N:share")
    parser.add_argument("--seconds", type=at_least(1e-3, float), default=20.0, help="of a window")
    parser.add_argument(
        "--stretch", type=at_least(1, float), default=1.0, help="as for bench_hybrid.py"
    )
    parser.add_argument("--warmup", type=at_least(0, float), default=5.0)
    parser.add_argument("--profile", type=Path, help="a JSON file with measured tables")
    parser.add_argument("--cpu-gib", type=at_least(0, float), default=74)
    parser.add_argument("--block-size", type=at_least(1, int), default=16)
    parser.add_argument("--max-len", type=at_least(1, int), default=2048)
    parser.add_argument("--max-batch", type=at_least(1, int), default=256)
    parser.add_argument("--max-tokens", type=at_least(1, int), default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = False
    for name, output, kind in product(args.regimes, args.outputs, args.kinds):
        for strategy, number in product(args.policies, args.requests if kind == "whole" else [0]):
            own = argparse.Namespace(**vars(args) | {"requests": number})
            for first in [""] if kind == "whole" else starts(name, output, strategy, args):
                begin = time.perf_counter()
                try:
                    found = simulate(REGIMES[name], output, strategy, kind, first, own)
                except SwiftapexError as error:
                    found, failed = {"error": str(error)}, True
                key = {"regime": name, "output": output, "policy": strategy, "kind": kind}
                key |= {"requests": number} if kind == "whole" else {"start": first}
                took = {"simulated_in_s": round(time.perf_counter() - begin, 1)}
                print(json.dumps(key | found | took), flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
