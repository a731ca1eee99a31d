"""What the tests of the CUDA kernels share: the module, or one line that says why they skip."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("the CUDA kernels need an NVIDIA GPU", allow_module_level=True)
kernels = pytest.importorskip(
    "swiftapex._kernels_cuda", reason="swiftapex was built without its CUDA kernels"
)

# Cases that scripts/sanitize_cuda.sh runs: small, and without words that the host sets.
sanitize = pytest.mark.sanitize
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPES = tuple(NUMBERS)
# Of a result computed in float32 from stored inputs and rounded to the dtype once or twice.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def strided(x: Tensor, extra: int) -> Tensor:
    """x [n, ...] with rows `extra` elements further apart, NaN between them."""
    rows = x.reshape(x.shape[0], -1)
    buffer = poisoned(rows.shape[0], rows.shape[1] + extra, dtype=x.dtype)
    buffer[:, : rows.shape[1]] = rows
    return buffer[:, : rows.shape[1]].unflatten(1, x.shape[1:])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Element by element, relative to the expected value or, near zero, to the row's size."""
    rows = expected.double().reshape(expected.shape[0], -1)
    size = rows.square().mean(1, keepdim=True).sqrt()
    error = (actual.double().reshape_as(rows) - rows).abs() / (rows.abs() + size + 1e-30)
    assert not error.isnan().any(), "an element was not written, or is NaN"
    assert error.max() <= tolerance, f"error {error.max():.2e}, tolerance {tolerance:.2e}"


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the work, which has not run yet."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    return graph
