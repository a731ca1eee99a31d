"""What the workers have not been told yet."""

from __future__ import annotations

from typing import Any

from swiftapex.core.plan import Admission, Move
from swiftapex.core.request import Request


class News:
    """What became of requests and their blocks since the last plan: the next one carries it."""

    def __init__(self) -> None:
        self._admitted: dict[int, Admission] = {}
        self._new_blocks: dict[int, tuple[int, ...]] = {}
        self._moves: list[Move] = []
        self.num_moved_blocks = 0  # blocks of KV that go to the other side
        self._released: list[int] = []
        self._dropped: list[int] = []

    def admit(self, request: Request) -> None:
        last_token = request.output_ids[-1] if request.output_ids else 0
        self._admitted[request.request_id] = Admission(
            request.request_id, len(request.prompt_ids), request.sampling, last_token
        )

    def gain(self, request_id: int, blocks: tuple[int, ...]) -> None:
        """The request owns these blocks behind those that it has."""
        if blocks:
            self._new_blocks[request_id] = self._new_blocks.get(request_id, ()) + blocks

    def move(self, move: Move) -> None:
        self._moves.append(move)
        self.num_moved_blocks += len(move.source_blocks)

    def drop(self, request_id: int) -> None:
        """It ended in flight."""
        self._dropped.append(request_id)

    def release(self, request_id: int) -> None:
        """A request that no plan has named yet is forgotten; workers hear of the others."""
        self._new_blocks.pop(request_id, None)
        if self._admitted.pop(request_id, None) is None:
            self._released.append(request_id)

    def take(self) -> dict[str, Any]:
        """All of it, once: these fields of a `StepPlan`, none where nothing has happened."""
        happened = self._new_blocks, self._moves, self._admitted, self._released, self._dropped
        if not any(happened):
            return {}
        told: dict[str, Any] = {
            "moves": tuple(self._moves),
            "admitted": tuple(self._admitted.values()),
            "new_blocks": dict(self._new_blocks),
            "released": tuple(self._released),
            "dropped": tuple(self._dropped),
        }
        for each in happened:
            each.clear()
        self.num_moved_blocks = 0
        return told
