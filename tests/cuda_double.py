"""A stand-in for a GPU: the CUDA backend's Python code runs on host memory, in order.

`kernels` has the functions of swiftapex._kernels_cuda in plain torch; `torch_on_host` is torch with
`torch.cuda` replaced. What the real kernels compute is tested in tests/cuda, where there is a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from swiftapex.backends import Backends
from swiftapex.backends.reference import ReferenceOps, causal_attention, gather, split_heads
from swiftapex.backends.threads import cpu_threads
from swiftapex.core.ops import AttentionShape
from tests.graph_double import Graph, capture, launched, not_captured

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TRITON = "swiftapex.backends.prefill_attention"
_NAMES = ("cuda_ops", "cuda", "cuda_bounce", "cuda_hand_off", "cuda_lane", "cuda_graphs")
_NAMES += ("cuda_clock", "cuda_memory")
_OPS = ReferenceOps()


def _at(address: int, dtype: torch.dtype, *size: int, stride: tuple[int, ...] = ()) -> Tensor:
    """The tensor at an address of host memory."""
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    strides = stride or torch.empty(size, device="meta").stride()
    count = 1 + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(size, strides)


def rms_norm(
    dtype: int, x: int, weight: int, y: int, n: int, heads: int, dim: int, *rest: Any
) -> None:
    x_n, x_head, y_n, y_head, eps, _ = rest
    kind = _DTYPES[dtype]
    source = _at(x, kind, n, heads, dim, stride=(x_n, x_head, 1))
    target = _at(y, kind, n, heads, dim, stride=(y_n, y_head, 1))
    target.copy_(_OPS.rms_norm(source.clone(), _at(weight, kind, dim), eps))


def silu_mul(dtype: int, gate_up: int, y: int, n: int, inner: int, *rest: int) -> None:
    stride, y_stride, _ = rest
    source = _at(gate_up, _DTYPES[dtype], n, 2 * inner, stride=(stride, 1))
    _at(y, _DTYPES[dtype], n, inner, stride=(y_stride, 1)).copy_(_OPS.silu_mul(source))


def argmax(dtype: int, x: int, indices: int, invalid: int, n: int, dim: int, *rest: int) -> None:
    best, bad = _OPS.argmax(_at(x, _DTYPES[dtype], n, dim, stride=(rest[0], 1)))
    _at(indices, torch.int64, n).copy_(best)
    _at(invalid, torch.bool, n).copy_(bad)


def rope_append(
    dtype: int, kv_dtype: int, qkv: int, rotation: int, slots: int, kv: int, n: int, *rest: int
) -> None:
    q_heads, kv_heads, dim, stride, block_size, _ = rest
    heads = q_heads + 2 * kv_heads
    rows = _at(qkv, _DTYPES[dtype], n, heads, dim, stride=(stride, dim, 1))
    if rotation:
        _OPS.rope(rows[:, : q_heads + kv_heads], _at(rotation, torch.float32, n, dim))
    if not slots:
        return
    for row, slot in zip(rows, _at(slots, torch.int64, n).tolist(), strict=True):
        if slot >= 0:
            size = kv_heads * 2 * block_size * dim
            address = kv + slot // block_size * size * _DTYPES[kv_dtype].itemsize
            block = _at(address, _DTYPES[kv_dtype], kv_heads, 2, block_size, dim)
            block[:, 0, slot % block_size] = row[q_heads : q_heads + kv_heads].to(block.dtype)
            block[:, 1, slot % block_size] = row[q_heads + kv_heads :].to(block.dtype)


def decode_attention_workspace(*sizes: int) -> int:
    return 16


def decode_attention_plan_bytes(num_ctas: int) -> int:
    return 64


def decode_attention(
    dtype: int,
    kv_dtype: int,
    q: int,
    kv: int,
    table: int,
    lens: int,
    out: int,
    workspace: int,
    n: int,
    *rest: Any,
) -> None:
    q_heads, kv_heads, dim, block_size, width, q_stride, out_stride, scale, _, plan, planned, _ = (
        rest
    )
    # As the kernels' plan does, it tells one batch from another.
    key, kept = hash((table, *_at(lens, torch.int32, n).tolist())), _at(plan, torch.int64, 1)
    if planned:
        assert kept.item() == key, "the plan is another batch's"
    kept.fill_(key)
    kind = _DTYPES[dtype]
    queries = _at(q, kind, n, q_heads, dim, stride=(q_stride, dim, 1))
    outputs = _at(out, kind, n, q_heads, dim, stride=(out_stride, dim, 1))
    blocks = _at(table, torch.int32, n, width)
    for i, context in enumerate(_at(lens, torch.int32, n).tolist()):
        if context == 0:  # of a recorded pass: nobody reads what comes of it
            outputs[i] = torch.nan
            continue
        used = blocks[i, : -(-context // block_size)]
        size = (int(used.max()) + 1, kv_heads, 2, block_size, dim)
        k, v = gather(_at(kv, _DTYPES[kv_dtype], *size), used, context)
        outputs[i] = causal_attention(queries[i : i + 1], k, v, scale)[0]


def gather_rows(
    src: int, dst: int, n: int, row: int, src_stride: int, dst_stride: int, arrival: int, *_: int
) -> None:
    _copy_rows(src, dst, n, row, src_stride, dst_stride)
    _at(arrival, torch.int32, 1).fill_(1)


def scatter_rows(
    src: int, dst: int, n: int, row: int, src_stride: int, dst_stride: int, done: int, *_: int
) -> None:
    _copy_rows(src, dst, n, row, src_stride, dst_stride)
    _at(done, torch.int32, 1).fill_(0)


def _copy_rows(src: int, dst: int, n: int, row: int, src_stride: int, dst_stride: int) -> None:
    source = _at(src, torch.uint8, n, row, stride=(src_stride, 1))
    _at(dst, torch.uint8, n, row, stride=(dst_stride, 1)).copy_(source)


def wait_word(word: int, value: int, stream: int) -> None:
    while int(_at(word, torch.int32, 1)) != value:
        time.sleep(1e-5)


def write_word(word: int, value: int, stream: int) -> None:
    _at(word, torch.int32, 1).fill_(value)


def copy_blocks(
    src_dtype: int,
    dst_dtype: int,
    src: int,
    dst: int,
    src_ids: int,
    dst_ids: int,
    pairs: int,
    size: int,
    *_: int,
) -> None:
    sources = _at(src_ids, torch.int64, pairs).tolist()
    targets = _at(dst_ids, torch.int64, pairs).tolist()
    src_bytes, dst_bytes = (size * _DTYPES[d].itemsize for d in (src_dtype, dst_dtype))
    for i, j in zip(sources, targets, strict=True):
        block = _at(src + i * src_bytes, _DTYPES[src_dtype], size)
        _at(dst + j * dst_bytes, _DTYPES[dst_dtype], size).copy_(block)


def transfer_blocks(
    src: int, dst: int, src_ids: Sequence[int], dst_ids: Sequence[int], size: int, stream: int
) -> None:
    for i, j in zip(src_ids, dst_ids, strict=True):
        _at(dst + j * size, torch.uint8, size).copy_(_at(src + i * size, torch.uint8, size))


def prefill_attention(
    kv: Tensor, blocks: Tensor, context: int, shape: AttentionShape, qkv: Tensor, out: Tensor
) -> None:
    keys, values = gather(kv, blocks, context)
    q, _, _ = split_heads(qkv, shape)
    out.copy_(causal_attention(q, keys, values, shape.scale).reshape(len(qkv), -1))


_LAUNCHED = (
    rms_norm,
    silu_mul,
    argmax,
    rope_append,
    decode_attention,
    gather_rows,
    scatter_rows,
    wait_word,
    write_word,
    copy_blocks,
    transfer_blocks,
)


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._time = 0.0

    @not_captured
    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other._time - self._time)

    @not_captured
    def query(self) -> bool:
        return True

    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...


class _Stream:
    cuda_stream = 0

    def __init__(self, device: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: object) -> None: ...


class DeviceDouble:
    """Memory of the stand-in, which holds what a test says."""

    def __init__(self) -> None:
        self.total, self.others = 1 << 30, 0  # others: what is not this process's tensors
        self.reserved = self.peak = 0

    @property
    def free(self) -> int:
        return self.total - self.others - self.reserved

    def use(self, more: int = 0, for_good: bool = False) -> None:
        """A new peak begins, at `more` bytes over what is reserved, which stays or not."""
        self.peak = self.reserved + more
        self.reserved += more if for_good else 0


class RuntimeDouble:
    """Host memory that is pinned: pieces, by their address. `failing`: which of the calls to come,
    counted from 0, has an error."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.failing: int | None = None
        self._mutex = threading.Lock()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        with self._mutex:
            if self.failing is not None:
                self.failing -= 1
            if self.failing == -1:
                return 2
            self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(begin <= address < begin + size for begin, size in self.pinned.items())


