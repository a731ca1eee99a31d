"""The profiler: on an executor that takes known times, what it stores, and a real engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import CPU, GPU, ConstantCostModel

from swiftapex import SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import StepPlan, StepResult, Tokens
from swiftapex.core.records import BusyTimes
from swiftapex.cost_model import HOST_KINDS, Load, asymmetric_us, gpu_only_us
from swiftapex.costs.correction import CorrectedCostModel
from swiftapex.costs.measured import MeasuredCostModel
from swiftapex.engine.engine import Engine
from swiftapex.kv.sizing import KVSizes
from swiftapex.model.config import named_architecture
from swiftapex.profile import main
from swiftapex.profiler import fingerprint as prints
from swiftapex.profiler import probe as probe_module
from swiftapex.profiler import store
from swiftapex.profiler.measure import Points, profile
from swiftapex.profiler.probe import Probe, decodes
from swiftapex.profiler.rounds import ROUNDS

POINTS = Points.within(
    max_batch_size=64,
    max_tokens=256,
    max_context=512,
    gpu_tokens=4096,
    cpu_tokens=16384,
    block_size=16,
)


class FakeExecutor:
    """Takes as long as `cost` says, on a clock of its own, and checks what workers rely on."""

    runs_ahead = False
    device_name = "fake"

    def __init__(self, cost: ConstantCostModel) -> None:
        self.cost = cost
        self.now = 0.0
        self.known: dict[int, int] = {}  # request -> blocks

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.known[request_id]
        for admission in plan.admitted:
            assert admission.request_id < 0 and admission.request_id not in self.known
            self.known[admission.request_id] = 0
        for request_id, blocks in plan.new_blocks.items():
            self.known[request_id] += len(blocks)
        for row in (row for batch in plan.sub_batches for row in batch.rows):
            assert row.start + row.num_tokens <= 16 * self.known[row.request_id]
            assert row.start + row.num_tokens <= POINTS.max_context
        self.now += 1e-6 * self._us(plan)
        return StepResult()

    def _us(self, plan: StepPlan) -> float:
        loads = [Load.of(batch.rows) for batch in plan.sub_batches]
        copied = sum(len(move.source_blocks) for move in plan.moves)
        if not any(load.rows for load in loads):
            return self.cost.copy_us(16 * copied)
        if len(loads) == 2:
            return asymmetric_us(self.cost, *loads)
        (load,) = loads
        if plan.pipeline.endswith("LinearStages"):
            return self.cost.iteration + self.cost.num_layers * self.cost.linear_us(load.rows)
        us = gpu_only_us(self.cost, load)
        if plan.pipeline == "async_overlap":
            us += self.cost.num_layers * self.cost.layerwise_us(load.rows)
        us += self.cost.num_layers * (
            self.cost.cpu_attention_us(load.cpu_tokens) + self.cost.hand_off_us(load.cpu_requests)
        )
        layers = us - self.cost.iteration
        return us + (ROUNDS - 1) * layers if plan.pipeline.endswith("Rounds") else us

    def busy(self) -> BusyTimes:
        return BusyTimes(None, None)

    def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeExecutor]:
    cost = ConstantCostModel(
        num_layers=8, linear_fixed=200, linear_row=1.5, gpu_token=0.02, prefill_token=0.4,
        cpu_token=0.3, cpu_fixed=40, iteration=350, copy_token=0.6,
    )  # fmt: skip
    executor = FakeExecutor(cost)
    monkeypatch.setattr(probe_module.time, "perf_counter", lambda: executor.now)
    yield executor


def test_the_profiler_finds_what_an_executor_takes(fake: FakeExecutor) -> None:
    shares: list[float] = []
    probe = Probe(fake, {GPU: 256, CPU: 1024}, 16)
    found = MeasuredCostModel(profile(probe, POINTS, 8, shares.append))
    assert not fake.known, "dummy requests are left behind"
    assert shares == sorted(shares) and shares[-1] == 1.0
    true = fake.cost
    assert found.iteration_us(1) == pytest.approx(350, rel=0.01)
    for rows in (1, 5, 40, 200, 256):
        assert found.linear_us(rows) == pytest.approx(true.linear_us(rows), rel=0.02)
    assert found.linear_us(256) == pytest.approx(true.linear_us(256), rel=0.002), "with attention"
    for tokens, requests in ((1000, 4), (4000, 30)):
        gpu, cpu = (
            found.gpu_attention_us(tokens, requests),
            found.cpu_attention_us(tokens, requests),
        )
        assert gpu == pytest.approx(true.gpu_attention_us(tokens), rel=0.1)
        assert cpu == pytest.approx(true.cpu_attention_us(tokens), rel=0.1)
    assert found.prefill_attention_us(100, 0) == pytest.approx(40, rel=0.1)
    assert found.copy_us(128) == pytest.approx(true.copy_us(128), rel=0.01)
    main_load = Load(12, 2000, gpu_requests=12)
    assert gpu_only_us(found, main_load) == pytest.approx(gpu_only_us(true, main_load), rel=0.05)
    split = main_load, Load(9, 0, 900, cpu_requests=9)
    assert asymmetric_us(found, *split) == pytest.approx(asymmetric_us(true, *split), rel=0.05)


class AheadExecutor(FakeExecutor):
    """A device beside the host: launching takes `host_us`, results come once it is there."""

    runs_ahead = True

    def __init__(self, cost: ConstantCostModel, host_us: float) -> None:
        super().__init__(cost)
        self.host_us = host_us
        self._free = 0.0  # when the device has done all that was launched

    def execute(self, plan: StepPlan) -> StepResult:
        begin = self.now
        super().execute(plan)
        took, self.now = self.now - begin, begin + 1e-6 * self.host_us
        done = self._free = max(self._free, self.now) + took

        def fetch() -> Tokens:
            self.now = max(self.now, done)
            return Tokens()

        return StepResult(fetch=fetch)


@pytest.mark.parametrize("host_us", [100.0, 3000.0])
def test_a_device_that_works_beside_the_host(
    monkeypatch: pytest.MonkeyPatch, host_us: float
) -> None:
    cost = ConstantCostModel(
        num_layers=8, linear_fixed=200, linear_row=1.5, gpu_token=0.02, prefill_token=0.4,
        cpu_token=0.3, cpu_fixed=40, iteration=350, hand_off_row=2, copy_token=2.0, layerwise=25,
    )  # fmt: skip
    executor = AheadExecutor(cost, host_us)
    monkeypatch.setattr(probe_module.time, "perf_counter", lambda: executor.now)
    found = MeasuredCostModel(profile(Probe(executor, {GPU: 256, CPU: 1024}, 16), POINTS, 8))
    for kind in HOST_KINDS:
        assert found.host_us(kind) == pytest.approx(host_us)
    load = Load(30, 3000, gpu_requests=30)
    second = Load(40, 0, 2000, cpu_requests=40)
    for mine, theirs in (
        (gpu_only_us(found, load), gpu_only_us(cost, load)),
        (asymmetric_us(found, load, second), asymmetric_us(cost, load, second)),
    ):
        assert mine == pytest.approx(max(theirs, host_us), rel=0.08)
    if host_us < 1000:  # else the copies are shorter than their launches
        assert found.copy_us(512) == pytest.approx(cost.copy_us(512), rel=0.05)
        assert found.layerwise_us(30) == pytest.approx(25, rel=0.05)


def test_without_a_cpu_side_its_tables_are_empty(fake: FakeExecutor) -> None:
    points = dataclasses.replace(POINTS, cpu_requests=(), cpu_tokens=(), copy_blocks=())
    tables = profile(Probe(fake, {GPU: 256, CPU: 0}, 16), points, 8)
    assert not (tables.cpu_attention.xs or tables.hand_off.xs or tables.copy.xs)
    assert not tables.layerwise.xs
    assert tables.linear.xs and tables.gpu_attention.xs


def test_points_stay_within_the_limits() -> None:
    small = Points.within(
        max_batch_size=3, max_tokens=5, max_context=20, gpu_tokens=64, cpu_tokens=0, block_size=16
    )
    assert small.decode_rows == (1, 2, 3) and small.chunk_rows == (5,)
    assert small.gpu_tokens[-1] <= 60 and small.cpu_requests == () and small.copy_blocks == ()
    assert max(small.chunks) <= 5 and small.prefixes == (0,)
    large = Points.within(
        max_batch_size=256,
        max_tokens=2048,
        max_context=4096,
        gpu_tokens=26_400,
        cpu_tokens=240_000,
        block_size=16,
    )
    assert large.decode_rows[-1] == 256 and large.chunk_rows[-1] == 2048
    assert large.gpu_tokens[-1] == 16384 and large.cpu_tokens[-1] == 65536
    assert sum(w.prefix + 1 for w in decodes(GPU, 7, 100)) == 100


# What a profile is of

CONFIG = named_architecture("tiny")
ENGINE = EngineConfig()
SIZES = KVSizes(100, 100, 4, "float32")


def a_print(**change: Any) -> dict[str, Any]:
    parts = {"config": CONFIG, "dtype": "float32", "engine": ENGINE, "sizes": SIZES}
    parts |= {"points": POINTS, "device_name": "a GPU"}
    return prints.fingerprint(**(parts | change))


@pytest.mark.parametrize(
    "change",
    [
        {"config": dataclasses.replace(CONFIG, num_layers=5)},
        {"config": dataclasses.replace(CONFIG, intermediate_size=1024)},
        {"dtype": "float16"},
        {"device_name": "another GPU"},
        {"engine": EngineConfig(gpu=GpuConfig(sm_count=8))},
        {"engine": EngineConfig(gpu=GpuConfig(memory=2**34))},
        {"engine": EngineConfig(block_size=16)},
        {"engine": EngineConfig(cpu=CpuConfig(attention_kernel="plain"))},
        {"engine": EngineConfig(tensor_parallel_size=2)},
        {"sizes": dataclasses.replace(SIZES, cpu_blocks=0)},
        {"sizes": dataclasses.replace(SIZES, cpu_dtype="float16")},
        {"points": dataclasses.replace(POINTS, prefixes=(0, 7))},
    ],
)
def test_anything_else_measured_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert prints.digest(a_print(**change)) != prints.digest(a_print())
    assert prints.differences(prints.normal(a_print(**change)), prints.normal(a_print()))


def test_another_machine_or_kernel_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    here = prints.digest(a_print())
    assert prints.digest(a_print()) == here
    for name, value in (
        ("cpu_model", lambda: "another processor"),
        ("_native_hash", lambda module: "rebuilt"),
        ("_threads", lambda engine, with_cpu_side: {"cpu": 99}),
        ("_code_hash", lambda: "edited"),
        ("_version", lambda package: "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(prints, name, value)
            assert prints.digest(a_print()) != here, name


def test_profiles_are_found_by_fingerprint_alone(tmp_path: Path, fake: FakeExecutor) -> None:
    tables = profile(Probe(fake, {GPU: 256, CPU: 1024}, 16), POINTS, 8)
    kept = store.Profile(a_print(), tables, 1.5)
    path = store.write(tmp_path, kept)
    found = store.find(tmp_path, a_print())
    assert found is not None and found.tables == tables and found.seconds == 1.5
    other = a_print(device_name="another GPU")
    assert store.find(tmp_path, other) is None
    path.rename(store.path_of(tmp_path, other))  # a file that lies where another should
    assert store.find(tmp_path, other) is None
    with pytest.raises(ConfigError, match=r"gpu.name: 'a GPU' against 'another GPU'"):
        store.read(store.path_of(tmp_path, other), other)
    assert store.read(store.path_of(tmp_path, other), a_print()).tables == tables


def test_what_was_measured_with_more_kv_serves_less(tmp_path: Path, fake: FakeExecutor) -> None:
    def points(gpu_tokens: int, max_context: int = 2000) -> Points:
        return Points.within(
            max_batch_size=64, max_tokens=256, max_context=max_context, gpu_tokens=gpu_tokens,
            cpu_tokens=16_384, block_size=16,
        )  # fmt: skip

    tables = profile(Probe(fake, {GPU: 256, CPU: 1024}, 16), POINTS, 8)
    path = store.write(tmp_path, store.Profile(a_print(points=points(4096)), tables, 1.5))
    for less in (points(1000), points(4096, max_context=1000)):
        assert store.find(tmp_path, a_print(points=less)) is not None
        assert store.read(path, a_print(points=less)).tables == tables
        assert store.find(tmp_path, a_print(points=less, dtype="float16")) is None
    for more in (points(9000), points(4096, max_context=5000)):
        assert store.find(tmp_path, a_print(points=more)) is None
        with pytest.raises(ConfigError, match=r"points\."):
            store.read(path, a_print(points=more))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"fingerprint": {}, "tables": 3}'])
def test_a_broken_file_is_no_profile(tmp_path: Path, text: str) -> None:
    store.path_of(tmp_path, a_print()).write_text(text)
    assert store.find(tmp_path, a_print()) is None
    with pytest.raises(ConfigError, match="holds no profile"):
        store.read(store.path_of(tmp_path, a_print()), a_print())
    with pytest.raises(ConfigError, match="not readable"):
        store.read(tmp_path / "nowhere.json", a_print())


@pytest.mark.parametrize(
    ("table", "broken"),
    [
        ("linear", {"xs": [], "us": []}),
        ("linear", {"xs": [1, 8], "us": ["3.5", "4"]}),
        ("layerwise", {"xs": [1, 8], "us": [3.5]}),
        ("layerwise", {"xs": [8, 1], "us": [3.5, 4.0]}),
        ("copy", {"xs": [1, 8], "us": [float("nan"), 4.0]}),
        ("cpu_attention", {"xs": [1], "ys": [8, 9], "us": [[3.5]]}),
        ("cpu_attention", {"xs": [1], "ys": [8, 9], "us": [[None, None]]}),
        ("host_us", [1.0]),
    ],
)
def test_tables_that_no_model_can_read_are_no_profile(
    tmp_path: Path, fake: FakeExecutor, table: str, broken: Any
) -> None:
    """Be it another engine's, whose file lies beside."""
    tables = profile(Probe(fake, {GPU: 256, CPU: 1024}, 16), POINTS, 8)
    path = store.write(tmp_path, store.Profile(a_print(), tables, 1.5))
    data = json.loads(path.read_text())
    for changed in (
        {**data, "tables": {**data["tables"], table: broken}},
        {**data, "fingerprint": [data["fingerprint"]]},
    ):
        path.write_text(json.dumps(changed))
        assert store.find(tmp_path, a_print(dtype="float16")) is None
        assert store.find(tmp_path, a_print()) is None
        with pytest.raises(ConfigError, match="holds no profile"):
            store.read(path, a_print())


