"""What each strategy yields in the long run, with prompts coming in as fast as requests end.

An iteration alone is a bad judge: a prompt earns nothing in it, and the first cohorts of
asynchronous overlap bring no token for L passes. So strategies are compared by iterations that
could go on for ever: tokens per µs where each token comes with `prompt_share` tokens of prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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


@dataclass(slots=True)
class Mix:
    """What there is to do, as it looks over many iterations."""

    gpu_decodes: int  # that the GPU can hold
    cpu_decodes: int  # that the CPU can hold
    tokens_each: int  # of KV that one of them reads
    prompt_share: float  # prefill tokens for each token of output
    max_tokens: int  # of an iteration
    max_rows: int  # of a linear batch
    known_tokens: float = math.inf  # of output, that requests which run or wait may still get
    coming_tokens: float = 0.0  # that others will get if as many come as came while others ran
    on_cpu: int = 0  # requests there now
    beyond_gpu: float = 1.0  # share of requests, those to come included, that the GPU cannot hold

    @staticmethod
    def of(state: SchedulerState) -> Mix:
        """Of what runs, and of what waits as far as there is KV for it. Prompts count while there
        are any."""
        gpu, cpu = state.running_on(Placement.GPU), state.running_on(Placement.CPU)
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
        prompt_share = state.queue.prompt_share() if waiting or state.prefilling() else 0.0
        most = state.limits.max_tokens_in_batch
        rows = min(state.limits.max_batch_size, most)
        running, coming = state.queue.num_running, state.queue.num_came_later
        output = _output(each, prompt_share)
        known, coming_tokens = output * (waiting + running / 2), output * coming
        beyond_gpu = max(0.0, 1 - on_gpu / max(1, waiting + running + coming))
        own = min(on_gpu, rows), on_cpu, each, prompt_share, most, rows
        return Mix(*own, known, coming_tokens, cpu, beyond_gpu)

    @property
    def output(self) -> float:
        """Tokens of a request."""
        return _output(self.tokens_each, self.prompt_share)

    @property
    def prompt(self) -> int:
        """Tokens of a request's prompt."""
        return max(1, round(self.prompt_share * self.output))

    def with_chunk(self, chunk: int) -> Load:
        """The GPU's decodes and `chunk` tokens of prefill: whole prompts, and a part of one with,
        on the average, half of the rest before it."""
        decodes, prompt = self.gpu_decodes, self.prompt if chunk else 1
        whole, part = divmod(chunk, prompt)
        chunks = ((prompt, 0),) * whole + (((part, (prompt - part) // 2),) if part else ())
        return Load(decodes + chunk, decodes * self.tokens_each, 0, chunks, decodes)


def _output(tokens_each: int, prompt_share: float) -> float:
    """Tokens of a request's output, which holds half of them on the average."""
    return tokens_each / (prompt_share + 0.5)


@dataclass(slots=True)
class Steady:
    """An iteration that could go on for ever."""

    rate: float  # tokens per µs
    us: float
    chunk: int  # tokens of prefill in it
    on_cpu: int = 0  # requests on the CPU that it takes
    taken: int = 0  # CPU decodes in it
    worth: float = 0.0  # the rate over all output that is known of, with the time to fill the CPU
    there: float = 1.0  # the share of `on_cpu` that is there
    tokens: float = 0.0  # of output in an iteration
    at_hand: float = 0.0  # GPU-only's rate if it never waited for prompts


def gpu_only(cost: CostModel, mix: Mix) -> Steady:
    """All GPU decodes and the chunk that they ask for, on the average.

    A prompt begins when a request has ended, and goes in as a whole. So where few end in an
    iteration, some iterations have no chunk and read the weights for decodes alone: as many as if
    requests ended independently of each other. The CPU's strategies have prompts at hand."""
    decodes, most = mix.gpu_decodes, mix.max_tokens
    if decodes == 0:
        return Steady(0.0, 0.0, most)
    chunk, us = _chunk(mix, decodes), gpu_only_us(cost, mix.with_chunk(0))
    at_hand = 0.0
    if chunk:
        at_hand = _steady(mix, decodes, chunk, gpu_only_us(cost, mix.with_chunk(chunk))).rate
        with_prompts = max(1 - math.exp(-chunk / mix.prompt), chunk / (most - decodes))
        whole = gpu_only_us(cost, mix.with_chunk(round(chunk / with_prompts)))
        us += with_prompts * (whole - us)
    found = _steady(mix, decodes, chunk, us)
    found.worth, found.at_hand = found.rate, at_hand if chunk else found.rate
    return found


def asymmetric(cost: CostModel, mix: Mix) -> Steady:
    """Both halves hold as many CPU decodes as the other's work on the GPU hides.

    With prompts, how many CPU decodes that are, and so how long the chunk that they ask for, hangs
    on every percent of the cost model: a longer chunk hides nearly as many more as it takes to ask
    for it. So iterations of more and more CPU decodes are compared, each with its chunk, whether or
    not all is hidden, up to the shortest that yields nearly the most. Where the CPU would have to
    be filled for it, one of fewer may be worth more."""
    most = min(mix.cpu_decodes, 2 * mix.max_rows - mix.gpu_decodes)
    taken = hidden = min(most, max(1, _hidden(cost, mix)))
    found = [_two_batches(cost, mix, taken)]
    best = found[0].rate
    while mix.prompt_share and taken < most and found[-1].rate >= _NEARLY * best:
        taken = min(most, int(_STEP * taken) + 1)
        found.append(_two_batches(cost, mix, taken))
        best = max(best, found[-1].rate)
    shortest = next(i for i, each in enumerate(found) if each.rate >= _NEARLY * best)
    choice, top = found[shortest], _best(found).worth
    if choice.there < 1:
        fewer = [_two_batches(cost, mix, number) for number in _fewer(mix, hidden)]
        choice = _best([*fewer, *found[: shortest + 1]])
        top = max(top, choice.worth)
    choice.worth = top  # weighed against other strategies by the best there is
    return choice


def _fewer(mix: Mix, than: int) -> list[int]:
    """Numbers of CPU decodes that less of the CPU must be filled for, down to an eighth: those of
    fewer yield what the GPU does alone, and need not be filled for, so that they would be chosen
    again and again, one more each time."""
    if mix.on_cpu >= than or not mix.prompt_share:
        return []
    least = max(1, than >> 3)
    return [number for number in {least, than >> 2, than >> 1, mix.on_cpu} if number >= least]


def _best(found: Iterable[Steady]) -> Steady:
    return max(found, key=lambda each: each.worth)


def _two_batches(cost: CostModel, mix: Mix, taken: int) -> Steady:
    """With `taken` CPU decodes and the chunk that its tokens ask for."""
    tokens = mix.gpu_decodes + taken

    def us_with(chunk: int) -> float:
        return asymmetric_us(cost, *_halves(cost, mix, chunk, taken))

    chunk = _chunk(mix, tokens)
    found = _steady(mix, tokens, chunk, us_with(chunk), int(_CHOICE * taken), taken)
    return weighed(cost, mix, found, lambda: us_with(0) / tokens)


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
    """All CPU decodes that there can be, or fewer, or those there are if they yield nearly as much:
    then neither filling the CPU nor draining it gains anything."""
    numbers = [mix.cpu_decodes, *_fewer(mix, mix.cpu_decodes)]
    found = {number: _one_batch(cost, mix, number, cohorts) for number in numbers}
    best = _best(found.values())
    present = found.get(min(mix.on_cpu, mix.cpu_decodes), best)
    if present.worth < _NEARLY * best.worth:
        return best
    present.worth = best.worth
    return present


def _one_batch(cost: CostModel, mix: Mix, parked: int, cohorts: int | None) -> Steady:
    """All `parked` CPU decodes are on their way. One advances by a layer in a pass, and by less
    where a visit of all of them takes the CPU longer."""
    wanted = cohorts_wanted(parked, cohorts)
    visit = visit_us(cost, parked * mix.tokens_each, wanted, parked)

    def with_chunk(chunk: int) -> tuple[float, float, float]:
        """Its µs, the share of a layer by which a CPU decode advances, its tokens."""
        us = overlap_us(cost, mix.with_chunk(chunk), parked, wanted)
        advance = min(1.0, us / visit) if visit > 0 else 1.0
        return us, advance, mix.gpu_decodes + advance * overlap_tokens(cost, parked)

    us, advance, tokens, chunk = 0.0, 1.0, float(mix.gpu_decodes), -1
    for _ in range(_ROUNDS):
        before, chunk = chunk, _chunk(mix, tokens)
        if chunk == before:
            break
        us, advance, tokens = with_chunk(chunk)
    found = _steady(mix, tokens, chunk, us, int(advance * parked))

    def us_without_prompts() -> float:
        us, _, tokens = with_chunk(0)
        return us / tokens

    return weighed(cost, mix, found, us_without_prompts)


def weighed(
    cost: CostModel, mix: Mix, found: Steady, us_without_prompts: Callable[[], float]
) -> Steady:
    """With its worth. A request that goes to the CPU beforehand costs its prompt. Where that is
    the end of it, what is spared when such a request ends counts for it, as its tokens come without
    another prompt and take `us_without_prompts` each; where requests go on coming there is more
    output to spread the cost over."""
    missing = found.on_cpu - mix.on_cpu
    if missing <= 0 or not mix.prompt_share or not found.rate:
        found.worth = found.rate
        return found
    most, output = mix.max_tokens, mix.output
    prompt = Load(rows=most, chunks=((most, 0),))
    prompt_us = gpu_only_us(cost, prompt) / most * output * mix.prompt_share
    spared_us = output * (1 / found.rate - us_without_prompts())
    known, coming = mix.known_tokens, mix.coming_tokens
    of_a_token = min(max(0.0, prompt_us - spared_us) / known, prompt_us / (known + coming))
    worth = 1 / (1 / found.rate + missing * of_a_token)
    found.worth, found.there = worth, mix.on_cpu / found.on_cpu
    return found


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
    return Steady(tokens * share / us, us, chunk, on_cpu, taken, tokens=tokens)
