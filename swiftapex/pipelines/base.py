"""The interface of a pipeline: one file, one class, the order in which a pass runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from swiftapex.attention import Attention, BoundBatch
from swiftapex.core.plan import StepPlan, StepResult, SubBatch
from swiftapex.model.stages import Stages
from swiftapex.pipelines.parked import ParkedCohorts

if TYPE_CHECKING:
    from swiftapex.pipelines.repeated import RepeatedPasses


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """What a worker hands to its pipelines. `stages` and `attention` take the number of the
    sub-batch that they work for, so that a trace can tell the sub-batches apart. What
    `walk_stages` gives serves one batch only, layer by layer, and may replay what it recorded."""

    num_layers: int
    stages: Callable[[int], Stages]
    walk_stages: Callable[[int], Stages]
    attention: Callable[[int], Attention]
    parked: ParkedCohorts
    repeated: RepeatedPasses
    bind: Callable[[SubBatch], BoundBatch]
    complete: Callable[[Sequence[tuple[BoundBatch, Tensor]]], StepResult]
    """(batch, x [tokens, hidden] after the last layer) pairs -> the tokens they complete."""


class Pipeline(ABC):
    """Order only: stages are walked layer by layer, attention is submitted and waited for.

    A pipeline keeps no state between steps: what outlives one is parked in `parts.parked`, and
    rides along whichever pipeline runs next.
    """

    def __init__(self, parts: PipelineParts) -> None:
        self.parts = parts

    @abstractmethod
    def step(self, plan: StepPlan) -> StepResult:
        """Runs one iteration. Returns the tokens that were completed in it."""