def _unpinned(make: Any) -> Any:
    pinned = not_captured(make)
    return lambda *size, pin_memory=False, **kwargs: (
        pinned(*size, **kwargs) if pin_memory else make(*size, **kwargs)
    )


def torch_on_host() -> Any:
    host = types.SimpleNamespace()
    host.__dict__.update({name: getattr(torch, name) for name in dir(torch)})
    host.device = lambda *_: torch.device("cpu")
    host.empty, host.zeros = _unpinned(torch.empty), _unpinned(torch.zeros)
    host.tensor = torch.tensor
    host._C = types.SimpleNamespace(
        _cuda_getDevice=lambda: 0, _cuda_getCurrentRawStream=lambda _: 0
    )
    runtime = RuntimeDouble()
    memory = DeviceDouble()
    host.cuda = types.SimpleNamespace(
        memory=memory,
        empty_cache=lambda: None,
        mem_get_info=lambda *_: (memory.free, memory.total),
        memory_reserved=lambda *_: memory.reserved,
        max_memory_reserved=lambda *_: memory.peak,
        reset_peak_memory_stats=lambda *_: memory.use(),
        current_device=lambda: 0,
        set_per_process_memory_fraction=lambda *_: None,
        get_device_properties=lambda _: types.SimpleNamespace(
            total_memory=memory.total, multi_processor_count=4
        ),
        Stream=_Stream,
        Event=_Event,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda *_: _Stream(),
        synchronize=not_captured(lambda *_: None),
        cudart=lambda: runtime,
        CUDAGraph=Graph,
        graph=capture,
        graph_pool_handle=object,
    )
    return host


