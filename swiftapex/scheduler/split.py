"""NEO's split of CPU decodes over two sub-batches (MLSys'25, section 4), and what it is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from swiftapex.core.request import CPU
from swiftapex.cost_model import (
    CostModel,
    Load,
    asymmetric_us,
    cpu_side_attention_us,
    gpu_halves_us,
    gpu_only_us,
    overlap_tokens,
)
from swiftapex.scheduler.cpu_tier import take_cpu_decode
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.equations import asymmetric_wins
from swiftapex.scheduler.halves import Halves
from swiftapex.scheduler.index import Lazily
from swiftapex.scheduler.prefill import FirstChunks, cut_chunks, most_that
from swiftapex.scheduler.state import SchedulerState

_LOOK_ON = 32  # candidates that are looked at after the last one that fitted
_WANTED_GROUPS = 16  # in which those are taken that are wanted


@dataclass(frozen=True, slots=True)
class Split:
    """CPU decodes per sub-batch, as indices of the candidates, and the load of each sub-batch."""

    picks: tuple[tuple[int, ...], tuple[int, ...]]
    loads: tuple[Load, Load]

    @property
    def count(self) -> int:
        return len(self.picks[0]) + len(self.picks[1])


def choose_split(
    cost: CostModel,
    main: Load,
    contexts: Iterable[int],
    rooms: tuple[int, int],
    forced: int = 0,
    wanted: int = 0,
) -> Split:
    """Distributes CPU decodes that read `contexts` tokens each, in this order, over sub-batch 0
    (which starts as `main`) and sub-batch 1 (empty), with room for `rooms` more rows.

    Each goes where the CPU has more time left (`spare_us`), and only if that stays >= 0: then its
    attention is hidden behind the GPU's work. As long as there is time for many, half as many are
    tried together, which saves time and is as fine. One that does not fit is left out, with all
    that are longer; the search ends where 32 in a row were. The first `forced` are taken even if
    they are not hidden, and so are those up to `wanted`, in groups. Without rows in `main` there is
    nothing to hide behind, and all are taken in two halves.
    """
    halves = Halves(cost, main, rooms)
    if main.rows == 0:
        halves.share_out(contexts)
        return Split(halves.picks, halves.loads)
    contexts = iter(contexts)
    index = 0  # of the first candidate that has not been decided on
    size = wanted // _WANTED_GROUPS
    if size <= 1 or wanted > min(rooms):  # one by one
        forced = max(forced, wanted)
    for tokens in islice(contexts, forced):
        halves.take(index, 1, tokens, must=True)
        index += 1
    while index < wanted and (group := list(islice(contexts, min(size, wanted - index)))):
        halves.take(index, len(group), sum(group), must=True)
        index += len(group)
    group = list(islice(contexts, 1))
    while group and halves.take(index, len(group), sum(group)):
        index += len(group)
        size = halves.group_size()
        group = list(islice(contexts, size)) if size > 1 else []
    rest = chain(group, contexts)
    ahead = list(islice(rest, _LOOK_ON))
    left_out = float("inf")  # tokens of the shortest one that did not fit
    while ahead:
        for passed, tokens in enumerate(ahead, start=1):
            if tokens < left_out:
                if halves.take(index + passed - 1, 1, tokens):
                    break
                if not halves.fits(min(ahead)):
                    return Split(halves.picks, halves.loads)
                left_out = tokens
        else:
            break
        index += passed
        ahead = ahead[passed:] + list(islice(rest, passed))
    return Split(halves.picks, halves.loads)


def split_for(
    state: SchedulerState,
    cost: CostModel,
    first: BatchDraft,
    second: BatchDraft,
    requests: Lazily,
    forced: int,
    wanted: int = 0,
) -> Split:
    """The split of these CPU decodes beside what the two drafts hold already."""
    # A decode reads `num_tokens` tokens of KV, which takes longer to ask for.
    contexts = ([request.num_computed + 1 for request in some] for some in requests.groups())
    rooms = (first.row_room, second.row_room)
    return choose_split(cost, first.load, chain.from_iterable(contexts), rooms, forced, wanted)


def add_split(
    state: SchedulerState,
    drafts: tuple[BatchDraft, BatchDraft],
    requests: Lazily,
    split: Split,
) -> None:
    """Puts the chosen CPU decodes into the drafts, in the order of `requests`."""
    if state.blocks.num_free(CPU) >= split.count:  # nobody has to yield
        for draft, picks in zip(drafts, split.picks, strict=True):
            seen = requests.first(max(picks, default=-1) + 1)
            state.add_decodes(draft, list(map(seen.__getitem__, picks)))
        return
    half_of = {index: half for half in (0, 1) for index in split.picks[half]}
    for index in sorted(half_of):
        take_cpu_decode(state, drafts[half_of[index]], requests[index])


def split_wins(state: SchedulerState, cost: CostModel, first: BatchDraft, split: Split) -> bool:
    """Whether the two-batch iteration serves more requests per predicted time than its GPU rows
    and chunks alone (NEO's last step; APEX Eq. 5 with the iterations as predicted).

    A chunk counts as its share of the request's tokens. What is parked already rides along with
    either, at 1 / (L + 1) of a token per pass.
    """
    alone = gpu_progress(state, first)
    if split.count == 0:
        return False
    if alone == 0:
        return True
    parked = overlap_tokens(cost, state.num_in_flight)
    two, one = asymmetric_us(cost, *split.loads), gpu_only_us(cost, first.load)
    return asymmetric_wins(alone + parked, split.count, two, one)


def gpu_progress(state: SchedulerState, first: BatchDraft) -> float:
    """Requests that an iteration of these GPU decodes and chunks serves."""
    share = 0.0
    for row in first.chunks:
        request = state.queue.running_request(row.request_id)
        assert request is not None
        share += row.num_tokens / request.num_tokens
    return len(first.gpu_decodes) + share


def trim_swap_out(state: SchedulerState, cost: CostModel, first: BatchDraft, split: Split) -> Split:
    """Cuts chunks of prompts bound for the CPU where they make the CPU wait: NEO's fifth step.

    While T_l0 is longer than T_ca1 the CPU idles. Such chunks may lengthen T_l0 to T_ca1, or to
    twice what it is without them: they are also what fills the CPU (NEO takes all of them out as
    long as the constraints hold, so that the CPU tier grows only while it is too full).
    Unchanged where that would uncover attention beside the second sub-batch.
    """
    rows = first.staged_chunks
    staged = sum(row.num_tokens for row in rows)
    if not staged or not split.count:
        return split
    large, small = split.loads
    own = large.rows - staged
    to_hide = cpu_side_attention_us(cost, small)
    longest = max(to_hide, 2 * cost.linear_us(max(own, 1)))
    keep = most_that(lambda tokens: cost.linear_us(own + tokens) <= longest, staged)
    if keep < staged and cost.linear_us(own + keep) < to_hide:
        keep += 1
    others = sum(row.num_tokens for row in first.chunks) - staged
    trimmed, _ = FirstChunks(cost, large).of(others + keep)
    _, beside_second = gpu_halves_us(cost, trimmed, small)
    if keep == staged or beside_second < cpu_side_attention_us(cost, large):
        return split
    cut_chunks(state, first, list(rows), keep)
    merged = first.load.with_cpu_decodes(large.cpu_tokens, large.cpu_requests)
    return Split(split.picks, (merged, small))
