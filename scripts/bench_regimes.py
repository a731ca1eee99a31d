"""Policies against GPU-only, regime by regime: is `model_based` ever worse than either, or than NEO
and APEX?

    python scripts/bench_regimes.py --regimes t4-4096 t4-864 --profile on --lines regimes.jsonl

A regime is a model on a GPU, or a part of one, with so much KV; outputs of 50, 200 and 500 tokens
on average in each. GPU-only has an engine of its own, without CPU KV and staging area; the others
share one beside it, and strategies take turns: repeat by repeat, GPU-only first. A window begins
with as many requests in progress as the policy keeps in its steady state (`Regime.in_flight`): a
CPU tier that is fuller yields the rate at which it drains.

Prints a line of JSON per regime, output, strategy and repeat, as `bench_hybrid.py` measures it, and
last the summary: for each regime and output the ratios, and which of them miss their bounds. A
window that takes in prompts for P requests and gives out tokens of D tells that the steady state's
rate lies between the two (prompts computed again after a preemption are in P): `least` and `most`
are what that leaves of a ratio, and of a valid window the middle is its rate. `--lines` keeps the
lines in a file; what is in it already is not measured again. Ctrl-C and SIGTERM leave the rest out,
and still print the summary.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arguments import at_least, limit_arguments
from bench_hybrid import make_engine, measure

GPU_ONLY, MODEL_BASED, OTHERS = "gpu_only", "model_based", ("neo", "apex")
STRATEGIES = (GPU_ONLY, MODEL_BASED, *OTHERS)
OUTPUTS = (50, 200, 500)
BOUNDS = {"over_gpu_only": 0.99, "over_neo_and_apex": 0.98}
_SETUP_S = 9.0  # of a regime's two engines on an H200, without CPU KV
_PIN_S_PER_GIB = 0.2  # of CPU KV
_PROFILE_S = 80.0


@dataclass(frozen=True)
class Regime:
    """`gpu_kv` in tokens; `sms` None: the whole GPU. `at_once`: requests at a time, None: as many
    as there is KV for. `in_flight`: policy -> requests in progress when the warm-up begins, for
    each of OUTPUTS, `N` or `N:share` as in `bench_hybrid.py`'s lengths: about what it settles at on
    a clock that runs by measured tables (None: all that fit; so too for policies that are not
    named). `N|M`: it never settles, but fills the CPU and drains it in turns; a window of each."""

    model: str
    sms: int | None
    gpu_kv: int
    mean_input: int
    at_once: int | None = None
    in_flight: dict[str, tuple[str | None, ...]] = field(default_factory=dict)


REGIMES = {
    "t4-4096": Regime(
        "llama2-7b",
        8,
        4096,
        400,
        in_flight={
            "neo": ("18", "30|70", "60|110"),
            "apex": ("40|80", "200|300", "165|230"),
            MODEL_BASED: ("85:0.88", "285", "225"),
        },
    ),
    "t4-864": Regime(
        "llama2-7b",
        8,
        864,
        250,  # with 500 tokens, +10 %, it fits into 864
        in_flight={
            "neo": ("23", "30|90", "60|140"),
            "apex": ("240", "300|400", "195|300"),
            MODEL_BASED: ("113:0.9", "408", None),
        },
    ),
    "a10g-26400": Regime(
        "llama3.1-8b",
        8,
        26_400,
        1000,
        in_flight={
            "neo": ("28", "29", "30|110"),
            "apex": ("90|200", "205", "320|480"),
            MODEL_BASED: ("70", "250:0.8", "92"),
        },
    ),
    "uncapped": Regime(
        "llama2-7b",
        None,
        65_536,
        400,
        in_flight={
            "neo": ("150", "138", "115"),
            "apex": ("253", "245", "215"),
            MODEL_BASED: ("145", "124", "98"),
        },
    ),
    "low-batch": Regime("llama2-7b", None, 65_536, 400, at_once=4),
}


@dataclass(frozen=True)
class Cell:
    regime: str
    output: int
    strategy: str
    repeat: int

    @property
    def key(self) -> dict[str, Any]:
        return vars(self).copy()

    def arguments(self, args: argparse.Namespace) -> argparse.Namespace:
        """`bench_hybrid`'s, of this cell."""
        regime = REGIMES[self.regime]
        own = {
            "model": args.model or regime.model,
            "sms": regime.sms if args.device == "cuda" else None,
            "gpu_kv": regime.gpu_kv,
            "at_once": regime.at_once,
            "profile": "auto" if self.strategy == GPU_ONLY else args.profile,
        }
        return argparse.Namespace(**vars(args) | own)

    @property
    def starts(self) -> list[str]:
        """What its windows begin with, one after the other."""
        starts = REGIMES[self.regime].in_flight.get(self.strategy)
        start = starts[OUTPUTS.index(self.output)] if starts and self.output in OUTPUTS else None
        return (start or "").split("|")

    def lengths(self) -> str:
        """`bench_hybrid`'s, and what the window begins with."""
        start = self.starts[self.repeat % len(self.starts)]
        return f"{REGIMES[self.regime].mean_input}x{self.output}" + (f"@{start}" if start else "")


