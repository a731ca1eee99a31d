"""Copies of KV blocks beside the launching thread: conversion and order."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from swiftapex.backends.cpu_lane import CopyLane
from tests.lane_cases import DTYPES, word


@pytest.fixture
def copies() -> Iterator[CopyLane]:
    copies = CopyLane()
    yield copies
    copies.close()


def test_copies_are_never_overtaken(copies: CopyLane) -> None:
    late = word()
    blocks = torch.arange(4.0).view(4, 1, 1, 1, 1).repeat(1, 2, 2, 16, 8)
    first = copies.submit(blocks, [0], blocks, [1], arrival=late)
    second = copies.submit(blocks, [1], blocks, [2])
    time.sleep(0.01)
    assert not first.ready() and not second.ready()
    late.fill_(1)
    second.wait()
    assert first.ready() and torch.all(blocks[:3] == 0) and torch.all(blocks[3] == 3)


@pytest.mark.parametrize("target_dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_copies_convert(
    copies: CopyLane, source_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    source = torch.randn(6, 2, 2, 16, 24).mul_(1000).to(source_dtype)
    source[2, 0, 0, 0, :4] = torch.tensor([0.0, -0.0, 6e-8, float("inf")])
    target = torch.full((9, 2, 2, 16, 24), -1.0).to(target_dtype)
    want = target.clone()
    want[[8, 0, 3]] = source[[2, 5, 0]].to(target_dtype)
    ticket = copies.submit(source, [2, 5, 0], target, [8, 0, 3])
    assert ticket.wait() is None
    assert torch.equal(target, want)
    start, end = ticket.span()
    assert 0 < end - start < 10 and copies.busy_s > 0


def test_copies_of_unknown_blocks(copies: CopyLane) -> None:
    source, target = torch.ones(3, 1, 2, 16, 8), torch.zeros(2, 1, 2, 16, 8)
    for source_blocks, target_blocks in (([0, 3], [0, 1]), ([0, 1], [0, -1])):
        with pytest.raises(IndexError, match="block"):
            copies.submit(source, source_blocks, target, target_blocks).wait()
    with pytest.raises(ValueError, match="as many"):
        copies.submit(source, [0, 1], target, [0]).wait()
    with pytest.raises(ValueError, match="do not fit"):
        copies.submit(source, [0], target[:, :, :1], [0])
    assert torch.all(target == 0)
    copies.submit(source, [], target, []).wait()
