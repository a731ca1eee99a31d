"""What each strategy yields in the long run, with prompts coming in as fast as requests end.

An iteration alone is a bad judge: a prompt earns nothing in it, and the first cohorts of
asynchronous overlap bring no token for L passes. So strategies are compared by iterations that
could go on for ever: tokens per µs where each token comes with `prompt_share` tokens of prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swiftapex.core.request import Placement
from swiftapex.cost_model import (
    CostModel,
    Load,
    asymmetric_us,
    gpu_only_us,
    gpu_side_attention_us,
    overlap_tokens,
    overlap_us,
    visit_us,
)
from swiftapex.scheduler.cohorts import cohorts_wanted
from swiftapex.scheduler.state import SchedulerState

_ROUNDS = 6  # in which the chunk settles at what the iteration's tokens ask for
_NEARLY = 0.985  # of the most that iterations yield: a shorter one is worth the rest
_STEP = 1.25  # from one number of CPU decodes to the next
_CHOICE = 1.25  # CPU requests for each one that two sub-batches take: some are on their way
_SAMPLE = 16  # decodes by which the CPU's time for one is told


@dataclass(frozen=True, slots=True)
class Mix:
    """What there is to do, as it looks over many iterations."""

    gpu_decodes: int  # that the GPU can hold
    cpu_decodes: int  # that the CPU can hold
    tokens_each: int  # of KV that one of them reads
    prompt_share: float  # prefill tokens for each token of output
    max_tokens: int  # of an iteration
    max_rows: int  # of a linear batch
    known_tokens: float = math.inf  # of output, that requests which run or wait may still get

    @staticmethod
    def of(state: SchedulerState) -> Mix:
        """Of what runs, and of what waits as far as there is KV for it. Prompts count while there
        are any."""
        gpu, cpu = (state.running_on(side) for side in (Placement.GPU, Placement.CPU))
        waiting = state.queue.num_waiting
        if cpu:
            each = state.cpu_tokens // cpu
        else:
            runs = state.queue.running
            some = runs[0] if runs else state.queue.first_waiting if waiting else None
            each = some.num_tokens if some is not None else 1
        each = max(1, each)

        def held(side: Placement, now: int, most: int) -> int:
            blocks = state.blocks.num_total(side) // state.blocks.blocks_for(each)
            return max(now, min(blocks, most))

        on_gpu = held(Placement.GPU, gpu, gpu + waiting)
        on_cpu = held(Placement.CPU, cpu, cpu + max(0, waiting - (on_gpu - gpu)))
        prompts = waiting or any(True for _ in state.prefilling())
        prompt_share = state.queue.prompt_share() if prompts else 0.0
        most = state.limits.max_tokens_in_batch
        rows = min(state.limits.max_batch_size, most)
        output = each / (prompt_share + 0.5)  # of a request, which holds half of it on the average
        known = output * (waiting + state.queue.num_running / 2)
        return Mix(min(on_gpu, rows), on_cpu, each, prompt_share, most, rows, known)

    def with_chunk(self, chunk: int) -> Load:
        """The GPU's decodes and a chunk."""
        decodes, each = self.gpu_decodes, self.tokens_each
        chunks = ((chunk, each // 2),) if chunk else ()
        return Load(decodes + chunk, decodes * each, 0, chunks, decodes)


@dataclass(frozen=True, slots=True)
class Steady:
    """An iteration that could go on for ever."""

    rate: float  # tokens per µs
    us: float
    chunk: int  # tokens of prefill in it
    on_cpu: int = 0  # requests on the CPU that it takes
    taken: int = 0  # CPU decodes in it


def gpu_only(cost: CostModel, mix: Mix) -> Steady:
    """All GPU decodes and the chunk that they ask for."""
    if mix.gpu_decodes == 0:
        return Steady(0.0, 0.0, mix.max_tokens)
    chunk = _chunk(mix, mix.gpu_decodes)
    return _steady(mix, mix.gpu_decodes, chunk, gpu_only_us(cost, mix.with_chunk(chunk)))


def asymmetric(cost: CostModel, mix: Mix, seen: dict[int, Steady] | None = None) -> Steady:
    """Both halves hold as many CPU decodes as the other's work on the GPU hides.

    With prompts, how many CPU decodes that are, and so how long the chunk that they ask for, hangs
    on every percent of the cost model: a longer chunk hides nearly as many more as it takes to ask
    for it. So iterations of more and more CPU decodes are compared, each with its chunk, whether or
    not all is hidden, and of those that yield nearly the most the shortest is taken.

    `seen`: iterations by their CPU decodes, kept between calls whose mixes differ in nothing but
    the `cpu_decodes` that there are."""
    seen = {} if seen is None else seen
    found: list[Steady] = []
    best = 0.0
    most = min(mix.cpu_decodes, 2 * mix.max_rows - mix.gpu_decodes)
    taken = min(most, max(1, _hidden(cost, mix)))
    while True:
        if taken not in seen:
            seen[taken] = _two_batches(cost, mix, taken)
        found.append(seen[taken])
        best = max(best, found[-1].rate)
        if taken == most or found[-1].rate < _NEARLY * best or not mix.prompt_share:
            return next(each for each in found if each.rate >= _NEARLY * best)
        taken = min(most, int(_STEP * taken) + 1)


def _two_batches(cost: CostModel, mix: Mix, taken: int) -> Steady:
    """With `taken` CPU decodes and the chunk that its tokens ask for."""
    tokens = mix.gpu_decodes + taken
    chunk = _chunk(mix, tokens)
    us = asymmetric_us(cost, *_halves(cost, mix, chunk, taken))
    return _steady(mix, tokens, chunk, us, int(_CHOICE * taken), taken)


def _hidden(cost: CostModel, mix: Mix) -> int:
    """CPU decodes that two sub-batches without chunks hide."""
    each_us = cost.cpu_attention_us(_SAMPLE * mix.tokens_each, _SAMPLE) / _SAMPLE
    alone = mix.with_chunk(0)

    def in_time(us: float, most: int) -> int:
        """A CPU whose time is below what a profile tells from noise hides all of them."""
        return int(max(0, min(us / each_us, most))) if each_us > 0 else max(0, most)

    beside_first = cost.linear_us(max(1, alone.rows))
    in_second = in_time(beside_first, min(mix.cpu_decodes, mix.max_rows))
    beside_second = cost.linear_us(in_second) + gpu_side_attention_us(cost, alone)
    room = mix.max_rows - mix.gpu_decodes
    return in_second + in_time(beside_second, min(mix.cpu_decodes - in_second, room))


def _halves(cost: CostModel, mix: Mix, chunk: int, taken: int) -> tuple[Load, Load]:
    """Sub-batches with a chunk and `taken` CPU decodes, so that the CPU is as busy beside the one
    as beside the other."""
    alone = mix.with_chunk(chunk)
    beside_first = cost.linear_us(max(1, alone.rows))
    beside_second = cost.linear_us(max(1, taken // 2)) + gpu_side_attention_us(cost, alone)
    both = beside_first + beside_second
    second = round(taken * (beside_first / both if both > 0 else 0.5))
    second = max(min(second, mix.max_rows), taken - (mix.max_rows - mix.gpu_decodes))
    return (
        alone.with_cpu_decodes((taken - second) * mix.tokens_each, taken - second),
        Load().with_cpu_decodes(second * mix.tokens_each, second),
    )


def overlap(cost: CostModel, mix: Mix, cohorts: int | None) -> Steady:
    """All CPU decodes are parked. One advances by a layer in a pass, and by less where a visit of
    all of them takes the CPU longer."""
    wanted = cohorts_wanted(mix.cpu_decodes, cohorts)
    visit = visit_us(cost, mix.cpu_decodes * mix.tokens_each, wanted, mix.cpu_decodes)
    tokens, chunk, us, advance = float(mix.gpu_decodes), -1, 0.0, 1.0
    for _ in range(_ROUNDS):
        before, chunk = chunk, _chunk(mix, tokens)
        if chunk == before:
            break
        us = overlap_us(cost, mix.with_chunk(chunk), mix.cpu_decodes, wanted)
        advance = min(1.0, us / visit) if visit > 0 else 1.0
        tokens = mix.gpu_decodes + advance * overlap_tokens(cost, mix.cpu_decodes)
    return _steady(mix, tokens, chunk, us, int(advance * mix.cpu_decodes))


def fill_share(cost: CostModel, mix: Mix) -> float:
    """µs by which a prompt that goes to the CPU beforehand puts off each token that is known of."""
    most = mix.max_tokens
    prompt = Load(rows=most, chunks=((most, 0),))
    return gpu_only_us(cost, prompt) / most * mix.tokens_each / max(1.0, mix.known_tokens)


def _chunk(mix: Mix, tokens: float) -> int:
    return int(min(mix.prompt_share * tokens, mix.max_tokens - mix.gpu_decodes))


def _steady(
    mix: Mix, tokens: float, chunk: int, us: float, on_cpu: int = 0, taken: int = 0
) -> Steady:
    """Where the chunk is cut off, requests cannot begin as fast as they could end."""
    if us <= 0:
        return Steady(0.0, 0.0, chunk)
    asked = mix.prompt_share * tokens
    share = min(1.0, (chunk + 1) / asked) if asked > 0 else 1.0
    return Steady(tokens * share / us, us, chunk, on_cpu, taken)