def cells(args: argparse.Namespace) -> list[Cell]:
    """In the order in which they are measured."""
    found = []
    for regime in args.regimes:
        for output in args.outputs:
            windows = {
                strategy: max(
                    args.repeats_of_others if strategy in OTHERS else args.repeats,
                    len(Cell(regime, output, strategy, 0).starts),
                )
                for strategy in STRATEGIES
                if strategy in args.strategies
            }
            for repeat in range(max(windows.values())):
                wanted = [strategy for strategy, count in windows.items() if repeat < count]
                found += [Cell(regime, output, strategy, repeat) for strategy in wanted]
    return found


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of mean rates by regime and output. `misses`: those below their bounds, where no
    invalid window leaves that open; `unproven`: others that are below, or whose `least` is;
    `incomplete`: regimes and outputs without all strategies."""
    rows, misses, unproven, incomplete = [], [], [], []
    for regime, output in dict.fromkeys((line["regime"], line["output"]) for line in lines):
        mine = [x for x in lines if (x["regime"], x["output"]) == (regime, output)]
        rates = {name: rate for name in STRATEGIES if (rate := _mean(mine, name))}
        row: dict[str, Any] = {
            "regime": regime,
            "output": output,
            "tokens_per_s": {name: round(rate.measured, 1) for name, rate in rates.items()},
            "invalid_windows": sum(not x["valid"] for x in mine),
        }
        rows.append(row)
        if len(rates) < len(STRATEGIES):
            incomplete.append([regime, output])
        bases = {"over_gpu_only": (GPU_ONLY,), "over_neo_and_apex": OTHERS}
        for name, strategies in bases.items():
            known = [rates[s] for s in strategies if s in rates]
            if not known or MODEL_BASED not in rates:
                continue
            found = rates[MODEL_BASED].over(max(known, key=lambda rate: rate.measured))
            row[name] = found
            bound, doubtful = BOUNDS[name], row["invalid_windows"] > 0
            may_reach = doubtful and found.get("most", bound) >= bound
            if found["ratio"] < bound and not may_reach:
                misses.append([regime, output, name, found["ratio"]])
            elif min(found["ratio"], found["least"]) < bound:
                unproven.append([regime, output, name, found["least"]])
    return {
        "bounds": BOUNDS,
        "ratios": rows,
        "misses": misses,
        "unproven": unproven,
        "incomplete": incomplete,
    }


@dataclass(frozen=True)
class Rate:
    """Output tokens per second, and between what the steady state's lie."""

    measured: float
    low: float
    high: float

    def over(self, base: Rate) -> dict[str, float]:
        """`most` is left out where nothing bounds it."""
        pairs = {"ratio": (self.measured, base.measured), "least": (self.low, base.high)}
        pairs |= {"most": (self.high, base.low)} if base.low else {}
        return {name: round(mine / other, 4) for name, (mine, other) in pairs.items()}


def _mean(lines: Sequence[dict[str, Any]], strategy: str) -> Rate | None:
    """Of a strategy's windows. Where some fill the CPU and some drain it, each kind counts for as
    long as makes up for the other."""
    mine = [line for line in lines if line["strategy"] == strategy]
    if not mine:
        return None
    filling, draining = ([x for x in mine if _filled(x) * sign > 0] for sign in (1, -1))
    if filling and draining and not all(x["valid"] for x in mine):
        gain, loss = (abs(statistics.mean(map(_filled, kind))) for kind in (filling, draining))
        first, second = (
            statistics.mean(float(x["output_tokens_per_s"]) for x in kind)
            for kind in (filling, draining)
        )
        balanced = (loss * first + gain * second) / (gain + loss)
        return Rate(balanced, balanced, balanced)
    again = any(line["preemptions"] for line in lines)
    measured, low, high = zip(*(_bounds(line, by_tokens=again) for line in mine), strict=True)
    return Rate(statistics.mean(measured), statistics.mean(low), statistics.mean(high))


