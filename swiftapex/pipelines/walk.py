"""A linear batch on its way through the layers, with the parked cohorts that ride along."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from swiftapex.attention import BoundBatch, Ticket, joined
from swiftapex.core.plan import SubBatch
from swiftapex.pipelines.base import PipelineParts


class Walk:
    """`pre(layer)` and `post(layer)` in turn take the batch through a layer.

    The batch is the sub-batch itself and, behind it, the riders: cohorts that join at `post` of the
    layer at which they were parked, go through the linear layers with everyone, and park again
    after the next `pre`. New cohorts ride from the first layer on.
    """

    def __init__(
        self,
        parts: PipelineParts,
        sub_batch: SubBatch,
        new_cohorts: Sequence[SubBatch] = (),
        *,
        index: int = 0,
        with_riders: bool = True,
    ) -> None:
        self._stages, self._plain = parts.walk_stages(index), parts.stages(index)
        self._attention = parts.attention(index)
        self._parked = parts.parked
        self._with_riders = with_riders
        self._main = parts.bind(sub_batch) if sub_batch.rows else None
        self._riders = [parts.bind(cohort) for cohort in new_cohorts]
        self._ticket: Ticket | None = None
        batches = self._batches()
        self._x = self._stages.embed(joined([b.token_ids for b in batches])) if batches else None

    @property
    def is_empty(self) -> bool:
        return self._x is None

    @property
    def decodes(self) -> BoundBatch | None:
        """The batch, if it is nothing but decodes and no cohort can join it."""
        main = self._main
        if main is None or main.staged is not None or self._riders or self._parked:
            return None
        return main if main.gpu is None or not main.gpu.chunk_lens else None

    @property
    def x(self) -> Tensor:
        """[tokens, hidden], between layers."""
        assert self._x is not None
        return self._x

    @x.setter
    def x(self, x: Tensor) -> None:
        self._x = x

    def like(self, main: BoundBatch, x: Tensor) -> Walk:
        """A walk of another batch through the same parts, without cohorts."""
        other = copy.copy(self)
        other._main, other._x, other._with_riders = main, x, False
        other._stages = self._plain
        return other

    def pre(self, layer: int) -> None:
        """Pre-projection; then attention starts, on the CPU first: riders park with their tickets,
        the sub-batch's ticket is waited for in `post`."""
        if self._x is None:
            return
        main, riders = self._main, self._riders
        if not riders and main is not None:
            qkv = self._stages.pre_attn(layer, self._x, main.rotation)
            self._ticket = self._attention.submit(layer, main, qkv)
            return
        rotation = joined([batch.rotation for batch in self._batches()])
        qkv = self._stages.pre_attn(layer, self._x, rotation)
        mine = slice(0, main.num_tokens if main is not None else 0)
        begin = mine.stop
        for rider in riders:
            rows = slice(begin, begin + rider.num_tokens)
            residual = self._x[rows].clone()  # stages may write over their input
            self._parked.park(layer, rider, residual, qkv[rows])
            begin = rows.stop
        self._riders = []
        self._x = self._x[mine] if main is not None else None
        if main is not None:
            self._ticket = self._attention.submit(layer, main, qkv[mine])

    def post(self, layer: int) -> None:
        """Waits for the sub-batch's attention, takes in the cohorts parked here whose ticket is
        ready, and runs the post-projection for all of them."""
        outputs, residuals = [], []
        if self._ticket is not None and self._x is not None:
            outputs.append(self._ticket.wait())
            residuals.append(self._x)
            self._ticket = None
        if self._with_riders and self._parked:
            for cohort, o in self._parked.rejoin(layer):
                self._riders.append(cohort.batch)
                outputs.append(o)
                residuals.append(cohort.residual)
        if outputs:
            self._x = self._stages.post_attn(layer, joined(outputs), joined(residuals))
        if self._with_riders:
            self._parked.layer_launched()

    def results(self) -> list[tuple[BoundBatch, Tensor]]:
        """After the last layer: each batch with its x [tokens, hidden]."""
        if self._x is None:
            return []
        results, begin = [], 0
        for batch in self._batches():
            results.append((batch, self._x[begin : begin + batch.num_tokens]))
            begin += batch.num_tokens
        return results

    def _batches(self) -> list[BoundBatch]:
        return ([self._main] if self._main is not None else []) + self._riders
