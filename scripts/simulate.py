"""Policies in simulated time: whole runs and windows of any regime, without a GPU or a model.

    PYTHONPATH=. python scripts/simulate.py --regimes a10g-26400 --outputs 50 --requests 1000 \\
        --policies gpu_only neo 'apex?{"overlap": false}' my_lab.my_file:MyPolicy

Regimes are a model, a part of a GPU or all of it, KV and prompts (`REGIMES` in
`bench_regimes.py`).

The policy plans as in an engine, over the requests, lengths, KV and staging area that
`bench_regimes.py` gives it; the clock runs by a measured profile (`docs/results/profile_*.json`,
chosen by the regime's model and multiprocessors, or `--profile`). What a profile does not hold is
not simulated, such as a host that is late, and the policy knows all costs: online correction has
nothing to learn. Nor does the clock know the order in which a pipeline of yours runs: its
iterations take what those of the project's pipeline with the same shape of batches take. The same
arguments give the same figures.

- `--kinds whole` (default): all requests are there at once and run to their end (in `low-batch`
  too, which keeps to four at a time in windows only).
- `--kinds window`: begins with as many requests in progress as the regime says for the policy, or
  with `--start` (as behind the `@` of `bench_hybrid.py`'s lengths); a policy that fills the CPU and
  drains it in turns has a line of each start. A regime knows no start for a policy of yours, which
  therefore begins with all that fit: where `valid` is false and `filled_per_s` far below 0 its rate
  is that of draining the CPU, and a smaller `--start` comes nearer to what it keeps up.
- `--kinds decode`: the same without new requests.

Prints a line of JSON per run, with the name of its `profile`. `in_flight`: requests that a window
begins with; `prefilled_requests` and `decoded_requests`: its prompt tokens and output tokens over
the mean lengths, which agree within 5 % where it is `valid`; `--stretch`: so many times as long as
`--seconds` it may last to become so. Beside what `bench_hybrid.py` prints: `on_cpu_most` and
`on_cpu_end` requests on the CPU, `filled_per_s` requests that were prefilled and did not end, per
second (negative: drained), and by pipeline (`+ chunks`: with prompts) the share of `iterations` and
of `time`. A run that is not possible has an `error` in their place; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from arguments import at_least, limit_arguments
from bench_hybrid import KINDS, Lengths, Run, Workload, parsed, whole, window
from bench_regimes import OUTPUTS, REGIMES, STRATEGIES, Cell, Regime
from bench_scheduler import measured_costs

from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig
from swiftapex.core.errors import ConfigError, SwiftapexError
from swiftapex.kv.sizing import kv_sizes
from swiftapex.model.config import named_architecture
from swiftapex.pipelines import PIPELINES
from swiftapex.policies import FIXED_PREFIX, make_policy
from swiftapex.simulation.engine import SimulatedEngine

PROFILES = Path(__file__).resolve().parents[1] / "docs" / "results"
DTYPE = "bfloat16"


def profile_of(regime: Regime) -> Path:
    """The profiles that are stored are of 8 multiprocessors and of a whole GPU of 132."""
    return PROFILES / f"profile_{regime.model}{'' if regime.sms else '_132'}.json"


def check(args: argparse.Namespace) -> None:
    """ConfigError where an argument cannot be what it says, before anything is simulated."""
    for strategy in args.policies:
        policy, policy_args = parsed(strategy)
        make_policy(policy, policy_args)
        pipeline = policy.removeprefix(FIXED_PREFIX)
        if pipeline != policy and ":" not in pipeline and pipeline not in PIPELINES:
            known = ", ".join(PIPELINES)
            raise ConfigError(f"--policies {strategy}: expected a pipeline of {known}")
    for name, output in product(args.regimes, args.outputs):
        longest = round(1.1 * REGIMES[name].mean_input) + round(1.1 * output)
        if longest > args.max_len:
            raise ConfigError(
                f"--outputs {output}: in {name} the longest request has {longest} tokens, "
                f"more than --max-len {args.max_len}"
            )
    if args.profile is not None:
        measured_costs(args.profile)
        fingerprint = json.loads(args.profile.read_text()).get("fingerprint", {})
        for model in {REGIMES[name].model: None for name in args.regimes}:
            check_profile(args.profile, fingerprint, model)


def check_profile(path: Path, of: Mapping[str, Any], model: str) -> None:
    """ConfigError where a profile's fingerprint says that it was measured on another model, or in
    another dtype: times of one are nothing to simulate another by. The machine may be any."""
    meant = dataclasses.asdict(named_architecture(model))
    differing = [
        f"{key} is {of['model'][key]}, not {meant[key]}"
        for key in ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads", "vocab_size")
        if of.get("model", meant)[key] != meant[key]
    ]
    if of.get("dtype", DTYPE) != DTYPE:
        differing.append(f"dtype is {of['dtype']}, not {DTYPE}")
    if differing:
        raise ConfigError(
            f"--profile {path}: it was measured on something else than {model}: "
            f"{'; '.join(differing)}; choose the --regimes of its model"
        )


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
    cost = measured_costs(args.profile or profile_of(regime))
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
    """For argparse: what a window begins with."""
    requests, colon, share = text.partition(":")
    at_least(1, int)(requests)
    if colon and not 0 < float(share) <= 1:
        raise argparse.ArgumentTypeError(f"expected a share of at most 1, got {share}")
    return text


def arguments() -> argparse.Namespace:
    text, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES)
    add(
        "--outputs",
        nargs="+",
        type=at_least(1, int),
        default=list(OUTPUTS),
        help="tokens, on average",
    )
    add(
        "--policies",
        nargs="+",
        default=list(STRATEGIES),
        help="names as in an experiment file, with arguments as NAME?{JSON}",
    )
    add("--kinds", nargs="+", default=["whole"], choices=KINDS)
    add("--requests", nargs="+", type=at_least(1, int), default=[1000], help="of whole runs")
    add("--start", type=start, help="what windows begin with, N or N:share")
    add("--seconds", type=at_least(1e-3, float), default=20.0, help="of a window")
    add("--stretch", type=at_least(1, float), default=1.0, help="of a window until it is valid")
    add("--warmup", type=at_least(0, float), default=5.0, help="seconds before a window")
    add("--profile", type=Path, help="a JSON file with measured tables")
    add("--cpu-gib", type=at_least(0, float), default=74, help="of CPU KV")
    limit_arguments(parser, block_size=16)
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    """Returns the exit code: 2 where the command line is wrong, 1 where a run was not possible."""
    args = arguments()
    try:
        check(args)
    except SwiftapexError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if run(args) else 1


def run(args: argparse.Namespace) -> bool:
    """Whether all runs were possible."""
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
                key["profile"] = (args.profile or profile_of(REGIMES[name])).name
                took = {"simulated_in_s": round(time.perf_counter() - begin, 1)}
                print(json.dumps(key | found | took), flush=True)
    return not failed


if __name__ == "__main__":
    sys.exit(main())
