"""The requests of an experiment, made from its workload section and its seed.

The same settings give the same requests, in every run and on every machine. Each request draws
from random streams of its own, so that neither the arrival rate nor the number of requests
changes what a request is.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from swiftapex.config.schema import Length, WorkloadConfig
from swiftapex.core.errors import ConfigError
from swiftapex.core.request import SamplingParams
from swiftapex.workloads.files import TraceLine, read_prompts, read_trace
from swiftapex.workloads.lengths import draw_length

DEFAULT_OUTPUT_LEN = 128  # of prompts for which neither the line nor the workload says one


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to send. `arrival_s` counts from the first arrival."""

    index: int
    arrival_s: float
    prompt: str | tuple[int, ...]
    chat: bool
    sampling: SamplingParams
    progress: float = 0.0  # share of its output, as it is sent, that it has before the run; < 1


def check_workload(workload: WorkloadConfig) -> None:
    """Raises what `build_workload` would raise, without making the requests."""
    if workload.kind == "prompts":
        read_prompts(_path(workload))
    elif workload.kind == "trace":
        _trace_lines(workload)


def build_workload(workload: WorkloadConfig, seed: int, vocab_size: int) -> list[WorkItem]:
    """All requests in order of arrival. `vocab_size` bounds random token ids.

    ConfigError where a file is missing or malformed, or holds too few requests.
    """
    if workload.kind == "prompts":
        items = _from_prompts(workload, seed)
    elif workload.kind == "synthetic":
        items = _synthetic(workload, seed, vocab_size)
    else:
        items = _from_trace(workload, seed, vocab_size)
    warm = workload.warm_start
    if not warm:
        return list(items)
    return [
        replace(item, progress=_stream(seed, "progress", item.index).random())
        if warm is True or item.index < warm
        else item
        for item in items
    ]


def _from_prompts(workload: WorkloadConfig, seed: int) -> Iterator[WorkItem]:
    """The file's prompts; more requests than prompts begin again with the first."""
    prompts = read_prompts(_path(workload))
    count = workload.num_requests or len(prompts)
    default = workload.output_len or DEFAULT_OUTPUT_LEN
    arrivals = _arrivals(workload, seed)
    for index in range(count):
        line = prompts[index % len(prompts)]
        chat = workload.chat if line.chat is None else line.chat
        # A chat template is made for text; token ids are taken as they are.
        chat = chat and isinstance(line.prompt, str)
        length = _draw_output(line.output_len or default, seed, index)
        sampling = _sampling(workload, length, seed, index)
        yield WorkItem(index, next(arrivals), line.prompt, chat, sampling)


def _synthetic(workload: WorkloadConfig, seed: int, vocab_size: int) -> Iterator[WorkItem]:
    assert workload.num_requests and workload.input_len and workload.output_len
    arrivals = _arrivals(workload, seed)
    for index in range(workload.num_requests):
        input_len = draw_length(workload.input_len, "input", _stream(seed, "input", index))
        prompt = _random_ids(input_len, vocab_size, seed, index)
        length = _draw_output(workload.output_len, seed, index)
        sampling = _sampling(workload, length, seed, index)
        yield WorkItem(index, next(arrivals), prompt, False, sampling)


def _from_trace(workload: WorkloadConfig, seed: int, vocab_size: int) -> Iterator[WorkItem]:
    """The trace's first `num_requests`. An `output_len` in the workload replaces the trace's."""
    arrivals = _arrivals(workload, seed)
    for index, line in enumerate(_trace_lines(workload)):
        arrival_s = next(arrivals)
        if workload.arrival == "trace":
            arrival_s = (line.time_s or 0.0) / workload.speedup
        length = _draw_output(workload.output_len or line.output_len, seed, index)
        prompt = _random_ids(line.input_len, vocab_size, seed, index)
        sampling = _sampling(workload, length, seed, index)
        yield WorkItem(index, arrival_s, prompt, False, sampling)


def _trace_lines(workload: WorkloadConfig) -> list[TraceLine]:
    path = _path(workload)
    lines = read_trace(path, cut=workload.over_length == "truncate")
    count = workload.num_requests or len(lines)
    if count > len(lines):
        raise ConfigError(f"workload.num_requests: {count}: expected at most {len(lines)} ({path})")
    if workload.arrival == "trace" and lines[0].time_s is None:
        raise ConfigError(f"workload.arrival: trace: {path} has no times; expected all or poisson")
    return lines[:count]


def _path(workload: WorkloadConfig) -> Path:
    assert workload.path is not None
    return Path(workload.path)


def _stream(seed: int, purpose: str, index: int = 0) -> random.Random:
    """Independent random numbers for one purpose. Only `random()` and `getrandbits()` are used:
    Python keeps their sequences the same over its versions."""
    return random.Random(f"{seed}/{purpose}/{index}")


def _arrivals(workload: WorkloadConfig, seed: int) -> Iterator[float]:
    """Arrival times in seconds, the first at 0: all at once, or with exponential gaps."""
    if workload.arrival != "poisson" or workload.rate is None:
        yield from itertools.repeat(0.0)
        return
    rng, now = _stream(seed, "arrival"), 0.0
    while True:
        yield now
        now -= math.log(1.0 - rng.random()) / workload.rate


def _random_ids(length: int, vocab_size: int, seed: int, index: int) -> tuple[int, ...]:
    rng = _stream(seed, "prompt", index)
    return tuple(int(rng.random() * vocab_size) for _ in range(length))


def _draw_output(length: Length, seed: int, index: int) -> int:
    return draw_length(length, "output", _stream(seed, "output", index))


def _sampling(workload: WorkloadConfig, output_len: int, seed: int, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=workload.temperature,
        top_k=workload.top_k,
        top_p=workload.top_p,
        seed=_stream(seed, "sampling", index).getrandbits(31),
        max_tokens=output_len,
        ignore_eos=workload.forces_length,
    )