# A real engine

TINY = ModelSection(architecture="tiny", weights="dummy", num_layers=2, dtype="float32")


def engine_config(folder: Path, **change: Any) -> EngineConfig:
    settings = {
        "gpu": GpuConfig(kv_tokens=256),
        "cpu": CpuConfig(kv_tokens=256, threads=1),
        "block_size": 16,
        "max_model_len": 64,
        "max_batch_size": 4,
        "max_tokens_in_batch": 16,
        "profile": "on",
        "profile_folder": str(folder),
    }
    return EngineConfig(**(settings | change))


def outputs(config: EngineConfig) -> tuple[list[list[int]], Engine]:
    engine = Engine(TINY, config, policy="model_based")
    try:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        requests = [engine.add([3 + i, 5, 7], sampling) for i in range(5)]
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    return [list(request.output_ids) for request in requests], engine


def test_an_engine_measures_once_and_then_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, engine = outputs(engine_config(tmp_path))
    assert isinstance(engine._cost_model, CorrectedCostModel)
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["fingerprint"]["model"]["num_layers"] == 2
    monkeypatch.setattr("swiftapex.engine.costs.profile", lambda *_: pytest.fail("measured again"))
    again, engine = outputs(engine_config(tmp_path, online_correction=False))
    assert isinstance(engine._cost_model, MeasuredCostModel)
    by_path, _ = outputs(engine_config(tmp_path, profile=str(path)))
    plain, engine = outputs(engine_config(tmp_path, profile="off"))
    assert not isinstance(engine._cost_model, MeasuredCostModel | CorrectedCostModel)
    assert first == again == by_path == plain
    stats = engine.stats()
    assert stats.gpu_blocks_free == stats.gpu_blocks_total
    with pytest.raises(ConfigError, match="measured on something else"):
        outputs(engine_config(tmp_path, profile=str(path), max_batch_size=8))