def _bounds(line: dict[str, Any], by_tokens: bool) -> tuple[float, float, float]:
    """Of the steady state's rate: the estimate, and between what it lies. Of a valid window that is
    the middle of the rates by its tokens and by its prompts: both tell the same, each with the
    noise of where the window begins and ends. `by_tokens`: by these alone, where some prompts were
    computed again, which are not told from others."""
    rate = float(line["output_tokens_per_s"])
    decoded = line["decoded_requests"]
    by_prompts = rate * line["prefilled_requests"] / decoded if decoded else rate
    if line["valid"]:
        return (rate if by_tokens else (rate + by_prompts) / 2,) * 3
    return rate, min(rate, by_prompts), max(rate, by_prompts)


def _filled(line: dict[str, Any]) -> float:
    """Requests per second that began and did not end."""
    return float(line["prefilled_requests"] - line["decoded_requests"]) / float(line["seconds"])


def run(args: argparse.Namespace, todo: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """A line per cell. Engines are kept for as long as they serve: one of each kind at a time."""
    engines: dict[bool, Any] = {}
    setting = None
    with ExitStack() as stack:
        for cell in todo:
            own = cell.arguments(args)
            if setting != (own.model, own.sms, own.gpu_kv):
                stack.close()
                engines.clear()
                setting = (own.model, own.sms, own.gpu_kv)
            alone = cell.strategy == GPU_ONLY
            if alone not in engines:
                begin = time.perf_counter()
                engines[alone] = stack.enter_context(closing(make_engine(own, cell.strategy)))
                seconds = time.perf_counter() - begin
                print(f"{cell.regime}: an engine in {seconds:.1f} s", file=sys.stderr, flush=True)
            yield cell.key | measure(engines[alone], cell.strategy, cell.lengths(), "window", own)


def estimate_s(args: argparse.Namespace, todo: Sequence[Cell]) -> float:
    """On an H200, profiles included where they are asked for."""
    settings = {(REGIMES[c.regime].model, REGIMES[c.regime].sms) for c in todo}
    engines = {(*s, REGIMES[c.regime].gpu_kv) for c in todo for s in settings if _is_of(c, s)}
    windows: float = len(todo) * (args.warmup + args.stretch * args.seconds)
    setups: float = len(engines) * (_SETUP_S + _PIN_S_PER_GIB * args.cpu_gib)
    profiles = len(settings) * _PROFILE_S if args.profile == "on" else 0.0
    return windows + setups + profiles


def _is_of(cell: Cell, setting: tuple[str, int | None]) -> bool:
    regime = REGIMES[cell.regime]
    return (regime.model, regime.sms) == setting


def read_lines(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES)
    parser.add_argument("--outputs", nargs="+", type=at_least(1, int), default=list(OUTPUTS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument(
        "--repeats", type=at_least(1, int), default=2, help="of GPU-only and model_based"
    )
    parser.add_argument(
        "--repeats-of-others", type=at_least(1, int), default=1, help="of neo and apex"
    )
    parser.add_argument("--seconds", type=at_least(1e-3, float), default=4.0)
    parser.add_argument(
        "--stretch", type=at_least(1, float), default=1.0, help="as for bench_hybrid.py"
    )
    parser.add_argument("--warmup", type=at_least(0, float), default=1.5)
    parser.add_argument("--lines", type=Path, help="a file that keeps them")
    parser.add_argument("--profile", default="auto", help="of the engine that uses the CPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="instead of the regimes' models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=at_least(1, int))
    parser.add_argument("--cpu-gib", type=at_least(0, float), default=74)
    parser.add_argument("--threads", type=at_least(1, int))
    limit_arguments(parser, block_size=16)
    parser.add_argument(
        "--requests", type=at_least(1, int), default=1000, help="in progress, at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.tp = 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    lines = read_lines(args.lines)
    known = [{name: line[name] for name in vars(Cell("", 0, "", 0))} for line in lines]
    todo = [cell for cell in cells(args) if cell.key not in known]
    print(f"{len(todo)} windows, about {estimate_s(args, todo):.0f} s", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    try:
        for line in run(args, todo):
            lines.append(line)
            text = json.dumps(line)
            print(text, flush=True)
            if args.lines is not None:
                with args.lines.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    found = summary(lines) | {"seconds": round(time.perf_counter() - begin, 1)}
    print(json.dumps({"summary": found}), flush=True)


if __name__ == "__main__":
    main()
