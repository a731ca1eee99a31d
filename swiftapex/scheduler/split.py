"""NEO's split of CPU decodes over two sub-batches (MLSys'25, section 4), and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swiftapex.core.request import Placement, Request
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
from swiftapex.scheduler.prefill import cut_chunks, first_chunks, most_that
from swiftapex.scheduler.state import SchedulerState

_TRIES = 64


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
    contexts: Sequence[int],
    rooms: tuple[int, int],
    forced: int = 0,
) -> Split:
    """Distributes CPU decodes that read `contexts` tokens each, in this order, over sub-batch 0
    (which starts as `main`) and sub-batch 1 (empty), with room for `rooms` more rows.

    Each goes where the CPU has more time left (`spare_us`), and only if that stays >= 0: then its
    attention is hidden behind the GPU's work. One that does not fit is left out, with all that are
    longer. The first `forced` are taken even if they are not hidden. Without rows in `main`
    there is nothing to hide behind, and all are taken in two halves.
    """
    halves = _Halves(cost, main, contexts, rooms)
    if main.rows == 0:
        halves.share_out()
        return halves.split()
    for index in range(min(forced, len(contexts))):
        halves.take([index], must=True)
    # Many candidates are tried several at a time: then the choice is as fine as a 64th of them.
    most = max(1, (len(contexts) - forced) // _TRIES)
    index, at_once, left_out = forced, most, float("inf")  # left_out: tokens of what did not fit
    while index < len(contexts) and not halves.are_full:
        group = []
        end = index
        while end < len(contexts) and len(group) < at_once:
            if contexts[end] < left_out:
                group.append(end)
            end += 1
        if not group:
            break
        if halves.take(group):
            index, at_once = end, min(most, 2 * at_once)
        elif at_once > 1:
            at_once //= 2
        else:
            index, left_out = end, contexts[group[0]]
    return halves.split()


class _Halves:
    """Two sub-batches that take in CPU decodes, and what the GPU does beside their attention."""

    def __init__(
        self, cost: CostModel, main: Load, contexts: Sequence[int], rooms: tuple[int, int]
    ) -> None:
        self._cost = cost
        self._contexts = contexts
        self._rooms = list(rooms)
        self._picks: tuple[list[int], list[int]] = ([], [])
        self._loads = [main, Load()]
        self._beside = self._gpu_beside()

    @property
    def are_full(self) -> bool:
        return max(self._rooms) <= 0

    def take(self, group: Sequence[int], must: bool = False) -> bool:
        """Puts a group of candidates where more time is left, if there is any or they `must`."""
        tokens, count = sum(self._contexts[i] for i in group), len(group)
        options = []
        for half in (1, 0):
            if count <= self._rooms[half]:
                load = self._loads[half]
                attention = self._cost.cpu_attention_us(
                    load.cpu_tokens + tokens, load.cpu_requests + count
                )
                options.append((self._beside[half] - attention, half))
        if not options:
            return False
        spare, half = max(options, key=lambda option: option[0])
        if spare < 0 and not must:
            return False
        self._picks[half].extend(group)
        self._rooms[half] -= count
        self._loads[half] = self._loads[half].with_cpu_decodes(tokens, count)
        self._beside = self._gpu_beside()
        return True

    def share_out(self) -> None:
        """All candidates that there is room for, each to the half that reads fewer tokens."""
        tokens = [0, 0]
        for index, context in enumerate(self._contexts):
            open_halves = [half for half in (1, 0) if self._rooms[half] > 0]
            if not open_halves:
                break
            half = min(open_halves, key=tokens.__getitem__)
            self._picks[half].append(index)
            self._rooms[half] -= 1
            tokens[half] += context
        for half in (0, 1):
            count = len(self._picks[half])
            self._loads[half] = self._loads[half].with_cpu_decodes(tokens[half], count)

    def split(self) -> Split:
        first, second = self._picks
        return Split((tuple(first), tuple(second)), (self._loads[0], self._loads[1]))

    def _gpu_beside(self) -> tuple[float, float]:
        """µs of a layer beside which the CPU attends for the first and for the second half."""
        beside_first, beside_second = gpu_halves_us(self._cost, *self._loads)
        return beside_second, beside_first


def split_for(
    state: SchedulerState,
    cost: CostModel,
    first: BatchDraft,
    second: BatchDraft,
    requests: Sequence[Request],
    forced: int,
) -> Split:
    """The split of these CPU decodes beside what the two drafts hold already."""
    contexts = [request.num_computed + 1 for request in requests]  # = num_tokens: they decode
    return choose_split(cost, first.load, contexts, (first.row_room, second.row_room), forced)


def add_split(
    state: SchedulerState,
    drafts: tuple[BatchDraft, BatchDraft],
    requests: Sequence[Request],
    split: Split,
) -> None:
    """Puts the chosen CPU decodes into the drafts, in the order of `requests`."""
    if state.blocks.num_free(Placement.CPU) >= split.count:  # nobody has to yield
        for draft, picks in zip(drafts, split.picks, strict=True):
            state.add_decodes(draft, [requests[index] for index in picks])
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
    trimmed = first_chunks(large, others + keep)
    _, beside_second = gpu_halves_us(cost, trimmed, small)
    if keep == staged or beside_second < cpu_side_attention_us(cost, large):
        return split
    cut_chunks(state, first, list(rows), keep)
    merged = first.load.with_cpu_decodes(large.cpu_tokens, large.cpu_requests)
    return Split(split.picks, (merged, small))
