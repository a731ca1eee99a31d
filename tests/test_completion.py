"""Tokens that a pass completes, on their way to the host."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from swiftapex.attention import BoundBatch
from swiftapex.backends.reference import ReferenceOps
from swiftapex.core.ops import Backend
from swiftapex.core.plan import Admission, StepPlan, StepResult
from swiftapex.core.request import SamplingParams
from swiftapex.worker.completion import Completion
from swiftapex.worker.request_table import RequestTable

HIDDEN, VOCAB = 4, 7


class Late:
    """A device whose downloads are there once somebody says so, or has waited."""

    def __init__(self) -> None:
        self.is_there, self.waits = False, 0

    def upload(self, arrays: list[Any]) -> list[Tensor]:
        return [torch.from_numpy(np.asarray(array)) for array in arrays]

    def download(self, tensor: Tensor) -> LateDownload:
        return LateDownload(self, tensor)


class LateDownload:
    def __init__(self, device: Late, tensor: Tensor) -> None:
        self._device, self._tensor = device, tensor

    def is_here(self) -> bool:
        return self._device.is_there

    def wait(self) -> Tensor:
        self._device.waits += 1
        return self._tensor


def batch(*completing: int) -> BoundBatch:
    """Three tokens of request 0."""
    last = torch.tensor([2] * len(completing), dtype=torch.int64)
    none = torch.zeros(3, 0)
    tokens, indices = torch.zeros(3, dtype=torch.int64), (0,) * len(completing)
    return BoundBatch((0,), tokens, none, None, None, None, completing, indices, last, last * 0)


def completed(device: Late, *batches: BoundBatch) -> tuple[Completion, StepResult]:
    table = RequestTable(max_blocks=1)
    admitted = Admission(0, 3, SamplingParams(), 0)
    table.apply(StepPlan("sequential", (), admitted=(admitted,)))
    head = torch.eye(HIDDEN, VOCAB)
    completion = Completion(lambda x: x @ head, ReferenceOps().argmax, table, cast(Backend, device))
    x = torch.eye(3, HIDDEN)
    return completion, completion.complete([(each, x) for each in batches])


def test_a_token_is_that_of_the_last_position_and_is_waited_for() -> None:
    device = Late()
    _, result = completed(device, batch(0))
    assert result.completing == (0,) and device.waits == 0
    tokens = result.fetch()
    assert tokens.by_request == {0: 2} and tokens.done_s is None and device.waits == 1


def test_the_end_of_a_pass_without_tokens_is_waited_for_too() -> None:
    """Else its time would count as the next one's."""
    device = Late()
    completion, result = completed(device, batch())
    assert result.completing == ()
    completion.look()
    device.is_there = True
    before = time.perf_counter()
    completion.look()
    seen = time.perf_counter()
    completion.look()
    tokens = result.fetch()
    assert tokens.by_request == {} and device.waits == 1
    assert tokens.done_s is not None and before <= tokens.done_s <= seen


def test_where_nothing_ran_nothing_is_waited_for() -> None:
    device = Late()
    _, result = completed(device)
    assert result.fetch().by_request == {} and device.waits == 0


def decodes(table: RequestTable, *request_ids: int) -> BoundBatch:
    """One token of each request."""
    n = len(request_ids)
    rows, tokens = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    slots = torch.tensor([table[request_id].slot for request_id in request_ids])
    none = torch.zeros(n, 0)
    return BoundBatch(
        request_ids, tokens, none, None, None, None, request_ids, (1,) * n, rows, slots
    )


def test_tokens_of_several_batches_go_to_their_requests_and_one_that_is_none_fails_alone() -> None:
    table = RequestTable(max_blocks=1)
    admitted = tuple(Admission(i, 3, SamplingParams(), 0) for i in range(4))
    table.apply(StepPlan("sequential", (), admitted=admitted))
    head, device = torch.eye(HIDDEN, VOCAB), cast(Backend, Late())
    completion = Completion(lambda x: x @ head, ReferenceOps().argmax, table, device)
    first, second = torch.eye(3, HIDDEN), torch.eye(HIDDEN)[2:].clone()
    second[0, 0] = float("nan")
    table.last_tokens.fill_(5)
    result = completion.complete(
        [(batch(0), first), (decodes(table, 3, 1), second), (decodes(table, 2), first[1:2])]
    )
    tokens = result.fetch()
    assert result.completing == (0, 3, 1, 2)
    assert tokens.by_request == {0: 2, 1: 3, 2: 1} and set(tokens.failures) == {3}
    last = {i: int(table.last_tokens[table[i].slot]) for i in range(4)}
    assert last == {0: 2, 1: 3, 2: 1, 3: 0}, "a token that is none has to be one all the same"
