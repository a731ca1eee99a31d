"""The ranks' common operations over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from swiftapex.core.errors import EngineError

# The name since torch 2.13; the old one warns.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_LOOPBACK = "127.0.0.1"  # all ranks are on one machine


class PeerLostError(EngineError):
    """A common operation failed: as a rule another rank is gone."""


def open_store() -> TCPStore:
    """Where the ranks meet, at a port that was free. Rank 0 holds it as long as the group lives."""
    return TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)


def join_store(port: int, timeout_s: float) -> TCPStore:
    """The store that rank 0 opened."""
    return TCPStore(_LOOPBACK, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


class TorchGroup:
    """`core.ops.Group` of this process. One per process; `close` ends it.

    `timeout_s`: how long an operation waits for the other ranks. That one of them has died is seen
    at once by gloo, whose connection breaks.
    """

    def __init__(
        self, store: TCPStore, device: str, rank: int, size: int, timeout_s: float
    ) -> None:
        self._size = size
        self._store = store
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", torch.cuda.current_device())
            if device == "cuda"
            else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        with _peers_needed():
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        n, part = x.shape
        gathered = torch.empty((self._size, n, part), dtype=x.dtype, device=x.device)
        with _peers_needed():
            _gather_into(gathered.view(-1, part), x.contiguous())
        return gathered.transpose(0, 1).reshape(n, self._size * part)

    def close(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _peers_needed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"another rank does not answer: {error}") from error
