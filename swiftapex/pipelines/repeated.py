"""Work whose shape repeats: a device may record it and replay it, a whole pass or the layer math
between two attention calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swiftapex.model.stages import Stages
from swiftapex.pipelines.walk import Walk


class RepeatedPasses(Protocol):
    def run(self, layers: Callable[..., None], *walks: Walk) -> None:
        """Takes `walks` through all layers as `layers(*walks)` does, which is the same function
        each time and reads nothing but its arguments and the worker's lasting state."""

    def forget(self) -> None:
        """What was recorded is not replayed any more: KV is about to lie elsewhere."""


class EachPassAnew:
    """For devices that record nothing."""

    def run(self, layers: Callable[..., None], *walks: Walk) -> None:
        layers(*walks)

    def forget(self) -> None:
        pass


class RecordedSegments(Protocol):
    def walk_stages(self, plain: Stages) -> Stages:
        """Does what `plain` does, for one batch on its way through the layers."""


class NothingRecorded:
    """For devices that record nothing."""

    def walk_stages(self, plain: Stages) -> Stages:
        return plain