def test_auto_measures_nothing_on_the_cpu(tmp_path: Path) -> None:
    outputs(engine_config(tmp_path, profile="auto"))
    assert not list(tmp_path.iterdir())


def test_the_command_shows_redoes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "model.num_layers": 2, "engine.gpu.kv_tokens": 256, "engine.cpu.kv_tokens": 256,
        "engine.block_size": 16, "engine.max_model_len": 64, "engine.max_batch_size": 4,
        "engine.max_tokens_in_batch": 16, "engine.profile_folder": tmp_path,
    }  # fmt: skip
    arguments = ["--model", "tiny"]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()
    path = Path(shown[-1])
    assert path.exists() and path.with_suffix(".svg").exists()
    assert any(line.startswith("linear stages over rows") for line in shown)
    measured = path.read_text()
    assert main(arguments) == 0
    assert path.read_text() == measured
    assert main([*arguments, "--redo", "--draw", str(tmp_path / "curves.png")]) == 0
    assert path.read_text() != measured and (tmp_path / "curves.png").exists()


EXPERIMENT = """
name: example
model: {architecture: tiny, weights: dummy}
runs:
  - {name: other, peer: {url: "http://127.0.0.1:9/v1"}}
  - {name: alone, policy: gpu_only}
  - {name: split, policy: neo}
workload: {kind: synthetic, num_requests: 2, input_len: 4, output_len: 4}
"""


