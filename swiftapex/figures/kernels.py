"""Points of a figure that are kernels alone: decode attention of one layer on both sides, its
parts, and the linear stages. Loads torch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from swiftapex.attention import Ticket
from swiftapex.backends import Backends, make_backends
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.ops import AttentionBatch, AttentionShape, Backend
from swiftapex.core.request import Placement
from swiftapex.figures.points import Point
from swiftapex.figures.spec import KernelConfig
from swiftapex.kv.store import KVStore
from swiftapex.model.source import as_torch_dtype, open_model
from swiftapex.model.stages import Stages

GPU, CPU = "gpu", "cpu"
_QUEUED = 8  # calls between two marks on the GPU side, launched while it is held back
_HELD_CYCLES = 2_000_000  # about a millisecond


def measure_kernels(config: KernelConfig) -> Generator[Point, None, None]:
    """Point by point; x is the batch, or the name of the part."""
    engine = EngineConfig(
        device=config.device,
        gpu=GpuConfig(sm_count=config.sm_count),
        cpu=CpuConfig(threads=config.threads),
        block_size=config.block_size,
    )
    backends = make_backends(engine, with_cpu_side=config.measure != "linear")
    try:
        with backends.active(), torch.inference_mode():
            yield from _MEASURES[config.measure](config, backends)
    finally:
        backends.close()


class DecodeBench:
    """Decode attention over a pool of KV on both sides. Calls take turns through the pool's layers
    and blocks, so that what they read is in no cache."""

    def __init__(self, config: KernelConfig, backends: Backends) -> None:
        self.config, self.backends = config, backends
        self.shape = AttentionShape(
            config.q_heads, config.kv_heads, config.head_dim, config.block_size
        )
        self.dtype = as_torch_dtype(config.dtype)
        self.row_blocks = -(-config.context // config.block_size)
        self.num_blocks = self.row_blocks * max(config.batches)
        block_bytes = 2 * config.kv_heads * config.block_size * config.head_dim
        layer_bytes = self.num_blocks * block_bytes * self.dtype.itemsize
        self.num_layers = max(1, (config.pool_mib << 20) // layer_bytes)
        self.store = KVStore(self.shape, self.num_layers)
        for side in (Placement.GPU, Placement.CPU):
            self.store.allocate(side, backends.gpu, self.num_blocks, self.dtype)
        self.store.touch()

    def kv_bytes(self, batch: int) -> int:
        c = self.config
        return 2 * batch * c.context * c.kv_heads * c.head_dim * self.dtype.itemsize

    def gpu_us(self, batch: int) -> float:
        """One layer's attention of `batch` decodes on the GPU side, the median, in µs."""
        gpu = self.backends.gpu
        calls = self._calls(Placement.GPU, batch, lambda array: gpu.upload([array])[0])
        qkv = self._qkv(batch, gpu.device)
        return _device_us(
            self.backends,
            lambda: _attend(gpu, next(calls), self.shape, qkv),
            self.config.seconds,
        )

    def cpu_us(self, batch: int) -> float:
        """The same on the CPU side's threads, as they time it: without the hand-off."""
        lane = self.backends.cpu_attention
        assert lane is not None
        calls = self._calls(Placement.CPU, batch, torch.from_numpy)
        qkv = self._qkv(batch, self.backends.gpu.device)

        def call() -> float:
            kv, rows = next(calls)
            ticket: Ticket = lane.submit(0, kv, rows, self.shape, qkv)
            ticket.wait()
            self.backends.finish()
            begin, end = _span(ticket)
            return end - begin

        return 1e6 * _median(call, self.config.seconds)

    def _qkv(self, batch: int, device: Any) -> Tensor:
        heads = self.shape.num_q_heads + 2 * self.shape.num_kv_heads
        return torch.randn(batch, heads, self.shape.head_dim).to(self.dtype).to(device)

    def _calls(
        self, side: Placement, batch: int, place: Callable[[Any], Tensor]
    ) -> Iterator[tuple[Tensor, AttentionBatch]]:
        """KV of a layer and blocks in it, in turns, without end."""
        order = torch.randperm(self.num_blocks, dtype=torch.int32)
        lens = place(torch.full((batch,), self.config.context, dtype=torch.int32).numpy())
        used = batch * self.row_blocks
        batches = []
        for begin in range(0, self.num_blocks - used + 1, used):
            table = order[begin : begin + used].view(batch, self.row_blocks).contiguous()
            batches.append(AttentionBatch(batch, (), place(table.numpy()), lens, ()))
        layers = range(self.num_layers)
        turns = [(layer, rows) for layer in layers for rows in batches]
        for layer, rows in itertools.cycle(turns):
            yield self.store.layer(side, layer), rows


