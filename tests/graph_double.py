"""A stand-in for CUDA graphs over host memory: what is captured can be done again, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

capturing: list[Graph] = []  # the one that is captured now, if any


class Graph:
    """Kernels are not run while they are captured. What torch does is, as it must give tensors,
    but these are the graph's own, and hold what the next replay computes."""

    num_replayed = 0  # of all graphs

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        assert not capturing
        Graph.num_replayed += 1
        for call in self.calls:
            call()


class _Operations(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert not str(func).startswith("aten._local_scalar_dense"), "the host reads a result"
        result = func(*args, **kwargs)

        def again() -> None:
            pairs = zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True)
            for mine, new in pairs:
                if isinstance(mine, torch.Tensor):
                    mine.copy_(new)

        self._graph.calls.append(again)
        return result


@contextlib.contextmanager
def capture(graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
    capturing.append(graph)
    try:
        with _Operations(graph):
            yield
    finally:
        capturing.pop()


def launched(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel, run or captured."""

    def launch(*args: Any) -> None:
        if capturing:
            capturing[0].calls.append(lambda: kernel(*args))
        else:
            kernel(*args)

    return launch


def not_captured(call: Callable[..., Any]) -> Callable[..., Any]:
    """What would be an error in a capture."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        assert not capturing, f"{call} in a capture"
        return call(*args, **kwargs)

    return checked
