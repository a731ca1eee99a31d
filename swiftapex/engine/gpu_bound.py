"""Requests that can start on the GPU alone, whatever the policy: the way to the CPU is too narrow
for them. They are accepted, so somebody has to say it."""

from __future__ import annotations

from swiftapex.core.request import Placement, Request
from swiftapex.kv.sizing import gpu_tokens_for_staging
from swiftapex.scheduler.state import SchedulerState


class GpuBound:
    """Counts them, among the requests that an engine with a CPU side accepted."""

    def __init__(self, state: SchedulerState, num_layers: int) -> None:
        self._state = state
        self._num_layers = num_layers
        self._accepted = self._bound = self._most_tokens = 0

    def note(self, request: Request) -> None:
        """A request that was accepted under a policy that uses the CPU."""
        if self._state.blocks.num_total(Placement.CPU) == 0:
            return
        self._accepted += 1
        if not self._state.fits_alone(request, Placement.STAGING):
            self._bound += 1
            self._most_tokens = max(self._most_tokens, self._state.tokens_at_most(request))

    def words(self) -> str | None:
        """How many, why, and what would change it; None where there was none."""
        if self._bound == 0:
            return None
        state, size = self._state, self._state.blocks.block_size
        staging, cpu = state.limits.staging_blocks, state.blocks.num_total(Placement.CPU)
        needed = state.blocks.blocks_for(self._most_tokens)
        remedies = []
        if staging < needed:
            enough = gpu_tokens_for_staging(needed, self._num_layers, size)
            remedies.append(f"gpu.kv_tokens of {enough:,}, with which the staging area grows")
        if cpu < needed:
            remedies.append(f"cpu.kv_tokens of {needed * size:,}")
        return (
            f"{self._bound:,} of {self._accepted:,} requests could start on the GPU only, whatever "
            f"the policy: prompt and output of the longest are {self._most_tokens:,} tokens, "
            f"{needed:,} KV blocks of {size}, where the CPU has {cpu:,} and the staging area, "
            f"through which prompts go there, {staging:,}. All could have gone to the CPU with "
            f"{' and '.join(remedies)}; or ask for shorter prompts and outputs."
        )