def _attention(config: KernelConfig, backends: Backends) -> Iterator[Point]:
    bench = DecodeBench(config, backends)
    for batch in config.batches:
        for series, us in ((CPU, bench.cpu_us(batch)), (GPU, bench.gpu_us(batch))):
            rate = bench.kv_bytes(batch) / us / 1e3
            yield Point(series, batch, {"us": us, "gb_per_s": rate})


def _parts(config: KernelConfig, backends: Backends) -> Iterator[Point]:
    """Milliseconds per token over all layers. The parts are torch's batched operations."""
    bench = DecodeBench(config, backends)
    (batch,) = config.batches
    scale = config.num_layers / batch / 1e3
    for series, us in ((CPU, bench.cpu_us(batch)), (GPU, bench.gpu_us(batch))):
        yield Point(series, "all, fused", {"ms_per_token": scale * us})
    devices = {CPU: torch.device("cpu"), GPU: backends.gpu.device}
    for series, device in devices.items():
        for name, us in _separate_us(config, backends, device, batch):
            yield Point(series, name, {"ms_per_token": scale * us})


def _separate_us(
    config: KernelConfig, backends: Backends, device: torch.device, batch: int
) -> Iterator[tuple[str, float]]:
    dtype, rows = as_torch_dtype(config.dtype), batch * config.kv_heads
    group = config.q_heads // config.kv_heads
    layers = max(2, (config.pool_mib << 20) // (rows * config.context * config.head_dim * 4))
    shape = (min(layers, 16), rows, config.context, config.head_dim)
    keys = torch.zeros(shape, dtype=dtype, device=device)
    turns = itertools.cycle(range(len(keys)))
    q = torch.randn(rows, group, config.head_dim).to(dtype).to(device)
    scores = torch.randn(rows, group, config.context).to(dtype).to(device)
    parts: dict[str, Callable[[], object]] = {
        "QK": lambda: torch.bmm(q, keys[next(turns)].transpose(1, 2)),
        "softmax": lambda: torch.softmax(scores, dim=-1),
        "PV": lambda: torch.bmm(scores, keys[next(turns)]),
    }
    for name, call in parts.items():
        if device.type == "cpu":
            yield name, 1e6 * _median(lambda call=call: _host_s(call), config.seconds)  # type: ignore[misc]
        else:
            yield name, _device_us(backends, call, config.seconds)


def _linear(config: KernelConfig, backends: Backends) -> Iterator[Point]:
    """Post-projection of a layer and pre-projection of the next, in µs."""
    section = ModelSection(
        architecture=config.architecture, weights="dummy", dtype=config.dtype, num_layers=2
    )
    gpu, source = backends.gpu, open_model(section)
    dtype, c = as_torch_dtype(config.dtype), source.config
    stages = Stages(
        c, source.load(dtype, gpu.device, gpu.allocate_weight), gpu.ops, not gpu.rotates
    )
    turns = itertools.cycle((0, 1))
    for batch in config.batches:
        x = torch.randn(batch, c.hidden_size).to(dtype).to(gpu.device)
        o = torch.randn(batch, c.num_q_heads * c.head_dim).to(dtype).to(gpu.device)
        rotation = stages.rotation(torch.arange(batch, device=gpu.device))

        def call(x: Tensor = x, o: Tensor = o, rotation: Tensor = rotation) -> None:
            layer = next(turns)
            stages.pre_attn(1 - layer, stages.post_attn(layer, o, x), rotation)

        yield Point(config.architecture, batch, {"us": _device_us(backends, call, config.seconds)})


_MEASURES = {"attention": _attention, "attention_parts": _parts, "linear": _linear}


def _device_us(backends: Backends, call: Callable[[], object], seconds: float) -> float:
    """A call on the GPU side, the median of the means of a few in a row, in µs."""
    clock = backends.clock
    call()

    def some() -> float:
        backends.finish()
        clock.restart()
        if clock.costs:
            torch.cuda._sleep(_HELD_CYCLES)  # the calls queue up behind it
        begin = clock.mark()
        for _ in range(_QUEUED):
            call()
        end = clock.mark()
        backends.finish()
        return (clock.seconds(end) - clock.seconds(begin)) / _QUEUED

    return 1e6 * _median(some, seconds)


def _median(sample: Callable[[], float], seconds: float) -> float:
    """Of samples taken for so long, at least five, after one that does not count."""
    sample()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < end:
        samples.append(sample())
    return statistics.median(samples)


def _attend(
    gpu: Backend, where: tuple[Tensor, AttentionBatch], shape: AttentionShape, qkv: Tensor
) -> Tensor:
    kv, rows = where
    return gpu.attend(kv, rows, shape, qkv)


def _host_s(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _span(ticket: Any) -> tuple[float, float]:
    """When the CPU side's threads began and ended a call that is done."""
    begin, end = ticket.span()
    return float(begin), float(end)
