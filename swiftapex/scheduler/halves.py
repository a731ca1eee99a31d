"""Two sub-batches that take in CPU decodes one after the other, as `split.py` has them do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from swiftapex.cost_model import CostModel, Load, cpu_side_attention_us, gpu_side_attention_us

_SAMPLE = 16  # decodes by which the CPU's time for one is told


@dataclass(slots=True)
class _Half:
    """One of them, with all that it holds now."""

    rows: int
    room: int  # rows that still fit
    cpu_decodes: int
    cpu_tokens: int  # of KV that these read
    attention_us: float  # T_ca
    picks: list[int] = field(default_factory=list)  # candidates that it took
    beside_us: float = 0.0  # the GPU's work that hides T_ca
    spare_us: float = 0.0  # what that leaves the CPU

    def put(self, start: int, count: int, tokens: int) -> None:
        """Takes in `count` candidates from `start` on."""
        if count == 1:
            self.picks.append(start)
        else:
            self.picks.extend(range(start, start + count))
        self.rows += count
        self.room -= count
        self.cpu_decodes += count
        self.cpu_tokens += tokens


class Halves:
    """Sub-batch 0, which starts as `main`, and sub-batch 1, with room for `rooms` more rows."""

    def __init__(self, cost: CostModel, main: Load, rooms: tuple[int, int]) -> None:
        self._cpu_us, self._linear_us = cost.cpu_attention_us, cost.linear_us
        self._hand_off_us = cost.hand_off_us
        self._main = main
        self._gpu_attention_us = gpu_side_attention_us(cost, main)
        attention_us = cpu_side_attention_us(cost, main)
        self._first = _Half(main.rows, rooms[0], main.cpu_requests, main.cpu_tokens, attention_us)
        self._second = _Half(0, rooms[1], 0, 0, 0.0)
        for half in (self._first, self._second):
            self._lengthen(half)

    def group_size(self) -> int:
        """How many candidates may be tried together, after the first one: half of those that, as
        long as the ones so far, the CPU has time for beside one half."""
        first, second = self._first, self._second
        reads = first.cpu_tokens + second.cpu_tokens - self._main.cpu_tokens
        count = len(first.picks) + len(second.picks)
        us = self._cpu_us(_SAMPLE * reads // count, _SAMPLE) / _SAMPLE
        spare = max(first.spare_us, second.spare_us)
        most = max(first.room, second.room)
        return max(1, min(int(spare / us) if us > 0 else _SAMPLE, most) // 2)

    def fits(self, tokens: int) -> bool:
        """Whether `take` would put a candidate of so many tokens somewhere."""
        first, second = self._first, self._second
        if first.beside_us >= self._us_with(first, 1, tokens):
            return True
        return second.beside_us >= self._us_with(second, 1, tokens)

    def take(self, start: int, count: int, tokens: int, must: bool = False) -> bool:
        """Puts `count` candidates from `start` on, which read `tokens` tokens together, where the
        CPU has more time left: if it has any for them, or they `must`."""
        best, other = self._first, self._second
        if other.spare_us >= best.spare_us:
            best, other = other, best
        us = self._us_with(best, count, tokens)
        spare = best.beside_us - us
        if other.spare_us > spare:  # it will have less than now
            other_us = self._us_with(other, count, tokens)
            if other.beside_us - other_us > spare:
                best, us, spare = other, other_us, other.beside_us - other_us
        if count > best.room or (spare < 0 and not must):
            return False
        best.put(start, count, tokens)
        best.attention_us, best.spare_us = us, spare
        self._lengthen(best)
        return True

    def share_out(self, contexts: Iterable[int]) -> None:
        """All candidates that there is room for, each to the half that reads fewer tokens."""
        for index, tokens in enumerate(contexts):
            open_halves = [half for half in (self._second, self._first) if half.room > 0]
            if not open_halves:
                break
            min(open_halves, key=lambda half: half.cpu_tokens).put(index, 1, tokens)

    @property
    def picks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self._first.picks), tuple(self._second.picks)

    @property
    def loads(self) -> tuple[Load, Load]:
        first, second, main = self._first, self._second, self._main
        added = first.cpu_tokens - main.cpu_tokens
        return (
            main.with_cpu_decodes(added, len(first.picks)),
            Load().with_cpu_decodes(second.cpu_tokens, len(second.picks)),
        )

    def _us_with(self, half: _Half, count: int, tokens: int) -> float:
        """T_ca of a half with `count` candidates more; infinite where it has no room for them."""
        if count > half.room:
            return inf
        return self._cpu_us(half.cpu_tokens + tokens, half.cpu_decodes + count)

    def _lengthen(self, half: _Half) -> None:
        """What the GPU does for this half has become longer, which hides the other's attention:
        T_l1 + T_ga0 what the CPU does for the first half, T_l0 what for the second."""
        us = self._linear_us(half.rows) + self._hand_off_us(half.cpu_decodes)
        other = self._second
        if half is other:
            other, us = self._first, us + self._gpu_attention_us
        other.beside_us, other.spare_us = us, us - other.attention_us
