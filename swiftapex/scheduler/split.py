"""NEO's split of CPU decodes over two sub-batches (MLSys'25, section 4), and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swiftapex.core.request import Placement, Request
from swiftapex.cost_model import (
    CostModel,
    Load,
    asymmetric_us,
    gpu_only_us,
    gpu_side_attention_us,
    overlap_tokens,
    spare_us,
)
from swiftapex.scheduler.cpu_tier import take_cpu_decode
from swiftapex.scheduler.draft import BatchDraft
from swiftapex.scheduler.equations import asymmetric_wins
from swiftapex.scheduler.prefill import cut_chunks, first_chunks, most_that
from swiftapex.scheduler.state import SchedulerState


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
    loads, picks = [main, Load()], ([], [])  # type: tuple[list[Load], tuple[list[int], list[int]]]
    left_out = float("inf")  # tokens of the shortest one that did not fit
    for index, tokens in enumerate(contexts):
        must = index < forced or main.rows == 0
        if not must and tokens >= left_out:
            continue
        options = []
        for half in (1, 0):
            if len(picks[half]) < rooms[half]:
                after = loads.copy()
                after[half] = loads[half].with_cpu_decodes(tokens)
                options.append((spare_us(cost, *after)[half], half, after))
        if not options:
            break
        if main.rows == 0:
            spare, half, after = min(options, key=lambda o: loads[o[1]].cpu_tokens)
        else:
            spare, half, after = max(options, key=lambda o: o[0])
        if spare < 0 and not must:
            left_out = tokens
            continue
        loads = after
        picks[half].append(index)
    return Split((tuple(picks[0]), tuple(picks[1])), (loads[0], loads[1]))


def split_for(
    state: SchedulerState,
    cost: CostModel,
    first: BatchDraft,
    second: BatchDraft,
    requests: Sequence[Request],
    forced: int,
) -> Split:
    """The split of these CPU decodes beside what the two drafts hold already."""
    contexts = [request.num_tokens for request in requests]
    return choose_split(cost, Load.of(first.rows), contexts, (_rows(first), _rows(second)), forced)


def _rows(batch: BatchDraft) -> int:
    """Decodes that the batch still has room for."""
    return min(batch.limits.max_batch_size - len(batch.rows), batch.room)


def add_split(
    state: SchedulerState,
    drafts: tuple[BatchDraft, BatchDraft],
    requests: Sequence[Request],
    split: Split,
) -> None:
    """Puts the chosen CPU decodes into the drafts, in the order of `requests`."""
    half_of = {index: half for half in (0, 1) for index in split.picks[half]}
    for index in sorted(half_of):
        take_cpu_decode(state, drafts[half_of[index]], requests[index])


def split_wins(state: SchedulerState, cost: CostModel, first: BatchDraft, split: Split) -> bool:
    """Whether the two-batch iteration serves more requests per predicted time than its GPU rows
    and chunks alone (NEO's last step; APEX Eq. 5 with the iterations as predicted).

    A chunk counts as its share of the request's tokens. What is parked already rides along with
    either, at 1 / (L + 1) of a token per pass.
    """
    running = {r.request_id: r for r in state.queue.running}
    chunks = sum(row.num_tokens / running[row.request_id].num_tokens for row in first.chunks)
    alone = len(first.gpu_decodes) + chunks
    if split.count == 0:
        return False
    if alone == 0:
        return True
    parked = overlap_tokens(cost, state.num_in_flight)
    main = Load.of(first.rows)
    two, one = asymmetric_us(cost, *split.loads), gpu_only_us(cost, main)
    return asymmetric_wins(alone + parked, split.count, two, one)


def trim_swap_out(state: SchedulerState, cost: CostModel, first: BatchDraft, split: Split) -> Split:
    """Cuts chunks of prompts bound for the CPU where they make the CPU wait: NEO's fifth step.

    While T_l0 is longer than T_ca1 the CPU idles. Such chunks may lengthen T_l0 to T_ca1, or to
    twice what it is without them: they are also what fills the CPU (NEO takes all of them out as
    long as the constraints hold, so that the CPU tier grows only while it is too full).
    Unchanged where that would uncover attention beside the second sub-batch.
    """
    rows = [row for row in first.chunks if row.placement is Placement.STAGING]
    staged = sum(row.num_tokens for row in rows)
    if not staged or not split.count:
        return split
    large, small = split.loads
    own = large.rows - staged
    to_hide = cost.cpu_attention_us(small.cpu_tokens)
    longest = max(to_hide, 2 * cost.linear_us(max(own, 1)))
    keep = most_that(lambda tokens: cost.linear_us(own + tokens) <= longest, staged)
    if keep < staged and cost.linear_us(own + keep) < to_hide:
        keep += 1
    others = sum(row.num_tokens for row in first.chunks) - staged
    trimmed = first_chunks(large, others + keep)
    beside_second = cost.linear_us(small.rows) + gpu_side_attention_us(cost, trimmed)
    if keep == staged or beside_second < cost.cpu_attention_us(large.cpu_tokens):
        return split
    cut_chunks(state, first, rows, keep)
    kept = Load.of(first.rows)
    cpu = large.rows - staged - others - len(first.gpu_decodes)
    merged = Load(kept.rows + cpu, kept.gpu_tokens, large.cpu_tokens, kept.chunks)
    return Split(split.picks, (merged, small))
