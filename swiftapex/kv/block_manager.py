"""Which KV blocks each request owns, on which side. Decides only; `KVStore` holds the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swiftapex.core.request import SIDES, Placement


@dataclass
class _Holding:
    side: Placement
    blocks: list[int] = field(default_factory=list)
    leaving: tuple[Placement, list[int]] | None = None  # old side and blocks, until a move retires


class BlockManager:
    """Fixed-size blocks in one pool per side. A request's KV lies whole on one side.

    Verbs come in pairs: `can_allocate` / `allocate`, `can_append` / `append`; the second of a pair
    raises ValueError where the first says False. Sizes are tokens, counts are blocks.
    """

    def __init__(self, num_blocks: Mapping[Placement, int], block_size: int) -> None:
        self.block_size = block_size
        self._total = {side: num_blocks.get(side, 0) for side in SIDES}
        # Popped from the end: the lowest free id first, so that a request's blocks tend to be
        # neighbours in memory.
        self._free = {side: list(range(n - 1, -1, -1)) for side, n in self._total.items()}
        self._holdings: dict[int, _Holding] = {}
        self._rooms: dict[int, int] = {}  # tokens for which each one's blocks have room
        self._num_leaving = dict.fromkeys(SIDES, 0)  # old blocks that a copy still reads

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_total(self, side: Placement) -> int:
        return self._total[side]

    def num_free(self, side: Placement) -> int:
        return len(self._free[side])

    def num_owned(self, side: Placement) -> int:
        """Blocks of the requests that are on this side, those not counted that they have left."""
        return self._total[side] - len(self._free[side]) - self._num_leaving[side]

    def num_blocks_of(self, request_id: int) -> int:
        """As many as `owned` lists."""
        holding = self._holdings.get(request_id)
        return len(holding.blocks) if holding else 0

    def rooms_of(self, request_ids: Iterable[int]) -> list[int]:
        """Tokens for which each request's blocks have room in all."""
        return list(map(self._rooms.__getitem__, request_ids))

    def owners(self) -> set[int]:
        return set(self._holdings)

    def owned(self, request_id: int) -> tuple[int, ...]:
        holding = self._holdings.get(request_id)
        return tuple(holding.blocks) if holding else ()

    def can_allocate(self, side: Placement, num_tokens: int) -> bool:
        return self.blocks_for(num_tokens) <= len(self._free[side])

    def allocate(self, request_id: int, side: Placement, num_tokens: int) -> tuple[int, ...]:
        """Gives a request that owns nothing the blocks for `num_tokens` tokens."""
        if request_id in self._holdings:
            raise ValueError(f"request {request_id} already owns blocks")
        if not self.can_allocate(side, num_tokens):
            raise ValueError(
                f"request {request_id} needs {self.blocks_for(num_tokens)} {side.value} blocks, "
                f"{len(self._free[side])} are free"
            )
        self._holdings[request_id] = _Holding(side)
        return self._grow(request_id, num_tokens)

    def can_append(self, request_id: int, num_tokens: int) -> bool:
        """Whether the request can come to hold `num_tokens` tokens in all."""
        holding = self._holdings[request_id]
        missing = self.blocks_for(num_tokens) - len(holding.blocks)
        return missing <= len(self._free[holding.side])

    def append(self, request_id: int, num_tokens: int) -> tuple[int, ...]:
        """Grows a request to hold `num_tokens` tokens in all; returns the blocks it gained."""
        if not self.can_append(request_id, num_tokens):
            raise ValueError(f"no free block for request {request_id} at {num_tokens} tokens")
        return self._grow(request_id, num_tokens)

    def append_one(self, request_ids: Sequence[int]) -> list[int]:
        """Another block for each of these requests, which are on one side, as far as there are
        free ones; returns the blocks, in order."""
        if not request_ids:
            return []
        side = self._holdings[request_ids[0]].side
        gained = self._take(side, min(len(self._free[side]), len(request_ids)))
        for request_id, block in zip(request_ids, gained, strict=False):
            self._holdings[request_id].blocks.append(block)
            self._rooms[request_id] += self.block_size
        return gained

    def can_move(self, request_id: int, target: Placement) -> bool:
        return len(self._holdings[request_id].blocks) <= len(self._free[target])

    def begin_move(self, request_id: int, target: Placement) -> tuple[int, ...]:
        """Gives the request as many blocks on the other side; returns them. The old ones count as
        owned until `finish_move`: until then the copy reads them."""
        holding = self._holdings[request_id]
        if holding.leaving is not None or holding.side is target:
            raise ValueError(f"request {request_id} cannot move to {target.value} now")
        if not self.can_move(request_id, target):
            raise ValueError(f"no room on {target.value} for request {request_id}")
        holding.leaving = (holding.side, holding.blocks)
        self._num_leaving[holding.side] += len(holding.blocks)
        holding.side, holding.blocks = target, self._take(target, len(holding.blocks))
        return tuple(holding.blocks)

    def finish_move(self, request_id: int) -> None:
        """The copy has retired: takes back the blocks that the request has left."""
        holding = self._holdings[request_id]
        assert holding.leaving is not None, f"request {request_id} is not moving"
        side, blocks = holding.leaving
        holding.leaving = None
        self._num_leaving[side] -= len(blocks)
        self._free[side].extend(reversed(blocks))

    def free(self, request_id: int) -> None:
        """Takes back all blocks of a request. A request that owns none is no error."""
        holding = self._holdings.get(request_id)
        if holding is not None:
            if holding.leaving is not None:
                self.finish_move(request_id)
            self._free[holding.side].extend(reversed(holding.blocks))
            del self._holdings[request_id], self._rooms[request_id]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or owned, exactly once."""
        rooms = {i: len(h.blocks) * self.block_size for i, h in self._holdings.items()}
        assert self._rooms == rooms, "rooms do not fit the blocks"
        for side in SIDES:
            owned = [b for h in self._holdings.values() if h.side is side for b in h.blocks]
            leaving = [h.leaving for h in self._holdings.values() if h.leaving is not None]
            owned += [b for from_side, blocks in leaving if from_side is side for b in blocks]
            found = sorted(self._free[side] + owned)
            assert found == list(range(self._total[side])), (
                f"{side.value} blocks: {len(self._free[side])} free and {len(owned)} owned "
                f"do not make {self._total[side]}"
            )

    def _grow(self, request_id: int, num_tokens: int) -> tuple[int, ...]:
        holding = self._holdings[request_id]
        missing = max(0, self.blocks_for(num_tokens) - len(holding.blocks))
        gained = self._take(holding.side, missing)
        holding.blocks += gained
        self._rooms[request_id] = len(holding.blocks) * self.block_size
        return tuple(gained)

    def _take(self, side: Placement, count: int) -> list[int]:
        """The next `count` free blocks; there are as many."""
        pool = self._free[side]
        taken = pool[len(pool) - count :][::-1]
        del pool[len(pool) - count :]
        return taken