@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        ([], "run split of {}, which uses the CPU", "runs that do not have a profile of their own"),
        (["--run", "alone"], "run alone of {}, which does not use the CPU", "runs that do have"),
    ],
)
def test_the_command_says_which_run_it_measures(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    first: str,
    second: str,
) -> None:
    def refuse(*subject: Any) -> None:
        raise ConfigError(f"policy {subject[2]}")

    monkeypatch.setattr("swiftapex.profile._engine", refuse)
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT)
    assert main([str(path), *arguments]) == 2
    shown = capsys.readouterr()
    one, other = shown.out.splitlines()
    assert one == first.format(path) and other.startswith(second)
    assert other.endswith("alone" if not arguments else "split")
    assert f"policy {'gpu_only' if arguments else 'neo'}" in shown.err
    assert main([str(path), "--run", "other"]) == 2
    assert "expected one of alone, split" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "unheard-of"],
        ["nowhere.yaml"],
        ["a.yaml", "--model", "tiny"],
        ["--model", "tiny", "--draw", "curves.xyz"],
    ],
)
def test_wrong_command_lines_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "error:" in capsys.readouterr().err


def test_records_hold_what_the_cpu_attended() -> None:
    config = EngineConfig(
        device="cpu", gpu=GpuConfig(kv_tokens=32), cpu=CpuConfig(kv_tokens=256, threads=1),
        block_size=16, max_model_len=64, max_batch_size=4, max_tokens_in_batch=16,
    )  # fmt: skip
    engine = Engine(TINY, config, policy="fastdecode")
    try:
        for i in range(3):
            engine.add([3 + i, 5, 7], SamplingParams(max_tokens=6, ignore_eos=True))
        while engine.has_work:
            engine.step()
        first, *others = [record.cpu_attention_us for record in engine.iterations]
        assert first is None, "nothing is known of the time before"
        busy_s = engine.busy().cpu_s
        assert busy_s is not None and sum(us or 0 for us in others) == pytest.approx(1e6 * busy_s)
        assert any(us for us in others)
    finally:
        engine.close()
