"""The GPU side on a real GPU: device memory, one compute stream, native attention kernels."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import swiftapex._kernels_cuda as kernels
from swiftapex.backends.cpu import zeroed_huge_pages
from swiftapex.backends.cpu_ops import DTYPE_NUMBERS
from swiftapex.backends.cuda_ops import CudaOps, stream_handle
from swiftapex.backends.prefill_attention import compile_prefill_attention, prefill_attention
from swiftapex.core.errors import ConfigError
from swiftapex.core.ops import AttentionBatch, AttentionShape, Ops

logger = logging.getLogger(__name__)

_REGISTER_BYTES = 1 << 30  # of host memory pinned by one call, more or less
_PAGE_BYTES = 4096
_REGISTER_THREADS = 8
_ALIGNMENT = 16  # bytes, of each array in a transfer
_PLAN = "decode_attention"  # in AttentionBatch.kept: who computes what, found at the first layer


@dataclass(frozen=True, slots=True)
class _Compute:
    """A compute stream, and the part of the GPU that it is confined to, if any."""

    stream: torch.cuda.Stream
    num_sms: int
    green: kernels.GreenContext | None


@dataclass(frozen=True, slots=True)
class _CudaDownload:
    host: Tensor
    event: torch.cuda.Event

    def is_here(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> Tensor:
        self.event.synchronize()
        return self.host


# By device and sm_count: those of backends that were closed. cuBLAS keeps a workspace (33 MiB on an
# H200) for every stream that it ever worked on, so that a stream each would add up.
_idle: dict[tuple[int, int | None], list[_Compute]] = defaultdict(list)


class CudaBackend:
    """Work is launched on the current stream, which is this backend's inside `active`.

    `sm_count`: multiprocessors that the compute stream may use, None for all. `memory`: bytes of
    device memory that this process may take, None for all.
    """

    rotates = True

    def __init__(self, sm_count: int | None = None, memory: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(self.device).total_memory
        fraction = 1.0 if memory is None else memory / total
        if fraction > 1:
            raise ConfigError(f"engine.gpu.memory: {memory} is more than the GPU's {total}")
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)  # an earlier cap ends
        self._memory = memory
        self.notes: list[str] = []  # what users should know of how memory was had
        self._idle = _idle[self.device.index, sm_count]
        self._compute = self._idle.pop() if self._idle else _new_compute(self.device, sm_count)
        self.stream, self.num_sms = self._compute.stream, self._compute.num_sms
        self.ops: Ops = CudaOps()
        # The newest one is used; graphs may have recorded those before it.
        self._workspaces = [torch.zeros(0, dtype=torch.uint8, device=self.device)]
        self._pinned: list[tuple[int, int]] = []  # addresses and sizes of registered memory

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """torch works on the compute stream inside. ConfigError where memory does not suffice."""
        try:
            with torch.cuda.stream(self.stream):
                yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            held = torch.cuda.memory_reserved(self.device)
            limit = total if self._memory is None else self._memory
            raise ConfigError(
                f"engine.gpu: memory does not suffice: tensors hold {held / 2**30:.2f} GiB of the "
                f"{limit / 2**30:.2f} GiB that they may, and {free / 2**30:.2f} GiB of the GPU's "
                f"{total / 2**30:.2f} GiB are free: use a smaller kv_tokens or kv_memory, or a "
                f"smaller max_tokens_in_batch ({error})"
            ) from error

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Through one piece of pinned memory, in stream order: nothing waits."""
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        bytes_view = staging.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            bytes_view[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(
                np.uint8
            ).reshape(-1)  # fmt: skip
        sent = staging.to(self.device, non_blocking=True)
        return [
            sent[offset : offset + array.nbytes]
            .view(torch.from_numpy(array).dtype)
            .view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def download(self, tensor: Tensor) -> _CudaDownload:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _CudaDownload(host, event)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
    ) -> Tensor:
        size = (num_layers, num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        kv = torch.zeros(size, dtype=dtype, device=self.device)
        if kv.numel():
            compile_prefill_attention(kv[0], shape)
        return kv

    def allocate_host_kv(
        self, num_layers: int, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
    ) -> Tensor:
        """2 MiB pages, pinned in pieces of whole blocks, so that the GPU's copies reach them. Where
        a piece cannot be pinned none stays so, since those would be missed elsewhere: copies then
        go through a piece of pinned memory, with a warning (`notes`)."""
        size = (num_layers, num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        kv = zeroed_huge_pages(size, dtype)
        unit = math.lcm(kv[0, 0].nbytes, _PAGE_BYTES)
        piece_bytes = -(-_REGISTER_BYTES // unit) * unit
        pieces = [
            (kv.data_ptr() + begin, min(piece_bytes, kv.nbytes - begin))
            for begin in range(0, kv.nbytes, piece_bytes)
        ]
        with ThreadPoolExecutor(_REGISTER_THREADS) as pool:  # most of the time is zeroing pages
            errors = list(pool.map(_register, pieces))
        pinned = [piece for piece, error in zip(pieces, errors, strict=True) if error == 0]
        if len(pinned) == len(pieces):
            self._pinned += pinned
            return kv
        for piece in pinned:
            _unregister(piece)
        error = next(error for error in errors if error != 0)
        note = (
            f"The CPU's KV is pageable: of {kv.nbytes / 2**30:.2f} GiB only "
            f"{sum(size for _, size in pinned) / 2**30:.2f} GiB could be pinned (CUDA error "
            f"{error}). Copies between the sides are slower; raise the limit on locked memory "
            "(ulimit -l) or use a smaller cpu.kv_tokens."
        )
        logger.warning(note)
        self.notes.append(note)
        return kv

    def allocate_weight(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def rotate_append(
        self,
        kv: Tensor | None,
        slots: Tensor | None,
        qkv: Tensor,
        rotation: Tensor,
        shape: AttentionShape,
    ) -> None:
        _rope_append(kv, slots, qkv, rotation, shape)

    def attend(
        self, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor
    ) -> Tensor:
        if batch.slots is not None:
            _rope_append(kv, batch.slots, qkv, None, shape)
        width = shape.num_q_heads * shape.head_dim
        out = torch.empty(qkv.shape[0], width, dtype=qkv.dtype, device=self.device)
        if batch.num_decodes:
            self._attend_decodes(kv, batch, shape, qkv, out)
        begin = batch.num_decodes
        chunks = zip(batch.chunk_lens, batch.chunk_contexts, strict=True)
        for request, (length, context) in enumerate(chunks, start=batch.num_decodes):
            rows = slice(begin, begin + length)
            blocks = batch.block_table[request]
            prefill_attention(kv, blocks, context, shape, qkv[rows], out[rows])
            begin += length
        return out

    def _attend_decodes(
        self, kv: Tensor, batch: AttentionBatch, shape: AttentionShape, qkv: Tensor, out: Tensor
    ) -> None:
        n = batch.num_decodes
        sizes = (n, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
        needed = kernels.decode_attention_workspace(*sizes, self.num_sms)
        if needed > self._workspaces[-1].shape[0]:
            self._workspaces.append(torch.zeros(2 * needed, dtype=torch.uint8, device=self.device))
        plan, is_planned = batch.kept.get(_PLAN), True
        if plan is None:
            size = kernels.decode_attention_plan_bytes(self.num_sms)
            plan = batch.kept[_PLAN] = torch.empty(size, dtype=torch.uint8, device=self.device)
            is_planned = False
        kernels.decode_attention(
            DTYPE_NUMBERS[qkv.dtype],
            DTYPE_NUMBERS[kv.dtype],
            qkv.data_ptr(),
            kv.data_ptr(),
            batch.block_table.data_ptr(),
            batch.context_lens.data_ptr(),
            out.data_ptr(),
            self._workspaces[-1].data_ptr(),
            *sizes,
            shape.block_size,
            batch.block_table.stride(0),
            qkv.stride(0),
            out.stride(0),
            shape.scale,
            self.num_sms,
            plan.data_ptr(),
            is_planned,
            stream_handle(),
        )

    def close(self) -> None:
        """Waits for the device. KV in host memory must not be used afterwards."""
        torch.cuda.synchronize(self.device)
        for piece in self._pinned:
            _unregister(piece)
        self._pinned.clear()
        self._idle.append(self._compute)


def _new_compute(device: torch.device, sm_count: int | None) -> _Compute:
    if sm_count is None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return _Compute(torch.cuda.Stream(device), num_sms, None)
    green = kernels.GreenContext(device.index, sm_count)
    stream = torch.cuda.ExternalStream(green.stream, device=device)
    return _Compute(stream, green.num_sms, green)


def _rope_append(
    kv: Tensor | None,
    slots: Tensor | None,
    qkv: Tensor,
    rotation: Tensor | None,
    shape: AttentionShape,
) -> None:
    kernels.rope_append(
        DTYPE_NUMBERS[qkv.dtype],
        DTYPE_NUMBERS[qkv.dtype if kv is None else kv.dtype],
        qkv.data_ptr(),
        0 if rotation is None else rotation.data_ptr(),
        0 if kv is None or slots is None else slots.data_ptr(),
        0 if kv is None or slots is None else kv.data_ptr(),
        qkv.shape[0],
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        qkv.stride(0),
        shape.block_size,
        stream_handle(),
    )


def _register(piece: tuple[int, int]) -> int:
    """Pins (address, bytes); the CUDA error."""
    return int(torch.cuda.cudart().cudaHostRegister(*piece, 0))


def _unregister(piece: tuple[int, int]) -> None:
    torch.cuda.cudart().cudaHostUnregister(piece[0])