def maker(modules: dict[str, Any], **more: Any) -> Callable[[Any, bool], Backends]:
    """`swiftapex.backends.make_backends` over the stand-in, one attention thread."""

    def make(engine: Any, with_cpu_side: bool) -> Backends:
        gpu = modules["cuda"].CudaBackend(memory=engine.gpu.memory)
        lane = copies = None
        if with_cpu_side:
            lane = modules["cuda_lane"].CudaCpuLane(cpu_threads(1), gpu.device)
            copies = modules["cuda_lane"].CudaCopies(gpu.device)
        repeated = functools.partial(modules["cuda_graphs"].CudaGraphs, gpu.stream, lane)
        return Backends(
            gpu=gpu,
            cpu_attention=lane,
            copies=copies,
            clock=modules["cuda_clock"].CudaClock(),
            progress=modules["cuda_clock"].CudaProgress(),
            memory=modules["cuda_memory"].CudaMemory(gpu.device, engine.gpu.memory),
            active=gpu.active,
            finish=gpu.stream.synchronize,
            **{"repeated": repeated} | more,
        )

    return make


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@contextlib.contextmanager
def cuda_modules() -> Iterator[dict[str, Any]]:
    """swiftapex.backends.cuda* over the stand-in, by their last name; gone afterwards."""
    kernels = types.ModuleType("swiftapex._kernels_cuda")
    kernels.__spec__ = ModuleSpec("swiftapex._kernels_cuda", None)
    kernels.__dict__.update({kernel.__name__: launched(kernel) for kernel in _LAUNCHED})
    kernels.__dict__["decode_attention_workspace"] = decode_attention_workspace
    kernels.__dict__["decode_attention_plan_bytes"] = decode_attention_plan_bytes
    triton = types.ModuleType(_TRITON)  # Triton comes with CUDA builds of torch alone
    triton.__dict__["prefill_attention"] = prefill_attention
    triton.__dict__["compile_prefill_attention"] = lambda *_: None
    full = {name: f"swiftapex.backends.{name}" for name in _NAMES}
    host = torch_on_host()
    import swiftapex

    # Only these modules come and go: what they make others import for good must stay imported.
    changed = [*full.values(), "swiftapex._kernels_cuda", _TRITON]
    before = {name: sys.modules.pop(name, None) for name in changed}
    sys.modules["swiftapex._kernels_cuda"] = kernels
    sys.modules[_TRITON] = triton
    on_device: list[Tensor] = []  # kept alive, so that no host memory gets their addresses
    is_cpu = property(lambda self: not any(_same_memory(self, tensor) for tensor in on_device))
    with (
        mock.patch.object(swiftapex, "_kernels_cuda", kernels, create=True),
        mock.patch.object(Tensor, "pin_memory", lambda self: self),
        mock.patch.object(Tensor, "is_pinned", lambda self: host.cuda.cudart().is_pinned(self)),
        mock.patch.object(Tensor, "is_cpu", is_cpu),
    ):
        modules = {}
        for name in _NAMES:
            modules[name] = importlib.import_module(full[name])
            modules[name].__dict__["torch"] = host
        backend = modules["cuda"].CudaBackend
        allocate = backend.allocate_kv

        def allocate_kv(*args: Any) -> Tensor:
            on_device.append(allocate(*args))
            return on_device[-1]

        backend.allocate_kv = allocate_kv
        yield modules
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
