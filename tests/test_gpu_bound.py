"""Requests that cannot reach the CPU, for want of room on the way or there: reports say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.request import SamplingParams
from swiftapex.engine.engine import Engine
from swiftapex.kv.sizing import gpu_tokens_for_staging, kv_sizes
from swiftapex.model.source import open_model
from swiftapex.run_experiment import main

TINY = ModelSection(architecture="tiny", weights="dummy", dtype="float32")  # 4 layers
EXPERIMENT = """
name: example
model: {architecture: tiny, weights: dummy, dtype: float32}
engine: {device: cpu, gpu: {kv_tokens: 1024}, cpu: {kv_tokens: 4096}, block_size: 16}
runs: [{name: gpu-only, policy: gpu_only}, {name: fastdecode, policy: fastdecode}]
workload: {kind: synthetic, num_requests: 4, input_len: 600, output_len: 8}
"""


def engine(policy: str = "fastdecode", cpu_tokens: int = 4096, gpu_tokens: int = 1024) -> Engine:
    """64 blocks on the GPU: 8 of them are the staging area, which has 16 of one layer."""
    return Engine(
        TINY,
        EngineConfig(
            device="reference",
            gpu=GpuConfig(kv_tokens=gpu_tokens),
            cpu=CpuConfig(kv_tokens=cpu_tokens),
            block_size=16,
            max_model_len=1024,
        ),
        policy=policy,
    )


def test_what_cannot_go_to_the_cpu_is_counted_with_the_numbers() -> None:
    made = engine()
    made.add([5] * 200, SamplingParams(max_tokens=57))  # 256 tokens have KV: 16 blocks
    assert made.gpu_bound is None
    made.add([5] * 200, SamplingParams(max_tokens=58))
    made.add([5] * 300, SamplingParams(max_tokens=101))  # 400 tokens: 25 blocks
    words = made.gpu_bound or ""
    assert words.startswith("2 of 3 requests could start on the GPU only, whatever the policy")
    assert "400 tokens, 25 KV blocks of 16, where the CPU has 256" in words
    assert "the staging area, through which prompts go there, 16." in words
    assert "gpu.kv_tokens of 1,664, with which the staging area grows; or ask" in words
    made.reuse("fastdecode")
    assert made.gpu_bound is None
    made.close()
    larger = engine(gpu_tokens=1664)
    larger.add([5] * 300, SamplingParams(max_tokens=101))
    assert larger.gpu_bound is None
    larger.close()


def test_a_small_cpu_is_named_too() -> None:
    made = engine(cpu_tokens=128)
    made.add([5] * 100, SamplingParams(max_tokens=61))  # 160 tokens: 10 blocks
    words = made.gpu_bound or ""
    assert "All could have gone to the CPU with cpu.kv_tokens of 160; or ask" in words
    made.add([5] * 300, SamplingParams(max_tokens=101))
    assert "gpu.kv_tokens of 1,664, with which the staging area grows and cpu.kv_tokens of 400" in (
        made.gpu_bound or ""
    )
    made.close()


@pytest.mark.parametrize(("policy", "cpu_tokens"), [("gpu_only", 4096), ("fastdecode", 0)])
def test_without_a_cpu_side_there_is_nothing_to_say(policy: str, cpu_tokens: int) -> None:
    made = engine(policy, cpu_tokens)
    made.add([5] * 300, SamplingParams(max_tokens=101))
    assert made.gpu_bound is None
    made.close()


@pytest.mark.parametrize("num_layers", (1, 2, 3, 32))
@pytest.mark.parametrize("blocks", (1, 2, 7, 16, 63))
def test_the_tokens_that_are_asked_for_are_just_enough(num_layers: int, blocks: int) -> None:
    config = open_model(TINY.model_copy(update={"num_layers": num_layers})).config

    def staging(gpu_tokens: int) -> int:
        asked = EngineConfig(
            gpu=GpuConfig(kv_tokens=gpu_tokens), cpu=CpuConfig(kv_tokens=4096), block_size=16
        )
        return kv_sizes(config, "float32", asked, 1024, True).staging_blocks

    enough = gpu_tokens_for_staging(blocks, num_layers, 16)
    assert staging(enough) >= blocks
    assert enough == 16 or staging(enough - 16) < blocks


def test_the_report_says_it_of_the_run_that_it_is_of(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    (report,) = (tmp_path / "out").rglob("report.html")
    text = report.read_text()
    assert text.count("4 of 4 requests could start on the GPU only") == 1
    assert "gpu.kv_tokens of 2,432" in text.split("Run fastdecode")[1]
