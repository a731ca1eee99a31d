"""The interface of a pipeline: one file, one class, the order in which a pass runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from swiftapex.attention import Attention
from swiftapex.core.ops import AttentionBatch
from swiftapex.core.plan import StepPlan, StepResult, SubBatch
from swiftapex.model.stages import Stages


@dataclass(frozen=True, slots=True)
class BoundBatch:
    """A sub-batch as tensors, bound to the requests' state in the worker."""

    token_ids: Tensor  # [tokens] int64
    rotation: Tensor  # [tokens, head_dim] float32
    attention: AttentionBatch
    completing: tuple[int, ...]  # request ids whose token this pass completes
    token_indices: tuple[int, ...]  # of those tokens in their requests' outputs: 0 is the first
    last_rows: Tensor  # [completing] int64: where in the batch their last positions lie


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """What a worker hands to its pipelines."""

    stages: Stages
    attention: Attention
    bind: Callable[[SubBatch], BoundBatch]
    complete: Callable[[BoundBatch, Tensor], StepResult]  # x after the last layer -> tokens


class Pipeline(ABC):
    """Order only: stages are walked layer by layer, attention is submitted and waited for."""

    def __init__(self, parts: PipelineParts) -> None:
        self.parts = parts

    @abstractmethod
    def step(self, plan: StepPlan) -> StepResult:
        """Runs one iteration. Returns the tokens that were completed in it."""
