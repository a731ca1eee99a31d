"""The GPU's KV where nobody says how large it should be: what the largest pass leaves of a memory
whose contents the stand-in makes up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import swiftapex.worker.worker as worker_module
from swiftapex import SamplingParams
from swiftapex.backends.graph_rows import padded_rows, recorded_rows
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import ConfigError, SwiftapexError
from swiftapex.core.plan import StepPlan
from swiftapex.core.records import DeviceMemory
from swiftapex.core.request import Placement
from swiftapex.engine.engine import Engine
from swiftapex.kv.sizing import KVSizes, kv_sizes
from swiftapex.pipelines.repeated import EachPassAnew
from swiftapex.profiler.memory import fit_gpu_kv, largest_pass, room_for_kv
from tests.cuda_double import DeviceDouble, cuda_modules, maker
from tests.hybrid import model_path, oracle

MIB = 2**20
TOKENS, ROWS = 48, 6  # of the largest pass
WEIGHTS, OTHERS, PER_TOKEN, GRAPH = 300 * MIB, 100 * MIB, MIB, 3 * MIB
BLOCK = 16 * 8 * 2 * 1 * 32 * 4  # bytes: tokens, layers, K and V, heads, head_dim, float32


class Graphs(EachPassAnew):
    """Records each padded number of decodes the second time that it comes, in memory of its own."""

    def __init__(self, memory: DeviceDouble) -> None:
        self.memory = memory
        self.seen: dict[int, int] = {}

    def run(self, layers: Any, *walks: Any) -> None:
        layers(*walks)
        batch = walks[0].decodes
        if len(walks) == 1 and batch is not None and batch.cpu is None:
            rows = padded_rows(batch.num_tokens)
            self.seen[rows] = self.seen.get(rows, 0) + 1
            if self.seen[rows] == 2:
                self.memory.use(GRAPH, for_good=True)

    def forget(self) -> None:
        self.memory.reserved -= GRAPH * sum(count > 1 for count in self.seen.values())
        self.seen = dict.fromkeys(self.seen, 0)


@pytest.fixture
def memory() -> Iterator[DeviceDouble]:
    """Of the device; a pass takes PER_TOKEN while it runs."""
    execute = worker_module.Worker.execute
    with cuda_modules() as modules:
        memory: DeviceDouble = modules["cuda"].torch.cuda.memory
        for module in modules.values():
            module.torch.cuda.memory = memory
        memory.others, memory.reserved = OTHERS, WEIGHTS

        def counted(self: Any, plan: StepPlan) -> Any:
            tokens = sum(batch.num_tokens for batch in plan.sub_batches)
            memory.peak = max(memory.peak, memory.reserved + PER_TOKEN * tokens)
            return execute(self, plan)

        make = maker(modules, repeated=lambda *_: Graphs(memory))
        with (
            mock.patch.object(worker_module, "make_backends", make),
            mock.patch.object(worker_module.Worker, "execute", counted),
        ):
            yield memory


def engine(policy: str = "gpu_only", tokens: int = TOKENS, **gpu: Any) -> Engine:
    return Engine(
        ModelSection(path=str(model_path("gqa-3"))),
        EngineConfig(
            device="cuda",
            gpu=GpuConfig(**gpu),
            cpu=CpuConfig(kv_tokens=512, threads=1),
            block_size=16,
            max_model_len=40,
            max_batch_size=ROWS,
            max_tokens_in_batch=tokens,
            profile="off",
        ),
        policy=policy,
    )


def test_kv_gets_what_is_left(memory: DeviceDouble, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "swiftapex.profiler.memory"):
        made = engine()
    graphs = len({padded_rows(rows) for rows in range(1, ROWS + 1)}) * GRAPH
    room = 0.9 * memory.total - OTHERS - WEIGHTS - graphs - TOKENS * PER_TOKEN
    assert made.stats().gpu_blocks_total == (room + BLOCK) // BLOCK  # one is the trial's own
    (note,) = made.notes
    assert "0.30 GiB are weights and graphs" in note and "(48 tokens)" in note
    assert note in caplog.text
    made.close()


@pytest.mark.parametrize("policy", ["gpu_only", "neo"])
def test_an_engine_of_measured_size_gives_the_right_tokens(
    memory: DeviceDouble, policy: str
) -> None:
    memory.others = int(0.9 * memory.total) - WEIGHTS - TOKENS * PER_TOKEN - 4 * GRAPH - 6 * BLOCK
    made = engine(policy)
    stats = made.stats()
    assert 4 < stats.gpu_blocks_total < 10
    assert (stats.cpu_blocks_total > 0) == (policy == "neo")
    prompts = [[5 + i, 9, 3 + i] * 4 for i in range(8)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [made.add(prompt, params) for prompt in prompts]
    while made.has_work:
        made.step()
    for prompt, request in zip(prompts, requests, strict=True):
        assert not oracle("gqa-3").assert_greedy(prompt, request.output_ids)
    made.close()


def test_a_cap_on_memory_counts_this_process_alone(memory: DeviceDouble) -> None:
    made = engine(memory=512 * MIB, memory_share=0.8)
    graphs = 4 * GRAPH
    room = 0.8 * 512 * MIB - WEIGHTS - graphs - TOKENS * PER_TOKEN
    assert made.stats().gpu_blocks_total == (room + BLOCK) // BLOCK
    made.close()


@pytest.mark.parametrize("given", [{"kv_tokens": 160}, {"kv_memory": 10 * BLOCK}])
def test_what_is_said_is_not_measured(memory: DeviceDouble, given: dict[str, int]) -> None:
    with mock.patch("swiftapex.engine.engine.fit_gpu_kv") as fit:
        made = engine(**given)
    assert made.stats().gpu_blocks_total == 10 and not fit.called
    made.close()


def test_no_room_is_refused_with_the_numbers(memory: DeviceDouble) -> None:
    with pytest.raises(ConfigError) as error:
        engine(memory=358 * MIB, memory_share=1.0)  # 300 of weights, 48 and 12 more are needed
    for words in (
        "0 bytes of KV are less than a block of 16 tokens",
        "of 1 x 0.35 GiB of GPU memory, 0.30 GiB are weights and graphs",
        "0.05 GiB the largest pass (48 tokens)",
        "smaller max_tokens_in_batch",
    ):
        assert words in str(error.value)


def test_a_pass_that_does_not_fit_is_refused_with_the_numbers(memory: DeviceDouble) -> None:
    def execute(self: Any, plan: StepPlan) -> Any:
        if sum(batch.num_tokens for batch in plan.sub_batches) == TOKENS:
            with self._backends.active():
                raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, plan)

    whole = worker_module.Worker.execute
    with (
        mock.patch.object(worker_module.Worker, "execute", execute),
        pytest.raises(ConfigError, match=r"no pass of 48 tokens .* hold 0\.29 GiB .* of memory"),
    ):
        engine()


def test_the_largest_pass_has_all_rows_and_all_tokens() -> None:
    def works(rows: int, tokens: int, uses_cpu: bool = False) -> list[Any]:
        config = EngineConfig(max_batch_size=rows, max_tokens_in_batch=tokens)
        return largest_pass(config, 40, uses_cpu)

    for rows, tokens in ((6, 48), (6, 6), (8, 5), (3, 100), (256, 2048)):
        found = works(rows, tokens)
        assert sum(work.context for work in found) == tokens and len(found) == min(rows, tokens)
        assert all(work.context <= 40 for work in found)
    assert [work.tokens for work in works(4, 90)] == [40, 40, 9, 0]
    assert [work.placement for work in works(4, 90, uses_cpu=True)][2:] == [
        Placement.GPU, Placement.CPU,
    ]  # fmt: skip


def test_graphs_of_every_size_are_recorded() -> None:
    for most in (1, 2, 3, 5, 32, 33, 250, 256):
        needed = {padded_rows(rows) for rows in range(1, most + 1)}
        assert {padded_rows(rows) for rows in recorded_rows(most)} == needed
        assert max(recorded_rows(most)) == most


def test_the_smaller_rest_counts() -> None:
    memory = DeviceMemory(total=1000, free=500, limit=1000, reserved=300, peak=300)
    assert room_for_kv(memory, 0.9, 50) == 350  # others hold 200
    assert room_for_kv(replace(memory, limit=400), 0.9, 50) == 10
    assert room_for_kv(replace(memory, limit=300), 0.9, 50) == -80


class Ranks:
    """An executor of two, of which the second has less room."""

    runs_ahead = False

    def __init__(self) -> None:
        self.memories = [
            DeviceMemory(2**30, free, 2**30, 64 * MIB, 80 * MIB) for free in (2**29, 2**28)
        ]
        self.sizes: KVSizes | None = None

    def execute(self, plan: StepPlan) -> Any:
        return mock.Mock()

    def settle_memory(self) -> None: ...

    def memory(self) -> list[DeviceMemory]:
        return self.memories

    def resize_gpu_kv(self, sizes: KVSizes) -> None:
        self.sizes = sizes


def test_ranks_get_what_the_fullest_has_left() -> None:
    from swiftapex.model.source import open_model

    source = open_model(ModelSection(architecture="llama2-7b", weights="dummy", num_layers=2))
    config = EngineConfig(device="cuda", tensor_parallel_size=2, gpu=GpuConfig(memory_share=1.0))
    trial = kv_sizes(source.config, "float16", config, 4096, uses_cpu=False)
    assert trial == KVSizes(1, 0, 0, "float16")
    ranks: Any = Ranks()
    sizes, words = fit_gpu_kv(ranks, source.config, "float16", config, trial, 4096)
    assert "0.06 GiB are weights and graphs" in words and "0.02 GiB the largest pass" in words
    block = 32 * 2 * 2 * 16 * 128 * 2  # tokens, layers, K and V, half of the heads, head_dim, bytes
    assert sizes.gpu_blocks == (2**28 - 16 * MIB) // block + 1 and ranks.sizes == sizes


def test_a_share_without_a_gpu_is_refused() -> None:
    with pytest.raises(SwiftapexError, match="memory_share"):
        Engine(
            ModelSection(architecture="tiny", weights="dummy"),
            EngineConfig(gpu=GpuConfig(memory_share=0.5)),
        )
