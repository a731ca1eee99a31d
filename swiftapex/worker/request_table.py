"""What a worker keeps about each admitted request between iterations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from swiftapex.core.plan import Admission, StepPlan
from swiftapex.core.request import SamplingParams

_FIRST_SLOTS = 64


@dataclass(slots=True)
class RequestEntry:
    slot: int
    prompt_len: int
    sampling: SamplingParams
    num_blocks: int = 0


class RequestTable:
    """Slots with a block table and the last sampled token each; slots are reused after release.

    block_table [slots, max_blocks] int32 and last_tokens [slots] int64 grow by doubling.
    """

    def __init__(self, max_blocks: int, device: torch.device | str = "cpu") -> None:
        self.block_table = np.zeros((_FIRST_SLOTS, max_blocks), dtype=np.int32)
        self.last_tokens = torch.zeros(_FIRST_SLOTS, dtype=torch.int64, device=device)
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._entries: dict[int, RequestEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, request_id: int) -> RequestEntry:
        return self._entries[request_id]

    def apply(self, plan: StepPlan) -> None:
        """Takes in what a plan says about requests: released, admitted, new blocks."""
        for request_id in plan.released:
            self._free.append(self._entries.pop(request_id).slot)
        for admission in plan.admitted:
            self._admit(admission)
        for move in plan.moves:
            self._entries[move.request_id].num_blocks = 0
            self._append_blocks(move.request_id, move.target_blocks)
        for request_id, blocks in plan.new_blocks.items():
            self._append_blocks(request_id, blocks)

    def _admit(self, admission: Admission) -> None:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        # Read if recomputing ends one token short of the newest: then the next step is a decode.
        # Filled: to assign a number is a copy from memory that is not pinned, which waits for all
        # that was launched.
        self.last_tokens[slot].fill_(admission.last_token)
        self._entries[admission.request_id] = RequestEntry(
            slot, admission.prompt_len, admission.sampling
        )

    def _append_blocks(self, request_id: int, blocks: tuple[int, ...]) -> None:
        entry = self._entries[request_id]
        end = entry.num_blocks + len(blocks)
        self.block_table[entry.slot, entry.num_blocks : end] = blocks
        entry.num_blocks = end

    def _grow(self) -> None:
        slots = len(self.last_tokens)
        self.block_table = np.concatenate((self.block_table, np.zeros_like(self.block_table)))
        self.last_tokens = torch.cat((self.last_tokens, torch.zeros_like(self.last_tokens)))
        self._free.extend(range(2 * slots - 1, slots - 1, -1))
